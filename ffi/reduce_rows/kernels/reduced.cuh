// The partial result of some of a row's entries, and how partial results are merged.
#pragma once

#include "cuda/exponentials.cuh"
#include "reduce_rows/problem.h"

namespace jaxsparse {

// For float it is one instruction, in cuda/arithmetic_instructions.cuh.
__device__ __forceinline__ double MaxOrNan(double a, double b) { return a > b || a != a ? a : b; }

// What exponentials are relative to: the finite number nearest to a maximum. So a row of nothing
// but -inf gets -inf, and one with +inf gets that.
template <typename Acc>
__device__ __forceinline__ Acc FiniteMaximum(Acc max) {
  return -Greater(-Greater(max, kLeastFinite<Acc>), kLeastFinite<Acc>);
}

template <typename Acc, Reduction kReduction>
struct Reduced {
  static constexpr bool kIsMaximum = kReduction == Reduction::kMaximum;
  Acc max;  // of logsumexp, what exponentials are relative to
  Acc sum;  // of these exponentials, in which a NaN is kept

  // What no entries come to.
  __device__ __forceinline__ static Reduced Nothing() {
    return {kIsMaximum ? -kInfinity<Acc> : kLeastFinite<Acc>, 0};
  }
  // Adds numbers; -inf adds nothing.
  template <int kCount>
  __device__ __forceinline__ void Add(const Acc (&x)[kCount]) {
    const Acc before = max;
#pragma unroll
    for (int k = 0; k < kCount; ++k) Compare(x[k]);
    if constexpr (!kIsMaximum) {
      max = FiniteMaximum(max);
      sum *= Exponential(before - max);
#pragma unroll
      for (int k = 0; k < kCount; ++k) sum += Exponential(x[k] - max);
    }
  }
  __device__ __forceinline__ void Add(const Reduced& other) {
    const Acc before = max;
    Compare(other.max);
    if constexpr (!kIsMaximum) {
      sum = sum * Exponential(before - max) + other.sum * Exponential(other.max - max);
    }
  }
  // Adds what groups of so many lanes (a power of 2) have, in a fixed order.
  __device__ __forceinline__ void AddOverLanes(int lanes) {
    const Acc before = max;
    for (int distance = lanes / 2; distance > 0; distance /= 2) {
      Compare(__shfl_xor_sync(kAllLanes, max, distance));
    }
    if constexpr (!kIsMaximum) sum = SumOverLanes(sum * Exponential(before - max), lanes);
  }
  __device__ __forceinline__ Acc Result() const {
    if constexpr (kIsMaximum) return max;
    return max + log(sum);
  }

 private:
  __device__ __forceinline__ void Compare(Acc x) {
    max = kIsMaximum ? MaxOrNan(max, x) : Greater(max, x);
  }
};

}  // namespace jaxsparse
