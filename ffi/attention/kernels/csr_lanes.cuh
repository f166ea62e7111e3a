// Where the lanes of a group lie in a warp, and which entry of a step is a lane's own.
#pragma once

#include "attention/kernels/csr.h"
#include "cuda/device.cuh"

namespace jaxsparse {

// Sum(x, y) over lanes whose numbers differ by some bits: the same in all of them.
struct Sum {
  template <typename X>
  __device__ __forceinline__ X operator()(X x, X y) const {
    return x + y;
  }
};
// The greater one, and x where y is NaN.
struct Greater {
  template <typename X>
  __device__ __forceinline__ X operator()(X x, X y) const {
    return y > x ? y : x;
  }
};

// Neighbours. An entry is the own one of every kConfig.step-th lane of a group.
template <AttentionCsrConfig kConfig>
struct CsrLanes {
  static __device__ __forceinline__ uint32_t Group() { return threadIdx.x % kWarp / kConfig.lanes; }
  // Of the parts of a vector: the one that this lane has.
  static __device__ __forceinline__ uint32_t Part() { return threadIdx.x % kConfig.lanes; }
  static __device__ __forceinline__ uint32_t OwnEntry() { return threadIdx.x % kConfig.step; }
  static __device__ __forceinline__ bool IsFirst() { return Part() == 0; }  // of its group
  static __device__ __forceinline__ uint32_t FirstOf(uint32_t group) {
    return group * kConfig.lanes;
  }

  // What the lane that has an entry of a step knows of it.
  template <typename X>
  static __device__ __forceinline__ X OfEntry(X x, int entry) {
    return __shfl_sync(kAllLanes, x, entry, kConfig.lanes);
  }
  // Over the entries of a step.
  template <typename X, typename F>
  static __device__ __forceinline__ X OverEntries(X x, F&& f) {
#pragma unroll
    for (int distance = 1; distance < kConfig.step; distance *= 2) {
      x = f(x, __shfl_xor_sync(kAllLanes, x, distance));
    }
    return x;
  }
  // Over the groups of a warp, of lanes that have the same part.
  template <typename X, typename F>
  static __device__ __forceinline__ X OverGroups(X x, F&& f) {
#pragma unroll
    for (int distance = kConfig.lanes; distance < kWarp; distance *= 2) {
      x = f(x, __shfl_xor_sync(kAllLanes, x, distance));
    }
    return x;
  }
  // Of sums for the entries of a step, of which each lane of a group has a part: a lane's own one.
  template <typename Acc>
  static __device__ __forceinline__ Acc SumOfOwnEntry(Acc (&sums)[kConfig.step]) {
    Acc sum = ExchangeSums(sums);
#pragma unroll
    for (int distance = kConfig.step; distance < kConfig.lanes; distance *= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    return sum;
  }
};

// As tensor cores have operands: lane % 4 is the group, of four, and lane / 4 the place in it, of
// eight. Bits 0 and 2 of the place tell the own entry, of four. Parts of a vector go round by the
// group, so that eight neighbouring lanes, which read four vectors, read eight different parts: as
// many banks of the cache.
template <AttentionCsrConfig kConfig>
  requires(kConfig.on_tensor_cores)
struct CsrLanes<kConfig> {
  static_assert(kConfig.lanes == kCsrTensorLanes && kConfig.step == kCsrTensorStep);

  static __device__ __forceinline__ uint32_t Group() { return threadIdx.x % 4; }
  static __device__ __forceinline__ uint32_t Place() { return threadIdx.x % kWarp / 4; }
  static __device__ __forceinline__ uint32_t Part() { return Place() ^ 2 * Group(); }
  static __device__ __forceinline__ uint32_t OwnEntry() { return Place() % 2 * 2 + Place() / 4; }
  static __device__ __forceinline__ bool IsFirst() { return Place() == 0; }
  static __device__ __forceinline__ uint32_t FirstOf(uint32_t group) { return group; }
  // A lane that has an entry of a group.
  static __device__ __forceinline__ uint32_t LaneOf(uint32_t group, uint32_t entry) {
    return entry / 2 * 4 + entry % 2 * 16 + group;
  }

  template <typename X>
  static __device__ __forceinline__ X OfEntry(X x, int entry) {
    return __shfl_sync(kAllLanes, x, LaneOf(Group(), entry));
  }
  template <typename X, typename F>
  static __device__ __forceinline__ X OverEntries(X x, F&& f) {
    x = f(x, __shfl_xor_sync(kAllLanes, x, 4));
    return f(x, __shfl_xor_sync(kAllLanes, x, 16));
  }
  // Another group's lane with the same part has another place.
  template <typename X, typename F>
  static __device__ __forceinline__ X OverGroups(X x, F&& f) {
    x = f(x, __shfl_xor_sync(kAllLanes, x, 1 + 4 * 2));
    return f(x, __shfl_xor_sync(kAllLanes, x, 2 + 4 * 4));
  }
  template <typename Acc>
  static __device__ __forceinline__ Acc SumOfOwnEntry(Acc (&sums)[4]) {
    Acc own = 0;
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      Acc sum = OverEntries(sums[u], Sum());
      sum += __shfl_xor_sync(kAllLanes, sum, 8);
      if (u == static_cast<int>(OwnEntry())) own = sum;
    }
    return own;
  }
};

}  // namespace jaxsparse
