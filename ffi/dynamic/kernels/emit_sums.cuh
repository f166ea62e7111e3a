// What is added to sources in a pass from rows to them. A block adds to its own units alone, in the
// order of tiles, so that sums are the same in every run, whatever the graphs. All of a unit is
// added by one warp, so that warps need not wait for one another. Of a source that several rows of
// a tile have, or that fills several slots, they take turns, in the order of rows.
#pragma once

#include "dynamic/kernels/ring.cuh"
#include "dynamic/kernels/sum_window.cuh"
#include "dynamic/kernels/team_items.cuh"
#include "dynamic/kernels/team_mma.cuh"
#include "dynamic/kernels/tiles_of_team.cuh"
#include "persistent/delay.cuh"

namespace jaxsparse {

template <typename Plan>
class EmitSums {
  using Tiles = TilesOfTeam<Plan, true>;
  using Window = SumWindow<Plan>;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kSlots = Plan::kSlots;
  static constexpr int kSources = kTileRows * kSlots;  // of a tile, one for each lane
  static constexpr int kValues = Window::kValues, kCarries = kValues - 1;
  static constexpr uint32_t kRowBytes = kSizes.hidden * sizeof(float);
  static_assert(kSources <= kWarp);

  // A lane takes one of 4 units of two rows; the halves of a warp take slots in turn, or if there
  // is one alone 4 units each.
  static constexpr int kRows = 2, kUnits = 4, kHalf = kWarp / 2;
  static constexpr int kHalfUnits = kSlots == 1 ? kUnits : 0;
  static constexpr int kWarpUnits = kUnits + kHalfUnits;
  static constexpr int kLaneSlots = (kSlots + 1) / 2;
  static constexpr int kTurns = kSizes.sum_turns;
  static constexpr int kItems = kTurns * kLaneSlots;
  static_assert(kItems == kSizes.sum_items);

 public:
  __device__ __forceinline__ EmitSums(const GraphScanProblem& p, Words4* shared)
      : lane_(threadIdx.x % kWarp),
        first_unit_(WarpOfThread() * kWarpUnits + lane_ / kHalf * kHalfUnits + lane_ % kUnits),
        first_slot_(kSlots == 1 ? 0 : lane_ / kHalf),
        first_row_(lane_ / kUnits % (kHalf / kUnits) * kRows),
        window_(shared),
        ring_(shared),
        tiles_(p),
        leaves_(static_cast<uint32_t>(p.leaves)) {
    const int unit = BlockOfScan<Plan>() * kSizes.units + first_unit_;
#pragma unroll
    for (int v = 0; v < kValues; ++v) {
      leaves_at_[v] =
          reinterpret_cast<uint64_t>((v == 0 ? p.leaf_sums : p.leaf_carries[v - 1]) + unit);
      rows_at_[v] = reinterpret_cast<uint64_t>((v == 0 ? p.sums : p.carries[v - 1]) + unit) -
                    MultiplyWide(leaves_, kRowBytes);
      KeepInRegister(leaves_at_[v]);  // or they are found for every tile
      KeepInRegister(rows_at_[v]);
    }
  }

  // Stores zeros where what is far away is added in memory, in all groups of the team, while others
  // load weights. A warp clears the units that it adds to itself. A step that loads such sums is a
  // window or more behind the first tile of its group, and so behind this, too.
  __device__ __forceinline__ static void ClearFarSums(const GraphScanProblem& p) {
    if (p.sums == nullptr) return;  // no group has so many tiles
    Tiles groups(p);
    for (;;) {
      const TeamTile tile = groups.Next(p, 0);
      if (!tile.exists) break;
      groups.Next(p, tile.end - tile.first);  // to the next group
      const int end = Window::FarEnd(tile) * kTileRows;
#pragma unroll 1
      for (int row = tile.first * kTileRows + threadIdx.x % kWarp; row < end; row += kWarp) {
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
          for (int i = 0; i < kWarpUnits; i += kUnits) {
            ClearRow(p, row, (turn * kSizes.sum_warps + WarpOfThread()) * kWarpUnits + i);
          }
        }
      }
    }
    __syncwarp();
  }

