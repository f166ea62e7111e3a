// Barriers of a block whose warps have different roles and meet from different places of the code:
// these are not `aligned`, as __syncthreads() is, which promises that all come to the same place.
#pragma once

namespace jaxsparse {

constexpr int kAllThreads = 0;  // the barrier at which only all of a block's threads meet

template <int kThreads>
__device__ __forceinline__ void ArriveAt(int barrier) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}
template <int kThreads>
__device__ __forceinline__ void WaitAt(int barrier) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

}  // namespace jaxsparse
