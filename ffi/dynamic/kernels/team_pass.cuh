// What a block has ready before its warps begin with a pass.
#pragma once

#include "dynamic/kernels/carry_window.cuh"
#include "dynamic/kernels/ring.cuh"

namespace jaxsparse {

// By the first thread of a block, before all of it meet: what warps tell each other in a pass.
template <typename Plan>
__device__ __forceinline__ volatile uint32_t* BeginPass(Words4* shared) {
  volatile uint32_t* stop = reinterpret_cast<uint32_t*>(shared) + Plan::kSizes.flag_at / 4;
  if (threadIdx.x == 0) {
    *stop = 0;
    Ring<Plan>(shared).Init();
    if constexpr (Plan::kSizes.made > 0) CarryWindow<Plan>(shared).Init();
  }
  return stop;
}

}  // namespace jaxsparse
