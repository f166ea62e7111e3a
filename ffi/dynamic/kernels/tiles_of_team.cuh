// The tiles of a team: those of its groups, one group after another, each in rising or in falling
// order. All warps of its blocks walk through them alike. A script is data, which may be damaged:
// whatever it says, a warp reads rows before its tile and of the tile's own group alone, so that
// teams never wait for each other, and the first tile that is not done can always be made.
#pragma once

#include "cuda/device.cuh"
#include "dynamic/problem.h"
#include "dynamic/script.h"

namespace jaxsparse {

// A tile of a group that has tiles `first` to `end` - 1. Behind the last one there is none.
struct TeamTile {
  int number, first, end;
  bool exists;
};

// A source in memory: a leaf, a row that was computed in the launch, or none.
struct SourceRow {
  int64_t row;
  bool is_leaf, exists;
};

template <typename Plan, bool kFalling = false>
class TilesOfTeam {
  static constexpr ScriptForm kForm{.width = kTileRows, .slots = Plan::kSlots};

 public:
  // From the team's tile with that number on.
  __device__ __forceinline__ explicit TilesOfTeam(const GraphScanProblem& p, int number = 0)
      : group_(static_cast<int>(blockIdx.x / Plan::kBlocks)), done_(number) {
    Enter(p);
  }

  // The next tile. The one after it comes so many steps later.
  __device__ __forceinline__ TeamTile Next(const GraphScanProblem& p, int steps = 1) {
    while (done_ >= count_ && group_ < p.groups) {
      done_ -= count_;
      group_ += Plan::kScans;
      Enter(p);
    }
    const int number = kFalling ? first_ + count_ - 1 - done_ : first_ + done_;
    done_ += steps;
    return {number, first_, first_ + count_, group_ < p.groups};
  }

  // What the record says of a row's source, or -1 where there is no tile.
  __device__ __forceinline__ static int LoadSource(const GraphScanProblem& p, const TeamTile& tile,
                                                   int row, int slot) {
    return tile.exists ? RecordOf(p, tile)[kRecordSources + row * Plan::kSlots + slot] : -1;
  }
  // The same from where the first tile's record says it of the row.
  __device__ __forceinline__ static const int32_t* SourcesOf(const GraphScanProblem& p, int row) {
    return p.records + kRecordSources + row * Plan::kSlots;
  }
  __device__ __forceinline__ static int LoadSource(const int32_t* sources, const TeamTile& tile,
                                                   int slot) {
    constexpr uint32_t kBytes = kForm.RecordWords() * sizeof(int32_t);
    const char* of_tile = reinterpret_cast<const char*>(sources) +
                          MultiplyWide(static_cast<uint32_t>(tile.number), kBytes);
    return tile.exists ? reinterpret_cast<const int32_t*>(of_tile)[slot] : -1;
  }
  // Of its rows.
  __device__ __forceinline__ static int LoadKind(const GraphScanProblem& p, const TeamTile& tile) {
    constexpr int kLast = Plan::kSizes.kinds - 1;
    if (kLast == 0 || !tile.exists) return 0;
    const int kind = RecordOf(p, tile)[kRecordKind];
    return kind < 0 ? 0 : kind < kLast ? kind : kLast;
  }
  // What the record says that a tile waits for, and how many tiles later in falling order that
  // comes: 0 if there is none.
  __device__ __forceinline__ static int LoadWait(const GraphScanProblem& p, const TeamTile& tile) {
    return tile.exists ? RecordOf(p, tile)[kRecordWait] : -1;
  }
  __device__ __forceinline__ static int TilesUntil(const TeamTile& tile, int wait) {
    return wait > tile.number && wait < tile.end ? wait - tile.number : 0;
  }

  __device__ __forceinline__ static SourceRow Checked(const GraphScanProblem& p,
                                                      const TeamTile& tile, int source) {
    // Less than 0 is a large number, and no row's.
    const auto row = static_cast<uint32_t>(source), leaves = static_cast<uint32_t>(p.leaves);
    const bool is_leaf = row < leaves;
    const uint32_t after = row - leaves - static_cast<uint32_t>(tile.first * kTileRows);
    const bool is_before = after < static_cast<uint32_t>((tile.number - tile.first) * kTileRows);
    return {is_leaf ? row : row - leaves, is_leaf, is_leaf || is_before};
  }

  // How many tiles any team makes.
  __device__ __forceinline__ static int Used(const GraphScanProblem& p) {
    return GroupTile(p, p.groups);
  }

 private:
  __device__ __forceinline__ static const int32_t* RecordOf(const GraphScanProblem& p,
                                                            const TeamTile& tile) {
    // A script has less than 2^31 words.
    return p.records +
           static_cast<uint32_t>(tile.number) * static_cast<uint32_t>(kForm.RecordWords());
  }
  __device__ __forceinline__ static int GroupTile(const GraphScanProblem& p, int group) {
    const int tile = p.group_tiles[group];
    return tile < 0 ? 0 : tile < p.tiles ? tile : p.tiles;
  }
  __device__ __forceinline__ void Enter(const GraphScanProblem& p) {
    first_ = count_ = 0;
    if (group_ >= p.groups) return;
    first_ = GroupTile(p, group_);
    const int end = GroupTile(p, group_ + 1);
    count_ = end > first_ ? end - first_ : 0;
  }

  int group_, done_;
  int first_ = 0, count_ = 0;  // tiles of the group
};

}  // namespace jaxsparse
