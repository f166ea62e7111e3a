// The sums of a warp, 16 rows of a tile of columns as mma.m16n8k16 assigns them, and how they
// become the result: those of several parts by way of the workspace, or of a cluster's shared
// memory.
#pragma once

#include "cuda/activation.cuh"
#include "cuda/vector_access.cuh"
#include "packed/kernels/lane_bytes.cuh"
#include "packed/kernels/packed_parts.h"

namespace jaxsparse {

// A tile of the result whose parts several blocks have. Each leaves its sums; the one that comes
// last adds up all of them in the order of parts, so that results repeat and no block waits.
template <auto kConfig>
class PackedParts {
  static constexpr int kTiles = kConfig.columns / 8;
  using Sums = Vector<float, 4>;
  uint32_t* count_;
  Sums* sums_;  // the thread's, of the first part
  int64_t parts_;

  static constexpr int64_t kOfBlock = kConfig.warps * kTiles * kWarp;

 public:
  __device__ PackedParts(const PackedProblem& p, int64_t tile)
      : count_(reinterpret_cast<uint32_t*>(p.workspace.data) + tile),
        sums_(reinterpret_cast<Sums*>(p.workspace.data + PackedCountsBytes(p)) +
              tile * p.parts * kOfBlock + threadIdx.x),
        parts_(p.parts) {}

  __device__ __forceinline__ void Leave(int64_t part, const float (&sums)[kTiles][4]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      Sums own;
#pragma unroll
      for (int i = 0; i < 4; ++i) own.elements[i] = sums[t][i];
      sums_[part * kOfBlock + t * kConfig.warps * kWarp] = own;
    }
  }
  // Whether all have left theirs, by one thread, behind what the block wrote.
  __device__ __forceinline__ bool IsLast() const {
    WaitForPrologue();
    return FetchAndAddOfGpu(count_, 1) == static_cast<uint32_t>(parts_ - 1);
  }
  __device__ __forceinline__ void AddUp(float (&sums)[kTiles][4]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][i] = 0;
    }
#pragma unroll 1
    for (int64_t part = 0; part < parts_; ++part) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const Sums from = sums_[part * kOfBlock + t * kConfig.warps * kWarp];
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[t][i] += from.elements[i];
      }
    }
  }
};

// Makes sums of a part those of the whole tile, which is true in the block that comes last. All
// threads call it that have sums, and meet at `barrier`.
template <auto kConfig>
__device__ __forceinline__ bool AddParts(const PackedProblem& p, int64_t tile, int64_t part,
                                         int barrier, bool* is_last,
                                         float (&sums)[kConfig.columns / 8][4]) {
  if (p.parts == 1) return true;
  const PackedParts<kConfig> parts(p, tile);
  parts.Leave(part, sums);
  WaitAt<kConfig.warps * kWarp>(barrier);
  if (threadIdx.x == 0) *is_last = parts.IsLast();
  WaitAt<kConfig.warps * kWarp>(barrier);
  if (!*is_last) return false;
  parts.AddUp(sums);
  return true;
}

// The same where the blocks of all parts are a cluster, of which each adds up those of some warps,
// in the order of parts: true for these. All threads of the blocks call it, those that have no sums
// with `warp` below 0. `space`: 512 bytes of shared memory for each 8 columns, the warp's own;
// other blocks read it until the cluster has met once more.
template <int kTiles>
__device__ __forceinline__ bool AddPartsOfCluster(int parts, int part, int warp, uint32_t space,
                                                  float (&sums)[kTiles][4]) {
  space += threadIdx.x % kWarp * 16;
  if (warp >= 0) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      StoreShared(space + t * kWarp * 16,
                  {__float_as_uint(sums[t][0]), __float_as_uint(sums[t][1]),
                   __float_as_uint(sums[t][2]), __float_as_uint(sums[t][3])});
    }
  }
  __syncwarp();
  ClusterBarrier();
  if (warp < 0 || warp % parts != part) return false;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[t][i] = 0;
  }
#pragma unroll 1
  for (int rank = 0; rank < parts; ++rank) {
    const uint32_t from = AddressOfRank(space, rank);
    uint32_t words[kTiles][4];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) LoadOfRank(from + t * kWarp * 16, words[t]);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][i] += __uint_as_float(words[t][i]);
    }
  }
  return true;
}

// Writes a warp's sums, of columns from `first_column` on, times the scales of rows that have any.
template <typename T, typename Out, auto kConfig>
__device__ __forceinline__ void WriteSums(const PackedProblem& p, int64_t strip,
                                          int64_t first_column,
                                          const float (&sums)[kConfig.columns / 8][4]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int64_t place = strip * kPackedStripRows + lane / 4 + 8 * j;
    if (place >= p.m) continue;
    const int64_t row = Within(static_cast<const int32_t*>(p.rows.data)[place], p.m);
    const float scale =
        PairOfBytes<T, kConfig.numbers>::kFactor *
        (p.scales.data == nullptr ? 1.0f : static_cast<const float*>(p.scales.data)[row]);
    const float bias =
        p.bias.data == nullptr ? 0.0f : ToAccumulator(static_cast<const T*>(p.bias.data)[row]);
#pragma unroll
    for (int t = 0; t < kConfig.columns / 8; ++t) {
      Vector<Out, 2> pair;
      const int64_t column = first_column + t * 8 + lane % 4 * 2;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        FromAccumulator(Activate(p.activation, sums[t][2 * j + e] * scale + bias),
                        &pair.elements[e]);
      }
      Out* out = static_cast<Out*>(p.out.data) +
                 (kConfig.x_on_left ? column * p.m + row : row * p.n + column);
      if (!kConfig.x_on_left && column + 1 < p.n) {
        StoreVector(out, pair);
        continue;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (column + e < p.n) out[kConfig.x_on_left ? e * p.m : e] = pair.elements[e];
      }
    }
  }
}

}  // namespace jaxsparse
