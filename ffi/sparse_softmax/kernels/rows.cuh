// One row of the softmax or of its derivative by a warp, however long it is: the forward pass reads
// it three times, of which L1 or L2 serve two. And the padding of a batch entry.
#pragma once

#include "cuda/exponentials.cuh"
#include "sparse_softmax/problem.h"

namespace jaxsparse {

// As SumOverLanes.
template <typename Acc>
__device__ __forceinline__ Acc MaxOverLanes(Acc x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    const Acc other = __shfl_xor_sync(kAllLanes, x, distance);
    x = other > x ? other : x;
  }
  return x;
}

template <typename T>
__device__ void ClearPadding(T* out, const int32_t* row_offsets, int64_t rows, int64_t nse) {
  const int64_t stored = rows == 0 ? 0 : RowBounds::Clamp(row_offsets[rows], nse);
  for (int64_t i = stored + threadIdx.x % kWarp; i < nse; i += kWarp) {
    FromAccumulator(Accumulator<T>(0), &out[i]);
  }
}

template <typename T>
__device__ void ForwardRow(const T* values, T* out, RowBounds bounds, Accumulator<T> scale) {
  using Acc = Accumulator<T>;
  const int lane = threadIdx.x % kWarp;
  Acc max = -kInfinity<Acc>;
  for (int64_t i = bounds.begin + lane; i < bounds.end; i += kWarp) {
    const Acc value = scale * ToAccumulator(values[i]);
    max = value > max ? value : max;  // a NaN is skipped here and reaches the sum below
  }
  max = MaxOverLanes(max, kWarp);
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
