// One cell over any graph in one launch (problem.h). Teams of blocks keep a copy of the weights on
// chip each, and run side by side; a team's blocks find each other's states in the results
// themselves, whose words are their own flags. There are no levels and no barriers: a tile is made
// as soon as its sources are there.
#include "dynamic/kernels/emit_product.cuh"
#include "dynamic/kernels/emit_steps.cuh"
#include "dynamic/kernels/emit_sums.cuh"
#include "dynamic/kernels/gather_product.cuh"
#include "dynamic/kernels/gather_steps.cuh"
#include "dynamic/kernels/team.h"
#include "dynamic/kernels/team_pass.cuh"
#include "dynamic/kernels/team_product.cuh"

namespace jaxsparse {

// By the first thread of a block, before the others go on.
template <typename Plan>
__device__ __forceinline__ volatile uint32_t* BeginBlock(Words4* shared) {
  volatile uint32_t* stop = BeginPass<Plan>(shared);
  __syncthreads();
  return stop;
}

// Rows gather from their sources.
template <typename Step, typename Plan>
__global__ void __launch_bounds__(Plan::kSizes.threads, 1)
    GraphGather(const __grid_constant__ GraphScanProblem p) {
  constexpr TeamSizes kSizes = Plan::kSizes;
  static_assert(kSizes.row_parts == Step::kProducts && kSizes.column_parts == Plan::kSlots &&
                kSizes.state_bytes == sizeof(typename Plan::State) && kSizes.sum_warps == 0);
  extern __shared__ Words4 shared[];
  volatile uint32_t* stop = BeginBlock<Plan>(shared);
  if (threadIdx.x < kSizes.product_threads) {
    if constexpr (kSizes.product_registers > 0) TakeRegisters<kSizes.product_registers>();
    using Product = TeamProduct<Plan, GatherWeights<Plan>>;
    GatherProducts<Plan, Product>(p, shared, stop).Run(p);
  } else {
    if constexpr (kSizes.product_registers > 0) GiveUpRegisters<kSizes.pointwise_registers>();
    GatherSteps<Step, Plan>(p, shared, stop).Run(p);
  }
}

// Rows emit to their sources.
template <typename Step, typename Plan>
__global__ void __launch_bounds__(Plan::kSizes.threads, 1)
    GraphEmit(const __grid_constant__ GraphScanProblem p) {
  constexpr TeamSizes kSizes = Plan::kSizes;
  static_assert(kSizes.row_parts == Plan::kSlots && kSizes.column_parts == Step::kStates &&
                kSizes.state_bytes == sizeof(typename Plan::State) && kSizes.sum_warps > 0);
  extern __shared__ Words4 shared[];
  volatile uint32_t* stop = BeginBlock<Plan>(shared);
  if (threadIdx.x < kSizes.product_threads) {
    if constexpr (kSizes.product_registers > 0) TakeRegisters<kSizes.product_registers>();
    using Product = TeamProduct<Plan, EmitWeights<Plan>>;
    EmitProducts<Plan, Product>(p, shared, stop).Run(p);
  } else if (threadIdx.x < kSizes.product_threads + kSizes.pointwise_threads) {
    if constexpr (kSizes.product_registers > 0) GiveUpRegisters<kSizes.pointwise_registers>();
    EmitSteps<Step, Plan> steps(p, shared, stop);
    steps.AskForFirst(p);
    steps.Begin(p);
    steps.Run(p);
  } else {
    if constexpr (kSizes.product_registers > 0) GiveUpRegisters<kSizes.sum_registers>();
    EmitSums<Plan>::ClearFarSums(p);
    EmitSums<Plan>(p, shared).Run(p);
  }
}

}  // namespace jaxsparse
