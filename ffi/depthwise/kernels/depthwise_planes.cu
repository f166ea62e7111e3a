// Planes of a depthwise convolution (depthwise/problem.h), and of its transpose in x: a thread
// makes some rows of four or eight columns. It has all it reads of a row in registers, and adds it
// to every row of the result that it belongs to.
#include "cuda/activation.cuh"
#include "depthwise/kernels/depthwise_planes.h"
#include "depthwise/kernels/segments.cuh"

namespace jaxsparse {

template <Activation kActivation, int kRows, int kColumns>
__device__ __forceinline__ void ActivateAll(float (&sums)[kRows][kColumns]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) sums[r][c] = Activate(kActivation, sums[r][c]);
  }
}

// The rows that there are, of a result whose rows have `columns` places.
template <typename Out, int kRows, int kColumns>
__device__ __forceinline__ void StoreRows(const float (&values)[kRows][kColumns], int rows,
                                          int64_t columns, int left, Out* to) {
#pragma unroll
  for (int r = 0; r < kRows; ++r, to += columns) {
    if (r < rows) StoreRow(values[r], to, left);
  }
}

// A convolution: y of x, or with stride 1 also x of y, by the flipped kernel.
template <typename T, typename Out, DepthwisePlanesConfig kConfig>
__global__ void __launch_bounds__(kDepthwiseThreads)
    DepthwisePlanes(const __grid_constant__ DepthwiseProblem p) {
  constexpr bool kBack = kConfig.transposed;
  constexpr int kStride = kConfig.stride, kRows = kConfig.rows, kWindows = kConfig.columns;
  const Array &source = kBack ? p.y : p.x, &result = kBack ? p.x : p.y;
  const int64_t height = kBack ? p.rows : p.height, width = kBack ? p.columns : p.width;
  const int64_t rows = kBack ? p.height : p.rows, columns = kBack ? p.width : p.columns;
  const int above = kBack ? kTaps - 1 - p.above : p.above;
  const int64_t groups = CeilDivide(columns, kWindows), strips = CeilDivide(rows, kRows);
  const int64_t planes = p.Planes(), units = p.batch.count * planes * strips * groups;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; unit < units;
       unit += step) {
    const PlaneUnit place(static_cast<uint32_t>(unit), planes, strips, groups);
    const int64_t channel = ChannelOf(p, place.plane);
    const T* from = source.At<const T>(p.batch, place.entry) + place.plane * height * width;
    float taps[kTaps][kTaps];
    LoadTaps(p.kernel.At<const T>(p.batch, place.entry) + channel * kTaps * kTaps, kBack, taps);
    const float bias = p.bias.data == nullptr
                           ? 0.0f
                           : ToAccumulator(p.bias.At<const T>(p.batch, place.entry)[channel]);
    float sums[kRows][kWindows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int c = 0; c < kWindows; ++c) sums[r][c] = bias;
    }
    const int first = static_cast<int>(place.strip) * kRows;
    constexpr int kRead = kStride * (kRows - 1) + kTaps;
    using Row = Segment<T, kStride, kWindows, kConfig.left>;
    Row loaded[kRead];
    LoadRows(from, kStride * first - above, static_cast<int>(height), static_cast<int>(width),
             place.group, loaded);
#pragma unroll
    for (int s = 0; s < kRead; ++s) {
      float x[Row::kSpan];
#pragma unroll
      for (int i = 0; i < Row::kSpan; ++i) x[i] = loaded[s][i];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int i = s - kStride * r;
        if (i < 0 || i >= kTaps) continue;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
#pragma unroll
          for (int c = 0; c < kWindows; ++c) sums[r][c] += taps[i][j] * x[kStride * c + j];
        }
      }
    }
    const int column = static_cast<int>(place.group) * kWindows;
    const int left = static_cast<int>(columns) - column;
    const int64_t at = (place.plane * rows + first) * columns + column;
    const int exist = static_cast<int>(rows) - first;
    if (p.preactivation.data != nullptr) {
      Out* kept = p.preactivation.At<Out>(p.batch, place.entry) + at;
      StoreRows(sums, exist, columns, left, kept);
    }
    // One branch for all sums.
    if (p.activation == Activation::kRelu) ActivateAll<Activation::kRelu>(sums);
    if (p.activation == Activation::kGelu) ActivateAll<Activation::kGelu>(sums);
    StoreRows(sums, exist, columns, left, result.At<Out>(p.batch, place.entry) + at);
  }
}

// x of y with stride 2: a row or column of x is read by windows of one parity, so by one or two
// taps.
template <typename T, typename Out, DepthwisePlanesConfig kConfig>
__global__ void __launch_bounds__(kDepthwiseThreads)
    DepthwiseSpread(const __grid_constant__ DepthwiseProblem p) {
  constexpr int kRows = kDepthwiseSpreadRows, kWindows = kConfig.columns;
  constexpr int kReach = kWindows / 2 + 2;  // windows that they belong to
  const int64_t groups = CeilDivide(p.width, kWindows), strips = CeilDivide(p.height, kRows);
  const int64_t planes = p.Planes(), units = p.batch.count * planes * strips * groups;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; unit < units;
       unit += step) {
    const PlaneUnit place(static_cast<uint32_t>(unit), planes, strips, groups);
    const T* from = p.y.At<const T>(p.batch, place.entry) + place.plane * p.rows * p.columns;
    float taps[kTaps][kTaps];
    LoadTaps(p.kernel.At<const T>(p.batch, place.entry) + ChannelOf(p, place.plane) * kTaps * kTaps,
             false, taps);
    const int64_t column = static_cast<int64_t>(place.group) * kWindows;
    Out* out = p.x.At<Out>(p.batch, place.entry) + place.plane * p.height * p.width + column;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = static_cast<int64_t>(place.strip) * kRows + r;
      if (row >= p.height) break;
      // Window t reads the row by tap row + above - 2 t: of an even sum two windows do.
      const int64_t last = (row + p.above) / 2;
      const bool odd = (row + p.above) % 2 != 0;
      float sums[kWindows] = {};
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const int64_t window = last - w;
        if ((w == 1 && odd) || window < 0 || window >= p.rows) continue;
        float y[kReach], tap[kTaps];
#pragma unroll
        for (int i = 0; i < kReach; ++i) {
          const int first = static_cast<int>(place.group * (kWindows / 2)) - 1;
          y[i] = ToAccumulator(
              At(from + window * p.columns + first, i, first, static_cast<int>(p.columns)));
        }
#pragma unroll
        for (int j = 0; j < kTaps; ++j)
          tap[j] = w == 1 ? taps[2][j] : odd ? taps[1][j] : taps[0][j];
#pragma unroll
        for (int c = 0; c < kWindows; ++c) {
          constexpr int kLeft = kConfig.left;
          const int ahead = (c + kLeft) / 2;
          if ((c + kLeft) % 2 != 0) {
            sums[c] += tap[1] * y[ahead + 1];
          } else {
            sums[c] += tap[0] * y[ahead + 1];
            sums[c] += tap[2] * y[ahead];
          }
        }
      }
      StoreRow(sums, out + row * p.width, static_cast<int>(p.width - column));
    }
  }
}

}  // namespace jaxsparse
