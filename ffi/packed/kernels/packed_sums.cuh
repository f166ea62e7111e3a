// The sums of a warp, 16 rows of a tile of columns as mma.m16n8k16 assigns them, and how they
// become the result: those of several parts by way of the workspace, or of shared memory.
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

// Where a warp's sums lie, and those of other warps that have the same strip, whose parts are
// ranges of this block and of others of its cluster.
template <int kTiles, int kRanges>
class PackedPartsOfCluster {
  uint32_t space_;  // the lane's, of the first range
  uint32_t apart_;  // of ranges
  int blocks_;

 public:
  // `space`: kPackedSumsBytes of shared memory for each 8 columns, of the first range's warp; those
  // of the others are so far `apart`.
  __device__ PackedPartsOfCluster(uint32_t space, uint32_t apart, int blocks)
      : space_(space + threadIdx.x % kWarp * 16), apart_(apart), blocks_(blocks) {}

  __device__ __forceinline__ void Leave(int range, const float (&sums)[kTiles][4]) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      StoreShared(space_ + range * apart_ + t * kPackedSumsBytes,
                  {__float_as_uint(sums[t][0]), __float_as_uint(sums[t][1]),
                   __float_as_uint(sums[t][2]), __float_as_uint(sums[t][3])});
    }
  }
  // The sums of 8 columns, in the order of parts, once all have left theirs.
  __device__ __forceinline__ void AddUp(int tile, float (&sums)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0;
#pragma unroll 1
    for (int block = 0; block < blocks_; ++block) {
      const uint32_t own = space_ + tile * kPackedSumsBytes;
      uint32_t words[kRanges][4];
#pragma unroll
      for (int range = 0; range < kRanges; ++range) {
        if (blocks_ == 1) LoadShared(own + range * apart_, words[range]);
        else LoadOfRank(AddressOfRank(own + range * apart_, block), words[range]);
      }
#pragma unroll
      for (int range = 0; range < kRanges; ++range) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[i] += __uint_as_float(words[range][i]);
      }
    }
  }
};

// Writes sums of a strip, times the scales of rows that have any, by a warp.
template <typename T, typename Out, PackedNumbers kNumbers, bool kLeft>
class PackedResult {
  static constexpr bool kScales = kNumbers != PackedNumbers::kPlain;
  const PackedProblem& p_;
  int lane_ = static_cast<int>(threadIdx.x % kWarp);
  int row_ = -1;  // the one that stands at the lane's place of the strip, if any does
  float scale_ = 1, bias_ = 0;

 public:
  __device__ PackedResult(const PackedProblem& p, int64_t strip) : p_(p) {
    const int64_t place = strip * kPackedStripRows + lane_ % kPackedStripRows;
    if (place >= p.m) return;
    row_ = static_cast<int>(Within(static_cast<const int32_t*>(p.rows.data)[place], p.m));
    if constexpr (kScales) {
      constexpr float kFactor = PairOfBytes<T, kNumbers>::kFactor;
      scale_ = kFactor * static_cast<const float*>(p.scales.data)[row_];
    }
    if (p.bias.data != nullptr) bias_ = ToAccumulator(static_cast<const T*>(p.bias.data)[row_]);
  }
  // Has the strip's rows be on their way.
  __device__ static void Prefetch(const PackedProblem& p, int64_t strip) {
    const int64_t place = strip * kPackedStripRows;
    if (place < p.m) jaxsparse::Prefetch(static_cast<const int32_t*>(p.rows.data) + place);
  }
  // Of 8 columns.
  __device__ __forceinline__ void Write(int64_t first_column, const float (&sums)[4]) const {
    const int64_t column = first_column + lane_ % 4 * 2;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int lane = lane_ / 4 + 8 * j;  // whose row the sums are of
      const int64_t row = __shfl_sync(kAllLanes, row_, lane);
      const float scale = kScales ? __shfl_sync(kAllLanes, scale_, lane) : 1.0f;
      const float bias = __shfl_sync(kAllLanes, bias_, lane);
      if (row < 0) continue;
      Vector<Out, 2> pair;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        FromAccumulator(Activate(p_.activation, sums[2 * j + e] * scale + bias), &pair.elements[e]);
      }
      Out* out =
          static_cast<Out*>(p_.out.data) + (kLeft ? column * p_.m + row : row * p_.n + column);
      if (!kLeft && column + 1 < p_.n) {
        StoreVector(out, pair);
        continue;
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (column + e < p_.n) out[kLeft ? e * p_.m : e] = pair.elements[e];
      }
    }
  }
};

}  // namespace jaxsparse
