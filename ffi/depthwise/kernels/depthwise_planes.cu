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
// taps. Strips begin with the first row that a window reads, which may be one in front of x, so
// that a strip of two rows belongs to two rows of windows, and four places to nine products.
template <typename T, typename Out, DepthwisePlanesConfig kConfig>
__global__ void __launch_bounds__(kDepthwiseThreads)
    DepthwiseSpread(const __grid_constant__ DepthwiseProblem p) {
  constexpr int kRows = kConfig.rows, kColumns = kConfig.columns, kLeft = kConfig.left;
  constexpr int kBefore = kLeft == 0 ? 1 : 0;  // windows in front of a group's first column
  const int64_t groups = CeilDivide(p.width, kColumns);
  const int64_t strips = CeilDivide(p.height + p.above, kRows);
  const int64_t planes = p.Planes(), units = p.batch.count * planes * strips * groups;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; unit < units;
       unit += step) {
    const PlaneUnit place(static_cast<uint32_t>(unit), planes, strips, groups);
    const T* from = p.y.At<const T>(p.batch, place.entry) + place.plane * p.rows * p.columns;
    float taps[kTaps][kTaps];
    LoadTaps(p.kernel.At<const T>(p.batch, place.entry) + ChannelOf(p, place.plane) * kTaps * kTaps,
             false, taps);
    // Row r of the strip is read by window s, counted from the one in front of those that begin in
    // the strip, by tap row r - 2 (s - 1); and accordingly columns.
    using Row = Segment<T, 1, kColumns / 2, kBefore>;
    Row loaded[kRows / 2 + 1];
    LoadRows(from, static_cast<int>(place.strip) * (kRows / 2) - 1, static_cast<int>(p.rows),
             static_cast<int>(p.columns), place.group, loaded);
    float sums[kRows][kColumns] = {};
#pragma unroll
    for (int s = 0; s <= kRows / 2; ++s) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int i = r - 2 * (s - 1);
        if (i < 0 || i >= kTaps) continue;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) {
#pragma unroll
          for (int c = 0; c < kColumns; ++c) {
            const int ahead = c + kLeft - j;
            if (ahead % 2 == 0) sums[r][c] += taps[i][j] * loaded[s][ahead / 2 + kBefore];
          }
        }
      }
    }
    const int first = static_cast<int>(place.strip) * kRows - p.above;
    const int column = static_cast<int>(place.group) * kColumns;
    Out* out = p.x.At<Out>(p.batch, place.entry) + place.plane * p.height * p.width + column;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t row = first + r;
      if (row < 0 || row >= p.height) continue;
      StoreRow(sums[r], out + row * p.width, static_cast<int>(p.width) - column);
    }
  }
}

}  // namespace jaxsparse
