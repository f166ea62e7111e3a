// One row of the softmax or of its derivative by a group of lanes, however long it is: the forward
// pass reads it three times, of which L1 or L2 serve two.
#pragma once

#include "common/device.cuh"
#include "sparse_softmax/problem.h"

namespace jaxsparse {

template <int kLanes, typename Acc>
__device__ __forceinline__ Acc MaxOverLanes(Acc x) {
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const Acc other = __shfl_xor_sync(kAllLanes, x, distance);
    x = other > x ? other : x;
  }
  return x;
}

template <typename T>
__device__ void ForwardRow(const T* values, T* out, RowBounds bounds, Accumulator<T> scale) {
  using Acc = Accumulator<T>;
  const int lane = threadIdx.x % kWarp;
  Acc max = -Acc(1) / Acc(0);
  for (int64_t i = bounds.begin + lane; i < bounds.end; i += kWarp) {
    const Acc value = scale * ToAccumulator(values[i]);
    max = value > max ? value : max;  // a NaN is skipped here and reaches the sum below
  }
  max = MaxOverLanes<kWarp>(max);
  Acc sum = 0;
  for (int64_t i = bounds.begin + lane; i < bounds.end; i += kWarp) {
    sum += exp(scale * ToAccumulator(values[i]) - max);
  }
  sum = SumOverLanes(sum, kWarp);
  for (int64_t i = bounds.begin + lane; i < bounds.end; i += kWarp) {
    FromAccumulator(exp(scale * ToAccumulator(values[i]) - max) / sum, &out[i]);
  }
}

template <typename T>
__device__ void BackwardRow(const T* y, const T* tangent, T* out, RowBounds bounds,
                            Accumulator<T> scale) {
  const int lane = threadIdx.x % kWarp;
  Accumulator<T> sum = 0;
  for (int64_t i = bounds.begin + lane; i < bounds.end; i += kWarp) {
    sum += ToAccumulator(y[i]) * ToAccumulator(tangent[i]);
  }
  sum = SumOverLanes(sum, kWarp);
  for (int64_t i = bounds.begin + lane; i < bounds.end; i += kWarp) {
    FromAccumulator(scale * ToAccumulator(y[i]) * (ToAccumulator(tangent[i]) - sum), &out[i]);
  }
}

}  // namespace jaxsparse
