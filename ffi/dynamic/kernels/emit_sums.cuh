// What is added to sources in a pass from rows to them. A block adds to its own units alone, in the
// order of tiles, so that sums are the same in every run, whatever the graphs: of a source that
// several rows of a tile have, or that fills several slots, one thread adds all, in their order.
#pragma once

#include "dynamic/kernels/ring.cuh"
#include "dynamic/kernels/team_items.cuh"
#include "dynamic/kernels/team_mma.cuh"
#include "dynamic/kernels/tiles_of_team.cuh"
#include "persistent/delay.cuh"

namespace jaxsparse {

template <typename Plan>
class EmitSums {
  using Tiles = TilesOfTeam<Plan, true>;
  static constexpr auto kSizes = Plan::kSizes;
  using Items = TeamItems<Plan, kSizes.sum_threads>;
  static constexpr int kSlots = Plan::kSlots, kItems = kSizes.sum_items;
  static constexpr int kSources = kTileRows * kSlots;  // of a tile, one for each lane
  static constexpr int kCarries = kSizes.passed / kSlots;
  static constexpr int kCarrySlots = kCarries > 0 ? kCarries : 1;
  static_assert(kSources <= kWarp);

 public:
  __device__ __forceinline__ EmitSums(const GraphScanProblem& p, Words4* shared)
      : lane_(threadIdx.x % kWarp),
        items_(threadIdx.x - kSizes.product_threads - kSizes.pointwise_threads),
        ring_(shared),
        tiles_(p) {}

  __device__ __forceinline__ void Run(const GraphScanProblem& p) {
    TeamTile tile = tiles_.Next(p);
    int source = Load(p, tile);
    for (int64_t number = 0; tile.exists; ++number) {
      const TeamTile next = tiles_.Next(p);
      const int next_source = Load(p, next);
      MeetTeam<Plan>(p, number, nullptr);
      Delay<Plan::kMostDelay>(number);
      const uint32_t alike = SameSource(source);
      Addend addends[kItems][kSlots];
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
#pragma unroll
        for (int k = 0; k < kSlots; ++k) {
          addends[n][k] = Find(p, tile, items_.At(n), k, source, alike);
        }
      }
      ring_.WaitUntilFull();
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
#pragma unroll
        for (int k = 0; k < kSlots; ++k) Add(p, items_.At(n).unit, &addends[n][k]);
      }
      // What some warps have added others may add to for the next tile.
      MeetOwnKind<Plan, kSizes.sum_threads>();
      ring_.Empty();
      MeetBlock<Plan>();
      tile = next;
      source = next_source;
    }
  }

 private:
  // Lane row * kSlots + slot has that source.
  __device__ __forceinline__ int Load(const GraphScanProblem& p, const TeamTile& tile) const {
    return lane_ < kSources ? Tiles::LoadSource(p, tile, lane_ / kSlots, lane_ % kSlots) : -1;
  }

  // The lanes that have the source of this one.
  __device__ __forceinline__ static uint32_t SameSource(int source) {
    uint32_t alike = 0;
#pragma unroll
    for (int lane = 0; lane < kSources; ++lane) {
      if (__shfl_sync(kAllLanes, source, lane) == source) alike |= 1u << lane;
    }
    return alike;
  }

  // Of a unit of a source: where its sums lie, what they were, and which lanes' rows and slots emit
  // to it; none where another thread adds these.
  struct Addend {
    int64_t at;
    bool is_leaf;
    uint32_t lanes;
    float sum, carries[kCarrySlots];
  };

  // The sums are asked for before the products are there. Those of leaves are added to in memory:
  // leaves may be sources of rows of several groups.
  __device__ __forceinline__ Addend Find(const GraphScanProblem& p, const TeamTile& tile,
                                         const TeamItem& item, int k, int source,
                                         uint32_t alike) const {
    const int lane = item.row * kSlots + k;
    const SourceRow to = Tiles::Checked(p, tile, __shfl_sync(kAllLanes, source, lane));
    const uint32_t lanes = __shfl_sync(kAllLanes, alike, lane);
    const bool is_first = (lanes & ((1u << lane) - 1)) == 0;
    Addend addend = {};
    addend.at = to.row * kSizes.hidden + Items::FirstUnit() + item.unit;
    addend.is_leaf = to.is_leaf;
    addend.lanes = item.exists && to.exists && is_first ? lanes : 0;
    if (addend.lanes == 0 || to.is_leaf) return addend;
    addend.sum = p.sums[addend.at];
#pragma unroll
    for (int c = 0; c < kCarries; ++c) addend.carries[c] = p.carries[c][addend.at];
    return addend;
  }

  __device__ __forceinline__ void Add(const GraphScanProblem& p, int unit, Addend* addend) const {
    if (addend->lanes == 0) return;
    float sum = 0, carries[kCarrySlots] = {};
    for (uint32_t left = addend->lanes; left != 0; left &= left - 1) {
      AddOfLane(unit, __ffs(static_cast<int>(left)) - 1, &sum, carries);
    }
    const int64_t at = addend->at;
    if (addend->is_leaf) {
      atomicAdd(p.leaf_sums + at, sum);
#pragma unroll
      for (int c = 0; c < kCarries; ++c) atomicAdd(p.leaf_carries[c] + at, carries[c]);
    } else {
      p.sums[at] = addend->sum + sum;
#pragma unroll
      for (int c = 0; c < kCarries; ++c) p.carries[c][at] = addend->carries[c] + carries[c];
    }
  }

  // What a row of the tile emits to the source in one of its slots.
  __device__ __forceinline__ void AddOfLane(int unit, int lane, float* sum, float* carries) const {
    const int row = lane / kSlots, k = lane % kSlots;
    const float* parts = ring_.partials() + PlaceOfProduct(k * kSizes.units + unit, row);
    float product = 0;
#pragma unroll
    for (int warp = 0; warp < kSizes.warps; ++warp) product += parts[warp * kSizes.warp_part];
    *sum += product;
    const float* passed = ring_.partials() + kSizes.passed_at;
#pragma unroll
    for (int c = 0; c < kCarries; ++c) {
      carries[c] += passed[PlaceOfProduct((k * kCarries + c) * kSizes.units + unit, row)];
    }
  }

  const int lane_;
  const Items items_;
  Ring<Plan> ring_;
  Tiles tiles_;
};

}  // namespace jaxsparse
