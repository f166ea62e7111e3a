// Recurrent scans with dense weights in one launch (problem.h). Product warps wait for their
// columns of the last state, multiply, and leave partial sums in shared memory, from which
// pointwise warps go on (dense_steps.cuh).
#include "recurrent/kernels/dense_fma.cuh"
#include "recurrent/kernels/dense_mma.cuh"
#include "recurrent/kernels/dense_steps.cuh"

namespace jaxsparse {

template <bool kTensorCores, typename Plan>
struct ProductOf {
  using type = DenseFma<Plan>;
};
template <typename Plan>
struct ProductOf<true, Plan> {
  using type = DenseMma<Plan>;
};

template <typename Plan, typename Product>
__device__ __forceinline__ void MakeProducts(const RecurrentScanProblem& p, Words4* weights,
                                             float* partials, volatile uint32_t* stop) {
  constexpr DenseSizes kSizes = Plan::kSizes;
  Product product(p, weights);
  Watchdog watchdog(p.wait_limits);
  Backoff backoff(p.poll_delays);
  __syncwarp();
  backoff.Start();
  for (int64_t step = 0; step < p.steps; ++step) {
    BeginStep<Plan>(p, step, backoff, &watchdog);
    const bool timed_out =
        product.Multiply(SlotOf<Plan>(p, step), partials + (step & 1) * kSizes.partials, &watchdog);
    HandOver<Plan>(step, timed_out, stop, &backoff, &watchdog);
  }
}

template <typename Step, typename Plan>
__global__ void __launch_bounds__(Plan::kSizes.threads, Plan::kSizes.resident)
    RecurrentScan(const __grid_constant__ RecurrentScanProblem p) {
  constexpr DenseSizes kSizes = Plan::kSizes;
  using Product = typename ProductOf<Plan::kSizes.tensor_cores, Plan>::type;
  static_assert(kSizes.products == Step::kProducts && kSizes.state_parts == Step::kStates &&
                kSizes.state_bytes == sizeof(typename Plan::State) && kSizes.gets_its_registers);
  extern __shared__ Words4 shared[];
  float* partials = reinterpret_cast<float*>(shared);
  volatile uint32_t* stop = reinterpret_cast<uint32_t*>(shared) + kSizes.flag_at / 4;
  if (threadIdx.x == 0) *stop = 0;
  __syncthreads();
  if (threadIdx.x < kSizes.product_threads) {
    if constexpr (kSizes.product_registers > 0) TakeRegisters<kSizes.product_registers>();
    MakeProducts<Plan, Product>(p, shared + kSizes.weights_at / 16, partials, stop);
  } else {
    if constexpr (kSizes.product_registers > 0) GiveUpRegisters<kSizes.pointwise_registers>();
    MakeSteps<Step, Plan>(p, partials, stop);
  }
}

}  // namespace jaxsparse
