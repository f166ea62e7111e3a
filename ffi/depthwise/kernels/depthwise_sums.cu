// The kernel of (x, y) for each channel (depthwise/problem.h). Blocks add up slices of a channel; a
// second kernel adds up the slices. All in a fixed order, so results repeat bitwise.
#include "depthwise/kernels/depthwise_sums.h"
#include "depthwise/kernels/segments.cuh"

namespace jaxsparse {

// sums[channel][slice][tap], channels of all batch entries.
template <typename T, DepthwiseSumsConfig kConfig>
__global__ void __launch_bounds__(kDepthwiseSumThreads, 3)
    DepthwiseSlicesOfSums(const __grid_constant__ DepthwiseProblem p) {
  constexpr int kStride = kConfig.stride, kRows = DepthwiseSumRows(kStride), kSums = kTaps * kTaps;
  constexpr int kWindows = kDepthwiseSumColumns;
  constexpr int kWarps = kDepthwiseSumThreads / kWarp;
  LetNextKernelBegin();
  static __shared__ float parts[kWarps][kSums];
  const int64_t groups = CeilDivide(p.columns, kWindows), strips = CeilDivide(p.rows, kRows);
  const int64_t slices = DepthwiseSlices(p), pieces = DepthwisePieces(p);
  for (int64_t block = blockIdx.x; block < p.batch.count * p.channels * slices;
       block += gridDim.x) {
    const uint32_t index = static_cast<uint32_t>(block) / static_cast<uint32_t>(slices);
    const int64_t slice = block - index * slices;
    const int64_t entry = index / static_cast<uint32_t>(p.channels);
    const int64_t channel = index - entry * p.channels;
    const T* all_x = p.x.At<const T>(p.batch, entry);
    const T* all_y = p.y.At<const T>(p.batch, entry);
    float sums[kTaps][kTaps] = {};
    for (int64_t piece = slice * kDepthwiseSumThreads + threadIdx.x; piece < pieces;
         piece += slices * kDepthwiseSumThreads) {
      const PlaneUnit place(static_cast<uint32_t>(piece), p.images, strips,
                            groups);  // an image in place of a plane
      const int64_t plane = p.PlaneOf(channel, place.plane);
      const T* x_plane = all_x + plane * p.height * p.width;
      const T* y_plane = all_y + plane * p.rows * p.columns;
      const int first = static_cast<int>(place.strip) * kRows;
      const int64_t column = static_cast<int64_t>(place.group) * kWindows;
      constexpr int kRead = kStride * (kRows - 1) + kTaps;
      Segment<T, kStride, kWindows, kConfig.left> x[kRead];
      Segment<T, 1, kWindows, 0> y[kRows];
      LoadRows(y_plane, first, static_cast<int>(p.rows), static_cast<int>(p.columns), place.group,
               y);
      LoadRows(x_plane, kStride * first - p.above, static_cast<int>(p.height),
               static_cast<int>(p.width), place.group, x);
#pragma unroll
      for (int s = 0; s < kRead; ++s) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int i = s - kStride * r;
          if (i < 0 || i >= kTaps) continue;
#pragma unroll
          for (int c = 0; c < kWindows; ++c) {
            // Where there is no window, x may be a NaN that none reads.
            const bool there = first + r < p.rows && column + c < p.columns;
#pragma unroll
            for (int j = 0; j < kTaps; ++j) {
              sums[i][j] += there ? y[r][c] * x[s][kStride * c + j] : 0.0f;
            }
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kSums; ++t) {
      const float of_warp = SumOverLanes(sums[t / kTaps][t % kTaps], kWarp);
      if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp][t] = of_warp;
    }
    __syncthreads();
    if (threadIdx.x < kSums) {
      float sum = 0;
      for (int warp = 0; warp < kWarps; ++warp) sum += parts[warp][threadIdx.x];
      reinterpret_cast<float*>(p.workspace.data)[block * kSums + threadIdx.x] = sum;
    }
    __syncthreads();
  }
}

// A thread for each number of the result.
template <typename Out>
__global__ void __launch_bounds__(kDepthwiseSumThreads)
    DepthwiseSums(const __grid_constant__ DepthwiseProblem p) {
  constexpr int kSums = kTaps * kTaps;
  const int64_t slices = DepthwiseSlices(p), of_entry = p.channels * kSums;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  WaitForPrologue();
  const float* parts = reinterpret_cast<const float*>(p.workspace.data);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < p.batch.count * of_entry; i += step) {
    const int64_t channel = static_cast<uint32_t>(i) / kSums;
    const int64_t entry = static_cast<uint32_t>(i) / static_cast<uint32_t>(of_entry);
    const float* from = parts + channel * slices * kSums + (i - channel * kSums);
    float sum = 0;
    for (int64_t slice = 0; slice < slices; ++slice) sum += from[slice * kSums];
    FromAccumulator(sum, &p.kernel.At<Out>(p.batch, entry)[i - entry * of_entry]);
  }
}

}  // namespace jaxsparse