  // A tile's sources are known, and looked at, a tile ahead: which of them are alike takes a warp
  // hundreds of clock cycles to tell, in which it does other things.
  __device__ __forceinline__ void Run(const GraphScanProblem& p) {
    TeamTile tile = tiles_.Next(p), next = tiles_.Next(p);
    const Own first = Look(p, tile, 0, Load(p, tile));
    int next_source = Load(p, next);
    Target targets[kItems][kRows];
    Turns turns = Find(first, Alike(first), targets);
    WaitForPrologue();  // it fills sums of leaves
    for (int64_t number = 0; tile.exists; ++number) {
      const Own own = Look(p, next, static_cast<uint32_t>(number + 1), next_source);
      const uint32_t alike = Alike(own);
      const TeamTile after = tiles_.Next(p);
      next_source = Load(p, after);
      MeetTeam<Plan>(p, number, nullptr);
      Delay<Plan::kMostDelay>(number);
      ring_.WaitUntilFull();
      float values[kItems][kRows][kValues];
      SumParts(targets, values);
#pragma unroll 1
      for (int turn = 1; turn < turns.count; ++turn) AddToWindow(turn, targets, values);
      ring_.Empty();
      // What no step waits for soon.
      if (turns.any_in_memory) AddInMemory(turns.count, targets, values);
      MeetBlock<Plan>();
      turns = Find(own, alike, targets);
      tile = next;
      next = after;
    }
  }

 private:
  __device__ __forceinline__ static int WarpOfThread() {
    return (threadIdx.x - kSizes.product_threads - kSizes.pointwise_threads) / kWarp;
  }

  // 4 units, of which there are all or none.
  __device__ __forceinline__ static void ClearRow(const GraphScanProblem& p, int row, int unit) {
    if (!IsUnit(unit)) return;
    constexpr Words4 kNothing = {0, 0, 0, 0};
    const int64_t at = int64_t{row} * kSizes.hidden + BlockOfScan<Plan>() * kSizes.units + unit;
    *reinterpret_cast<Words4*>(p.sums + at) = kNothing;
#pragma unroll
    for (int c = 0; c < kCarries; ++c) *reinterpret_cast<Words4*>(p.carries[c] + at) = kNothing;
  }

  // Of a unit of a source: its address in the window, or where it lies in memory its number in the
  // script; and after how many others of the same source it is added: in memory kInMemory more, and
  // -1 if another thread adds to it, or none.
  struct Target {
    uint32_t at;
    int turn;
  };
  struct Turns {
    int count;
    bool any_in_memory;
  };
  static constexpr int kInMemory = kWarp;

  __device__ __forceinline__ int UnitOf(int item) const {
    return first_unit_ + item / kLaneSlots * kWarpUnits * kSizes.sum_warps;
  }
  __device__ __forceinline__ int SlotOf(int item) const {
    return first_slot_ + item % kLaneSlots * 2;
  }
  __device__ __forceinline__ static bool IsUnit(int unit) {
    const bool is_of_block =
        kTurns * kWarpUnits * kSizes.sum_warps == kSizes.units || unit < kSizes.units;
    return is_of_block && (kSizes.hidden % kSizes.units == 0 ||
                           BlockOfScan<Plan>() * kSizes.units + unit < kSizes.hidden);
  }
  __device__ __forceinline__ bool Exists(int item) const {
    const bool has_slot = kSlots == 1 || kSlots % 2 == 0 || SlotOf(item) < kSlots;
    return IsUnit(UnitOf(item)) && has_slot;
  }

  __device__ __forceinline__ int Load(const GraphScanProblem& p, const TeamTile& tile) const {
    return lane_ < kSources ? Tiles::LoadSource(p, tile, lane_ / kSlots, lane_ % kSlots) : -1;
  }

  // What a lane sees of one source of a tile: its number in the script, if it exists, and its place
  // in the window, if it is near.
  struct Own {
    int source;
    uint32_t place;
    bool exists, is_near;
  };

  // The tile is the team's `count`-th.
  __device__ __forceinline__ Own Look(const GraphScanProblem& p, const TeamTile& tile,
                                      uint32_t count, int source) const {
    const bool exists = Tiles::Checked(p, tile, source).exists;
    const int row = exists ? source - p.leaves : -1, of_tile = row / kTileRows;
    const uint32_t place =
        Window::PlaceOfTile(count + static_cast<uint32_t>(tile.number - of_tile)) +
        Window::PlaceOfRow(row % kTileRows);
    return {source, place, exists, row >= 0 && Window::IsNear(of_tile, tile.number)};
  }

  // The lanes that look at the same source. It takes the longer the more sources there are.
  __device__ __forceinline__ static uint32_t Alike(const Own& own) {
    return __match_any_sync(kAllLanes, own.exists ? own.source : -1);
  }

