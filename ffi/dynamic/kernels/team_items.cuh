// Which units and rows of a tile belong to a thread, and what it does with each of them.
#pragma once

#include "dynamic/problem.h"
#include "persistent/exchange.cuh"
#include "recurrent/scan_of_block.cuh"

namespace jaxsparse {

struct TeamItem {
  int unit;  // of the block
  int row;   // of the tile
  bool exists;
};

// Rows of tiles that no team makes, of which a thread clears its share in each array.
struct UnusedRows {
  int64_t first, last;
  int64_t thread, threads;  // of the launch

  __device__ __forceinline__ void Clear(void* array, int64_t row_bytes) const {
    auto* words = static_cast<uint32_t*>(array);
    const int64_t end = last * row_bytes / 4;
    for (int64_t i = first * row_bytes / 4 + thread; i < end; i += threads) words[i] = 0;
  }
};

// For kThreads threads of a block.
template <typename Plan, int kThreads>
class TeamItems {
  using State = typename Plan::State;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr bool kAllAreOnes = kSizes.units * kTileRows % kThreads == 0;
  static constexpr bool kHasAllUnits = kSizes.hidden % kSizes.units == 0;

 public:
  __device__ __forceinline__ explicit TeamItems(int thread) : thread_(thread) {}

  __device__ __forceinline__ static int FirstUnit() { return BlockOfScan<Plan>() * kSizes.units; }

  // Units side by side in a row, so that a warp publishes whole sectors.
  __device__ __forceinline__ TeamItem At(int n) const {
    const uint32_t index = n * kThreads + thread_, unit = index % kSizes.units;
    const bool is_one = kAllAreOnes || index < kSizes.units * kTileRows;
    const bool is_unit = kHasAllUnits || FirstUnit() + static_cast<int>(unit) < kSizes.hidden;
    return {static_cast<int>(unit), is_one ? static_cast<int>(index / kSizes.units) : 0,
            is_one && is_unit};
  }

  // Publishes an item's value; whole warps call it.
  __device__ __forceinline__ void Publish(const TeamItem& item, float value, State* to) const {
    auto* words = reinterpret_cast<uint32_t*>(to);
    if constexpr (sizeof(State) == 2) {  // two units make a word
      const float next = __shfl_xor_sync(kAllLanes, value, 1);
      if (item.exists && !IsOdd()) StoreRelaxed(words, ToWord<State>(value, next));
    } else {
      if (item.exists) StoreRelaxed(words, ToWord(value));
    }
  }

  // Publishes an item's values, which lie `distance` apart, from a place in the first of them;
  // whole warps call it. Two units make a word of 16-bit values: of two values the even one of two
  // neighbouring lanes takes the first, and the odd one the other.
  template <int kCount>
  __device__ __forceinline__ void PublishAll(const TeamItem& item, const float* values, State* to,
                                             int distance) const {
    if constexpr (sizeof(State) == 2) {
#pragma unroll
      for (int i = 0; i + 1 < kCount; i += 2) {
        const uint32_t own = ToWord<State>(values[i], values[i + 1]);
        const uint32_t other = __shfl_xor_sync(kAllLanes, own, 1);
        const uint32_t word = __byte_perm(own, other, IsOdd() ? 0x3276 : 0x5410);
        if (item.exists) StoreRelaxed(reinterpret_cast<uint32_t*>(to + i * distance), word);
      }
      if constexpr (kCount % 2 == 1) {
        Publish(item, values[kCount - 1], to + (kCount - 1) * distance);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) Publish(item, values[i], to + i * distance);
    }
  }
  // How far the place that a thread hands to PublishAll lies behind that of its first value.
  __device__ __forceinline__ int PlaceOfWords(int distance) const {
    return sizeof(State) == 2 && IsOdd() ? distance - 1 : 0;
  }

  __device__ __forceinline__ UnusedRows Unused(const GraphScanProblem& p, int used_tiles) const {
    return {int64_t{used_tiles} * kTileRows, int64_t{p.tiles} * kTileRows,
            int64_t{blockIdx.x} * kThreads + thread_,
            int64_t{Plan::kScans} * Plan::kBlocks * kThreads};
  }

 private:
  __device__ __forceinline__ bool IsOdd() const { return thread_ % 2 != 0; }

  const int thread_;
};

}  // namespace jaxsparse
