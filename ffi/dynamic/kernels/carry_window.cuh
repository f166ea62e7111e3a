// Where the pointwise warps of a block find the carries of a tile's sources. A carry stays with the
// block that made it, but another set of warps may have done that. The carries of the nearest tiles
// lie in shared memory, those of farther ones and of leaves in global memory alone.
//
// A set begins with tile t, by the numbers of a team's tiles, before its products are there. What
// may it read?
//
// Tiles of which a barrier says that they are made. Each warp of a set arrives at the barrier of
// tile u when it has published its states of u and stored its carries, so that those of all units
// of the block are there. To wait for that costs nothing: the products of t wait for the same
// states, on their way through the L2 cache. Of each set the newest tile proves the older ones.
//
// Tiles that are more than `Unproven` before t. With u's carries behind it, its set has emptied
// the stage of tile u + sets. Product warps waited for that before they filled it again, for
// u + sets + stages. Our set has waited for those products, or for later ones, if they came no
// later than its last tile, t - sets.
//
// A place in the window is written by tile t when all are done with tile t - window: t is full, so
// tiles up to t - stages are emptied, which warps do when they have loaded their carries. The
// others, from t - stages + 1 on, take from the window no more than `kReach` tiles before
// themselves, so none as old as t - window.
//
// Barriers are taken in turn. There are so many that the next tile of a barrier is not made while
// a set may still wait there for the one before: a set looks back by `Unproven` tiles at most, and
// none is full that is `stages` tiles ahead of one that is not emptied.
#pragma once

#include "cuda/pipeline.cuh"
#include "dynamic/problem.h"

namespace jaxsparse {

template <typename Plan>
class CarryWindow {
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kTiles = kSizes.window > 0 ? kSizes.window : 1;
  static constexpr int kCarries = kSizes.carries;
  using Made = PipelineState<kSizes.made>;

 public:
  static constexpr bool kIsUsed = kSizes.window > 0;
  static constexpr int kUnproven = kSizes.Unproven();
  // Sources that are so many tiles before lie in the window.
  static constexpr int kReach = kIsUsed ? kSizes.window - kSizes.stages : 0;
  static_assert(kUnproven < kWarp - 1 && (kTiles & (kTiles - 1)) == 0);
  static_assert(!kIsUsed || kReach >= kUnproven);

  __device__ __forceinline__ explicit CarryWindow(Words4* shared)
      : barriers_(reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(shared) + kSizes.made_at)),
        carries_(AddressOfShared(shared) + kSizes.window_at) {}

  // By one thread, before all of the block meet.
  __device__ __forceinline__ void Init() const {
    for (int i = 0; i < kSizes.made; ++i) InitBarrier(barriers_ + i, kSizes.set_warps);
    FenceShared();
  }

  // The bit of a source that is so many rows before the first one of a tile, from the highest one
  // down. Whole warps wait until what the bits of all lanes stand for is there.
  __device__ __forceinline__ static uint32_t BitOf(uint32_t rows_before) {
    const uint32_t before = (rows_before + kTileRows - 1) / kTileRows;
    return kHighest >> (before < kWarp ? before : kWarp - 1);
  }
  __device__ __forceinline__ void WaitUntilMade(uint32_t number, uint32_t bits) const {
    if constexpr (Plan::kBarrier) return;
    const uint32_t all = __reduce_or_sync(kAllLanes, bits);
#pragma unroll
    for (int set = 0; set < kSizes.sets; ++set) {
      const uint32_t of_set = all & TilesOfSet(set);
      if (of_set == 0) continue;
      const Made at = Made::Of(number - static_cast<uint32_t>(__clz(static_cast<int>(of_set))));
      WaitForPhase(barriers_ + at.stage, at.phase);
    }
  }
  // Whole warps, with a tile's carries behind them.
  __device__ __forceinline__ void SetMade(uint32_t number) const {
    if constexpr (Plan::kBarrier) return;
    __syncwarp();
    if (threadIdx.x % kWarp == 0) Arrive(barriers_ + Made::Of(number).stage);
  }

  // The address of a unit's first carry, where rows are counted from the first one of the team's
  // tiles.
  __device__ __forceinline__ uint32_t AddressOf(uint32_t row, int unit) const {
    return carries_ + static_cast<uint32_t>(unit) * 4 +
           row % (kTiles * kTileRows) * (kCarries * kSizes.units * 4);
  }
  __device__ __forceinline__ static void LoadIf(bool condition, uint32_t address, float* carries) {
#pragma unroll
    for (int c = 0; c < kCarries; ++c) {
      LoadSharedIf(condition, address + c * kSizes.units * 4, &carries[c]);
    }
  }
  __device__ __forceinline__ static void Store(uint32_t address, const float* carries) {
#pragma unroll
    for (int c = 0; c < kCarries; ++c) StoreShared(address + c * kSizes.units * 4, carries[c]);
  }

 private:
  static constexpr uint32_t kHighest = 1u << (kWarp - 1);

  // Of the bits of tiles before one, those of a set, which is so many sets behind its own.
  __device__ __forceinline__ static constexpr uint32_t TilesOfSet(int set) {
    uint32_t bits = 0;
    for (int before = 1; before <= kUnproven; ++before) {
      if (before % kSizes.sets == set) bits |= kHighest >> before;
    }
    return bits;
  }

  uint64_t* const barriers_;
  const uint32_t carries_;
};

}  // namespace jaxsparse
