// The loss of a net over graphs and what its gradient is made of, in one launch (loss_problem.h).
// The passes are those of graph_scan.cu, by the same teams, whose blocks go from the first to the
// second each for itself: what they tell each other are data that are their own flags.
//
//   first pass     product warps: products     pointwise warps: steps     the others: heads
//   second pass    product warps: products     pointwise warps: steps     the others: sums
//
// Heads wait for states alone, so that the first pass ends whatever becomes of the second. What the
// second pass reads of the first lies with the block that made it.
#include "dynamic/kernels/emit_product.cuh"
#include "dynamic/kernels/emit_steps.cuh"
#include "dynamic/kernels/emit_sums.cuh"
#include "dynamic/kernels/gather_product.cuh"
#include "dynamic/kernels/gather_steps.cuh"
#include "dynamic/kernels/loss_heads.cuh"
#include "dynamic/kernels/loss_sizes.h"
#include "dynamic/kernels/loss_sums.cuh"
#include "dynamic/kernels/team_pass.cuh"
#include "dynamic/kernels/team_product.cuh"

namespace jaxsparse {

template <typename GatherPlan, typename EmitPlan, int kClasses, typename HeadBias>
struct LossPlan {
  using Gather = GatherPlan;
  using Emit = EmitPlan;
  using Bias = HeadBias;
  static constexpr LossSizes kSizes{GatherPlan::kSizes, EmitPlan::kSizes, kClasses};
};

// Product warps, in both passes. The second one's weights are on their way while the last heads are
// made.
template <typename Loss>
__device__ __forceinline__ void MakeProducts(const GraphLossProblem& p, Words4* shared,
                                             volatile uint32_t* stop, Words4* shared_of_emit,
                                             volatile uint32_t* stop_of_emit) {
  using Gather = typename Loss::Gather;
  using Emit = typename Loss::Emit;
  using Forward = TeamProduct<Gather, GatherWeights<Gather>>;
  using Backward = TeamProduct<Emit, EmitWeights<Emit>>;
  GatherProducts<Gather, Forward>(p.gather, shared, stop).Run(p.gather);
  MeetBlock<Gather>();  // as the others meet when steps are made, and heads
  MeetBlock<Gather>();
  EmitProducts<Emit, Backward>(p.emit, shared_of_emit, stop_of_emit).Run(p.emit);
  if (blockIdx.x == 0) LossSums<Emit, Loss>::template AddParts<Emit::kSizes.product_threads>(p);
}

// Warps that sum in the second pass do so while product warps load the first one's weights.
template <typename EmitPlan>
__device__ __forceinline__ void ClearSums(const GraphScanProblem& p) {
  constexpr TeamSizes kSizes = EmitPlan::kSizes;
  constexpr uint32_t kFirst = kSizes.product_threads + kSizes.pointwise_threads;
  if (threadIdx.x >= kFirst && threadIdx.x < kSizes.threads) EmitSums<EmitPlan>::ClearFarSums(p);
}

template <typename GatherStep, typename GatherPlan, typename EmitStep, typename EmitPlan,
          int kClasses, typename HeadBias>
__global__ void __launch_bounds__(
    LossPlan<GatherPlan, EmitPlan, kClasses, HeadBias>::kSizes.threads, 1)
    GraphLoss(const __grid_constant__ GraphLossProblem p) {
  using Loss = LossPlan<GatherPlan, EmitPlan, kClasses, HeadBias>;
  constexpr LossSizes kSizes = Loss::kSizes;
  constexpr TeamSizes kGather = GatherPlan::kSizes, kEmit = EmitPlan::kSizes;
  static_assert(kGather.product_threads == kEmit.product_threads && kGather.units == kEmit.units &&
                kGather.all_warps == kEmit.all_warps && kSizes.head_warps > 0);
  // All threads meet at each tile, so that none must be idle.
  static_assert(!EmitPlan::kBarrier || kEmit.beside_warps == 0);
  constexpr int kHeadsAndSteps = kSizes.threads - kSizes.gather.product_threads;
  // Its ring is free when all pointwise warps are done with it.
  static_assert(kEmit.window_before == 0 || (kEmit.window_before == kSizes.emit_at &&
                                             kEmit.window_bytes <= kGather.barriers_at));
  constexpr int kBetween = 6;       // a named barrier, of all that make no products
  constexpr int kStepsAreMade = 7;  // of the first pass' pointwise warps
  extern __shared__ Words4 shared[];
  Words4* const shared_of_emit = shared + kSizes.emit_at / 16;
  volatile uint32_t* const stop = BeginPass<GatherPlan>(shared);
  volatile uint32_t* const stop_of_emit = BeginPass<EmitPlan>(shared_of_emit);
  __syncthreads();
  if (threadIdx.x < kGather.product_threads) {
    if constexpr (kGather.product_registers > 0) TakeRegisters<kGather.product_registers>();
    MakeProducts<Loss>(p, shared, stop, shared_of_emit, stop_of_emit);
    return;
  }
  if (threadIdx.x < kGather.product_threads + kGather.pointwise_threads) {
    if constexpr (kGather.product_registers > 0) GiveUpRegisters<kGather.pointwise_registers>();
    ClearSums<EmitPlan>(p.emit);
    GatherSteps<GatherStep, GatherPlan>(p.gather, shared, stop).Run(p.gather);
    MeetSome<GatherPlan, kGather.pointwise_threads>(kStepsAreMade);
  } else {
    if constexpr (kGather.product_registers > 0) GiveUpRegisters<kGather.sum_registers>();
    ClearSums<EmitPlan>(p.emit);
    LossHeads<GatherPlan, Loss>(p, shared, stop_of_emit).Run(p);
    MeetBlock<GatherPlan>();
  }
  if (threadIdx.x < kEmit.product_threads + kEmit.pointwise_threads) {
    EmitSteps<EmitStep, EmitPlan> steps(p.emit, shared_of_emit, stop_of_emit);
    steps.Begin(p.emit);  // while the last heads are made
    MeetSome<GatherPlan, kHeadsAndSteps>(kBetween);
    steps.AskForFirst(p.emit);
    steps.Run(p.emit);
  } else {
    MeetSome<GatherPlan, kHeadsAndSteps>(kBetween);
    if (threadIdx.x < kEmit.threads) EmitSums<EmitPlan>(p.emit, shared_of_emit).Run(p.emit);
  }
}

}  // namespace jaxsparse
