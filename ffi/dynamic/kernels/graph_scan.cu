// One cell over any graph in one launch (problem.h). Teams of blocks keep a copy of the weights on
// chip each, and run side by side; a team's blocks find each other's states in the results
// themselves, whose words are their own flags. There are no levels and no barriers: a tile is made
// as soon as its sources are there.
#include "dynamic/kernels/gather_product.cuh"
#include "dynamic/kernels/gather_steps.cuh"
#include "dynamic/kernels/team.h"

namespace jaxsparse {

template <typename Step, typename Plan>
__global__ void __launch_bounds__(Plan::kSizes.threads, 1)
    GraphGather(const __grid_constant__ GraphScanProblem p) {
  constexpr TeamSizes kSizes = Plan::kSizes;
  static_assert(kSizes.row_parts == Step::kProducts && kSizes.column_parts == Plan::kSlots &&
                kSizes.state_bytes == sizeof(typename Plan::State));
  extern __shared__ Words4 shared[];
  volatile uint32_t* stop = reinterpret_cast<uint32_t*>(shared) + kSizes.flag_at / 4;
  if (threadIdx.x == 0) {
    *stop = 0;
    Ring<Plan>(shared).Init();
  }
  __syncthreads();
  if (threadIdx.x < kSizes.product_threads) {
    if constexpr (kSizes.product_registers > 0) TakeRegisters<kSizes.product_registers>();
    using Product = TeamMma<Plan, GatherMatrix<Plan>>;
    GatherProducts<Plan, Product>(p, shared, stop).Run(p);
  } else {
    if constexpr (kSizes.product_registers > 0) GiveUpRegisters<kSizes.pointwise_registers>();
    GatherSteps<Step, Plan>(p, shared, stop).Run(p);
  }
}

}  // namespace jaxsparse
