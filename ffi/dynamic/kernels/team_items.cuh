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

 public:
  __device__ __forceinline__ explicit TeamItems(int thread) : thread_(thread) {}

  __device__ __forceinline__ static int FirstUnit() { return BlockOfScan<Plan>() * kSizes.units; }

  // Units side by side in a row, so that a warp publishes whole sectors.
  __device__ __forceinline__ TeamItem At(int n) const {
    const int index = n * kThreads + thread_, unit = index % kSizes.units;
    const bool is_one = index < kSizes.units * kTileRows;
    const bool has_unit = kSizes.hidden % kSizes.units == 0 || FirstUnit() + unit < kSizes.hidden;
    return {unit, is_one ? index / kSizes.units : 0, is_one && has_unit};
  }

  // Publishes an item's value; whole warps call it.
  __device__ __forceinline__ void Publish(const TeamItem& item, float value, State* to) const {
    auto* words = reinterpret_cast<uint32_t*>(to);
    if constexpr (sizeof(State) == 2) {  // two units make a word
      const float next = __shfl_xor_sync(kAllLanes, value, 1);
      if (item.exists && thread_ % 2 == 0) StoreRelaxed(words, ToWord<State>(value, next));
    } else {
      if (item.exists) StoreRelaxed(words, ToWord(value));
    }
  }

  __device__ __forceinline__ UnusedRows Unused(const GraphScanProblem& p, int used_tiles) const {
    return {int64_t{used_tiles} * kTileRows, int64_t{p.tiles} * kTileRows,
            int64_t{blockIdx.x} * kThreads + thread_,
            int64_t{Plan::kScans} * Plan::kBlocks * kThreads};
  }

 private:
  const int thread_;
};

}  // namespace jaxsparse