  // Each lane tells all that add to its source.
  __device__ __forceinline__ Turns Find(const Own& own, uint32_t alike,
                                        Target (&targets)[kItems][kRows]) const {
    const int before = __popc(alike & ((1u << lane_) - 1));
    const uint32_t own_at = own.is_near ? own.place : static_cast<uint32_t>(own.source);
    const int own_turn = own.is_near ? before : own.exists ? before + kInMemory : -1;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int lane = (first_row_ + i) * kSlots + (Exists(item) ? SlotOf(item) : 0);
        const uint32_t at = __shfl_sync(kAllLanes, own_at, lane);
        Target& target = targets[item][i];
        target.turn = __shfl_sync(kAllLanes, own_turn, lane);
        target.at = target.turn < kInMemory ? window_.AddressOf(at, UnitOf(item)) : at;
        if (!Exists(item)) target.turn = -1;
      }
    }
    return {1 + __reduce_max_sync(kAllLanes, own.exists ? before : 0),
            __any_sync(kAllLanes, own_turn >= kInMemory) != 0};
  }

  // What rows of the tile emit to their sources: the parts of all warps, added in pairs. It is
  // added to what is in the window, as far as others need not be waited for.
  __device__ __forceinline__ void SumParts(const Target (&targets)[kItems][kRows],
                                           float (&values)[kItems][kRows][kValues]) const {
    const uint32_t parts = AddressOfShared(ring_.partials());
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      // What does not exist is read from where something is.
      const int slot = Exists(item) ? SlotOf(item) : 0, unit = Exists(item) ? UnitOf(item) : 0;
      const uint32_t from = parts + PlaceOfProduct(slot * kSizes.units + unit, first_row_) * 4;
      float sums[kSizes.warps][kRows], passed[kCarries > 0 ? kCarries : 1][kRows];
#pragma unroll
      for (int warp = 0; warp < kSizes.warps; ++warp) {
        LoadRows(from + warp * kSizes.warp_part * 4, sums[warp]);
      }
      const int first = PlaceOfProduct(slot * kCarries * kSizes.units + unit, first_row_);
#pragma unroll
      for (int c = 0; c < kCarries; ++c) {
        const int place = kSizes.passed_at + PlaceBehind(c * kSizes.units, first);
        LoadRows(parts + place * 4, passed[c]);
      }
      float before[kRows][kValues];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (targets[item][i].turn == 0) Window::Load(targets[item][i].at, before[i]);
      }
#pragma unroll
      for (int distance = 1; distance < kSizes.warps; distance *= 2) {
#pragma unroll
        for (int warp = 0; warp + distance < kSizes.warps; warp += 2 * distance) {
#pragma unroll
          for (int i = 0; i < kRows; ++i) sums[warp][i] += sums[warp + distance][i];
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        float (&value)[kValues] = values[item][i];
        value[0] = sums[0][i];
#pragma unroll
        for (int c = 0; c < kCarries; ++c) value[1 + c] = passed[c][i];
        if (targets[item][i].turn != 0) continue;
#pragma unroll
        for (int v = 0; v < kValues; ++v) before[i][v] += value[v];
        Window::Store(targets[item][i].at, before[i]);
      }
    }
  }

  __device__ __forceinline__ static void LoadRows(uint32_t from, float (&rows)[kRows]) {
    uint32_t words[kRows];
    LoadShared(from, words);
#pragma unroll
    for (int i = 0; i < kRows; ++i) rows[i] = __uint_as_float(words[i]);
  }

  // Of several rows that have a source those that are not the first.
  __device__ __forceinline__ void AddToWindow(int turn, const Target (&targets)[kItems][kRows],
                                              const float (&values)[kItems][kRows][kValues]) const {
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kItems * kRows; ++n) {
      const Target& target = targets[n / kRows][n % kRows];
      if (target.turn != turn) continue;
      float sums[kValues];
      Window::Load(target.at, sums);
#pragma unroll
      for (int v = 0; v < kValues; ++v) sums[v] += values[n / kRows][n % kRows][v];
      Window::Store(target.at, sums);
    }
  }

  // To leaves, which may be sources of rows of several groups, and to what is far away.
  __device__ __forceinline__ void AddInMemory(int turns, const Target (&targets)[kItems][kRows],
                                              const float (&values)[kItems][kRows][kValues]) const {
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      if (turn > 0) __syncwarp();
#pragma unroll
      for (int n = 0; n < kItems * kRows; ++n) {
        const Target& target = targets[n / kRows][n % kRows];
        if (target.turn != turn + kInMemory) continue;
        const bool is_leaf = target.at < leaves_;
        const uint64_t behind =
            MultiplyWide(target.at, kRowBytes) + (UnitOf(n / kRows) - first_unit_) * sizeof(float);
#pragma unroll
        for (int v = 0; v < kValues; ++v) {
          const uint64_t at = (is_leaf ? leaves_at_[v] : rows_at_[v]) + behind;
          AddRelaxed(reinterpret_cast<float*>(at), values[n / kRows][n % kRows][v]);
        }
      }
    }
  }

  const int lane_;
  const int first_unit_, first_slot_, first_row_;
  const Window window_;
  Ring<Plan> ring_;
  Tiles tiles_;
  const uint32_t leaves_;
  // What is added to leaves, and to computed rows, which are counted behind leaves, lies in memory:
  // of the lane's first unit.
  uint64_t leaves_at_[kValues], rows_at_[kValues];
};

}  // namespace jaxsparse
