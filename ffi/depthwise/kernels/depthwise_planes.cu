// Planes of a depthwise convolution (depthwise/problem.h), and of its transpose in x: a thread
// makes some rows of four columns. It has all it reads of a row in registers, and adds it to every
// row of the result that it belongs to.
#include "cuda/activation.cuh"
#include "depthwise/kernels/depthwise_planes.h"
#include "depthwise/kernels/segments.cuh"

namespace jaxsparse {

// A convolution: y of x, or with stride 1 also x of y, by the flipped kernel.
template <typename T, typename Out, DepthwisePlanesConfig kConfig>
__global__ void __launch_bounds__(kDepthwiseThreads)
    DepthwisePlanes(const __grid_constant__ DepthwiseProblem p) {
  constexpr bool kBack = kConfig.transposed;
  constexpr int kStride = kConfig.stride, kRows = kConfig.rows;
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
    const int64_t first = static_cast<int64_t>(place.strip) * kRows;
    constexpr int kRead = kStride * (kRows - 1) + kTaps;
    float x[kRead][kSpan<kStride>];
    LoadRows<kStride, kConfig.left>(from, kStride * first - above, height, width, place.group, x);
#pragma unroll
    for (int s = 0; s < kRead; ++s) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int i = s - kStride * r;
        if (i < 0 || i >= kTaps) continue;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
#pragma unroll
          for (int c = 0; c < kWindows; ++c) sums[r][c] += taps[i][j] * x[s][kStride * c + j];
        }
      }
    }
    const int64_t column = static_cast<int64_t>(place.group) * kWindows;
    const int64_t at = (place.plane * rows + first) * columns + column;
    Out* out = result.At<Out>(p.batch, place.entry) + at;
    Out* kept = p.preactivation.data == nullptr
                    ? nullptr
                    : p.preactivation.At<Out>(p.batch, place.entry) + at;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= rows) break;
      if (kept != nullptr) StoreFour(sums[r], kept + r * columns, columns - column);
#pragma unroll
      for (int c = 0; c < kWindows; ++c) sums[r][c] = Activate(p.activation, sums[r][c]);
      StoreFour(sums[r], out + r * columns, columns - column);
    }
  }
}

// x of y with stride 2: a row or column of x is read by windows of one parity, so by one or two
// taps.
template <typename T, typename Out, DepthwisePlanesConfig kConfig>
__global__ void __launch_bounds__(kDepthwiseThreads)
    DepthwiseSpread(const __grid_constant__ DepthwiseProblem p) {
  constexpr int kRows = kDepthwiseSpreadRows, kReach = 4;  // windows that four columns belong to
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
          y[i] = At(from + window * p.columns, first + i, static_cast<int>(p.columns));
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
      StoreFour(sums, out + row * p.width, p.width - column);
    }
  }
}

}  // namespace jaxsparse
