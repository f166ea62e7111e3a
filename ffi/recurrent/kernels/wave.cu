// The layers of a stack in one launch, step t of a layer beside step t + 1 of the layer below it
// (problem.h). Each layer, or part of its batch, is a dense scan (dense.cu) with blocks and an
// exchange buffer of its own. To its products it adds those of the states that the layer below has
// published for the same step, by input weights that are kept on chip, too.
//
// Floors of a step, for all layers at once, h units, batch B, states S, products P, on M
// multiprocessors:
//   exchange: a block receives its own last state and that of the layer below, 2 S h B numbers; the
//     second one was published a step ago, so that it costs bandwidth only. In 16 bits 0.71 us for
//     16 + 16 KB, 0.87 for 32 + 32, 1.33 for 64 + 64 in a probe with 4 x 32 blocks.
//   products: 4 L S P h^2 B flops on all tensor cores. What is in the way between receiving a state
//     and publishing the next one is the own half of it.
// So a wave of L layers takes T + L - 1 steps of little more time than one layer's, instead of L T.
#include "recurrent/kernels/dense_steps.cuh"
#include "recurrent/kernels/wave_mma.cuh"
#include "recurrent/kernels/wave_stationary.cuh"
#include "recurrent/kernels/wave_wgmma.cuh"

namespace jaxsparse {

template <typename Plan>
__device__ __forceinline__ const typename Plan::State* SlotBelow(const RecurrentWaveLayer& p,
                                                                 int64_t step) {
  return SlotAfter<Plan>(p.below_exchange, p, step);
}

// What product warps do, by the sizes of a plan.
template <typename Plan, typename Sizes>
struct ProductsOfWave;
template <typename Plan>
struct ProductsOfWave<Plan, WaveSizes> {
  using type = WaveMma<Plan>;
};
template <typename Plan>
struct ProductsOfWave<Plan, WaveWgmmaSizes> {
  using type = WaveWgmma<Plan>;
};
template <typename Plan>
struct ProductsOfWave<Plan, WaveStationarySizes> {
  using type = WaveStationary<Plan>;
};
template <typename Plan, typename Sizes>
__device__ ProductsOfWave<Plan, Sizes> ProductsBySizes(const Sizes&);

template <typename Plan>
__device__ __forceinline__ void MakeProducts(const RecurrentWaveLayer& p, Words4* shared,
                                             float* partials, float* sums_of_below,
                                             volatile uint32_t* stop) {
  constexpr auto kSizes = Plan::kSizes;
  using Products = typename decltype(ProductsBySizes<Plan>(Plan::kSizes))::type;
  Products product(p, shared);
  Watchdog watchdog(p.wait_limits);
  Backoff backoff(p.poll_delays);
  const bool has_below = p.below_exchange != nullptr;
  if (kSizes.means.scales && !has_below) {
    for (int i = threadIdx.x; i < kSizes.means.buffers * kSizes.means.buffer;
         i += kSizes.product_threads) {
      sums_of_below[i] = 0.f;
    }
  }
  __syncwarp();
  if (has_below) product.AskBelow(SlotBelow<Plan>(p, 0));
  backoff.Start();
  for (int64_t step = 0; step < p.steps; ++step) {
    typename Products::Sums sums = {};
    if (has_below) {
      Delay<Plan::kMostDelay>(~step);
      product.MultiplyBelow(SlotBelow<Plan>(p, step), &watchdog, sums);
      watchdog.TakeHasWaited();
    }
    float* to_sums = BufferOf<Plan>(sums_of_below, step);
    if constexpr (kSizes.means.scales) {
      if (has_below) {
        product.WriteSums(to_sums);
        ScaleByNorm<Plan>(to_sums, p.norm_epsilon, sums);
      }
    }
    BeginStep<Plan>(p, step, backoff, &watchdog);
    const auto* own = SlotOf<Plan>(p, step);
    product.AskOwn(own);
    const bool asks = has_below && step + 1 < p.steps;
    const auto* next_below = asks ? SlotBelow<Plan>(p, step + 1) : nullptr;
    const bool timed_out = product.MultiplyOwn(
        own, next_below, partials + (step & 1) * kSizes.partials, &watchdog, sums);
    if constexpr (kSizes.means.count > 0 && !kSizes.means.scales) {
      if (!timed_out) product.WriteSums(to_sums);
    }
    HandOver<Plan>(step, timed_out, stop, &backoff, &watchdog);
  }
}

template <typename Step, typename Plan>
__global__ void __launch_bounds__(Plan::kSizes.threads, Plan::kSizes.resident)
    RecurrentWaveScan(const __grid_constant__ RecurrentWave<Plan::kLayers> wave) {
  constexpr auto kSizes = Plan::kSizes;
  static_assert(kSizes.products <= Step::kProducts && kSizes.state_parts == Step::kStates &&
                kSizes.state_bytes == sizeof(typename Plan::State) && kSizes.gets_its_registers);
  const RecurrentWaveLayer& p = wave.layer[LayerOfBlock<Plan>()];
  extern __shared__ __align__(1024) Words4 shared[];
  float* partials = reinterpret_cast<float*>(shared);
  float* sums_of_below = partials + kSizes.means_at / 4;
  volatile uint32_t* stop = reinterpret_cast<uint32_t*>(shared) + kSizes.flag_at / 4;
  if (threadIdx.x == 0) *stop = 0;
  __syncthreads();
  if (threadIdx.x < kSizes.product_threads) {
    if constexpr (kSizes.product_registers > 0) TakeRegisters<kSizes.product_registers>();
    MakeProducts<Plan>(p, shared, partials, sums_of_below, stop);
  } else {
    if constexpr (kSizes.product_registers > 0) GiveUpRegisters<kSizes.pointwise_registers>();
    MakeSteps<Step, Plan>(p, partials, stop, AddedByLayers<Plan>(p, sums_of_below));
  }
}

}  // namespace jaxsparse
