// Small planes of a depthwise convolution (depthwise/problem.h), and of its transpose in x with
// stride 1. Rows of such planes begin anywhere, but the planes lie one behind the other: a block
// copies several of them into shared memory by whole vectors, and its results out of it. A thread
// makes some rows of one column, so neighbours read neighbouring banks.
#include "cuda/activation.cuh"
#include "cuda/instructions.cuh"
#include "depthwise/kernels/depthwise_staged.h"
#include "depthwise/kernels/segments.cuh"

namespace jaxsparse {

// By all threads of a block; they wait for it later.
template <typename T>
__device__ __forceinline__ void BeginCopy(const T* from, int count, T* to) {
  constexpr int kVector = kDepthwiseStagedVector / sizeof(T);
  const int vectors = IsAligned<Vector<T, kVector>>(from) ? count / kVector : 0;
  for (int v = threadIdx.x; v < vectors; v += kDepthwiseStagedThreads) {
    AsyncCopy(AddressOfShared(to + v * kVector), from + v * kVector);
  }
  for (int i = vectors * kVector + threadIdx.x; i < count; i += kDepthwiseStagedThreads) {
    to[i] = from[i];
  }
}

// Sums out of shared memory, through the activation.
template <typename Out>
__device__ __forceinline__ void CopyOut(const float* from, int count, Activation activation,
                                        Out* to) {
  constexpr int kVector = kDepthwiseStagedVector / sizeof(Out);
  for (int at = threadIdx.x * kVector; at < count; at += kDepthwiseStagedThreads * kVector) {
    Vector<Out, kVector> vector;
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      const Vector<float, 4> four = LoadVector<4>(from + at + i, true);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        FromAccumulator(Activate(activation, four.elements[j]), &vector.elements[i + j]);
      }
    }
    if (at + kVector <= count) {
      StoreVector(to + at, vector);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (at + i < count) to[at + i] = vector.elements[i];
    }
  }
}

// A block for each tile of planes: there are fewer than a grid may have.
template <typename T, typename Out, DepthwiseStagedConfig kConfig>
__global__ void __launch_bounds__(kDepthwiseStagedThreads)
    DepthwiseStaged(const __grid_constant__ DepthwiseProblem p) {
  constexpr bool kBack = kConfig.transposed;
  constexpr int kStride = kConfig.stride, kRows = kConfig.rows;
  constexpr int kRead = kStride * (kRows - 1) + kTaps;
  // Sums are read by whole vectors of results, which then do not reach beyond those of a full tile.
  static_assert(sizeof(Out) >= sizeof(T));
  static __shared__ __align__(16) char shared[kDepthwiseStagedBytes];
  const Array &source = kBack ? p.y : p.x, &result = kBack ? p.x : p.y;
  const int height = static_cast<int>(kBack ? p.rows : p.height);
  const int width = static_cast<int>(kBack ? p.columns : p.width);
  const int rows = static_cast<int>(kBack ? p.height : p.rows);
  const int columns = static_cast<int>(kBack ? p.width : p.columns);
  const int above = kBack ? kTaps - 1 - p.above : p.above;
  const int strips = (rows + kRows - 1) / kRows;
  const auto most = static_cast<uint32_t>(DepthwiseStagedPlanes(p, kBack, sizeof(T)));
  const auto of_entry = static_cast<uint32_t>(p.Planes()), tiles = (of_entry + most - 1) / most;
  T* x = reinterpret_cast<T*>(shared);
  float* sums = reinterpret_cast<float*>(shared + most * height * width * sizeof(T));
  const int64_t entry = blockIdx.x / tiles;
  const uint32_t first = blockIdx.x % tiles * most;
  const int planes = static_cast<int>(of_entry - first < most ? of_entry - first : most);
  const int64_t source_size = height * width, result_size = rows * columns;
  const T* kernels = p.kernel.At<const T>(p.batch, entry);
  const T* biases = p.bias.data == nullptr ? nullptr : p.bias.At<const T>(p.batch, entry);
  BeginCopy(source.At<const T>(p.batch, entry) + first * source_size, planes * height * width, x);
  WaitForCopies();
  __syncthreads();
  for (unsigned unit = threadIdx.x; unit < static_cast<unsigned>(planes * strips * columns);
       unit += kDepthwiseStagedThreads) {
    const int column = static_cast<int>(unit % static_cast<unsigned>(columns));
    const unsigned strip = unit / static_cast<unsigned>(columns);
    const int plane = static_cast<int>(strip / static_cast<unsigned>(strips));
    const int row = (static_cast<int>(strip) - plane * strips) * kRows;
    const uint32_t channel = ChannelOf(p, first + static_cast<uint32_t>(plane));
    float taps[kTaps][kTaps], made[kRows];
    LoadTaps(kernels + static_cast<int64_t>(channel) * kTaps * kTaps, kBack, taps);
    const float bias = biases == nullptr ? 0.0f : ToAccumulator(biases[channel]);
#pragma unroll
    for (int r = 0; r < kRows; ++r) made[r] = bias;
    const int top = kStride * row - above, side = kStride * column - kConfig.left;
    bool inside[kTaps];
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      inside[j] = static_cast<unsigned>(side + j) < static_cast<unsigned>(width);
    }
    int from = (plane * height + top) * width + side;
#pragma unroll
    for (int s = 0; s < kRead; ++s, from += width) {
      const bool exists = static_cast<unsigned>(top + s) < static_cast<unsigned>(height);
      float read[kTaps];
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        read[j] = exists && inside[j] ? ToAccumulator(x[from + j]) : 0.0f;
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int i = s - kStride * r;
        if (i < 0 || i >= kTaps) continue;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) made[r] += taps[i][j] * read[j];
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (row + r < rows) sums[(plane * rows + row + r) * columns + column] = made[r];
    }
  }
  __syncthreads();
  const int64_t at = first * result_size;
  const int count = planes * rows * columns;
  if (p.preactivation.data != nullptr) {
    CopyOut(sums, count, Activation::kNone, p.preactivation.At<Out>(p.batch, entry) + at);
  }
  CopyOut(sums, count, p.activation, result.At<Out>(p.batch, entry) + at);
}

}  // namespace jaxsparse
