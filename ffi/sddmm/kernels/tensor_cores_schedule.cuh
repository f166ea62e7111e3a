// How the tensor core kernel of the sampled dense-dense product (tensor_cores.cu) shares its tiles
// out: work units, what controls a block's work in shared memory, and the search for tiles that
// have entries.
#pragma once

#include "cuda/pipeline.cuh"
#include "cuda/preparation.cuh"
#include "sddmm/kernels/tensor_cores.h"

namespace jaxsparse {

constexpr int kSddmmWarps = kSddmmRoleThreads / kWarp;  // of each role
constexpr int kSddmmWarpRows = kSddmmTileRows / kSddmmWarps;
constexpr int kEpilogueBarrier = 1;  // at which epilogue warps meet
static_assert(kSddmmRoleThreads == 2 * kWarpgroup && kSddmmWarpRows == 16);

// Neighbouring tiles of the same rows.
struct SddmmUnit {
  uint32_t entry;
  int first_row;
  uint32_t first, count;  // tiles
  uint32_t tiles;         // a bit for each one that has entries; none, once there are no more units
  uint32_t tile_of_y;     // its first one's, in the workspace
  const int32_t* starts;  // of the first of its rows in its first tile
  // Of its batch entry. Epilogue warps have no registers for them.
  const void* column_indices;
  const void* scale_by;
  void* out;
};

// All tiles, row by row, are cut into runs of about the same length, a few for each block; where
// rows end a run is cut into units. Blocks take turns in alternating order, so that later rows may
// have more entries than earlier ones.
struct SddmmSchedule {
  uint32_t across, of_entry;  // tiles
  uint32_t rounds, shorter, longer;

  __device__ explicit SddmmSchedule(const SddmmProblem& p) {
    const SddmmTiles tiles_of_entry = SddmmTilesOf(p);
    across = static_cast<uint32_t>(tiles_of_entry.across);
    of_entry = static_cast<uint32_t>(tiles_of_entry.down) * across;
    const uint32_t tiles = static_cast<uint32_t>(p.batch.count) * of_entry;
    rounds = (tiles - 1) / (gridDim.x * kSddmmUnitTiles) + 1;
    shorter = tiles / (rounds * gridDim.x);
    longer = tiles % (rounds * gridDim.x);
  }

  __device__ uint32_t RunAt(uint32_t round) const {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }
  __device__ uint32_t BeginOf(uint32_t run) const {
    return run * shorter + (run < longer ? run : longer);
  }
  __device__ SddmmUnit UnitAt(uint32_t tile, uint32_t end) const {
    SddmmUnit unit;
    unit.entry = tile / of_entry;
    const uint32_t in_entry = tile - unit.entry * of_entry, left = across - in_entry % across;
    unit.first_row = static_cast<int>(in_entry / across) * kSddmmTileRows;
    unit.first = in_entry % across;
    unit.count = left <= end - tile ? left : end - tile;
    return unit;
  }
};

template <typename T, int kInner>
__device__ __forceinline__ Preparation PreparationOf(const SddmmProblem& p) {
  return SddmmPreparation(p, kInner, kComponents<T>);
}

// What controls a block's work, in shared memory behind stages and products. There are two units:
// the one that is multiplied and the next one. Tiles of y come through a pipeline
// (cuda/pipeline.cuh), and so do products, through one for each consumer warp and the epilogue warp
// that picks its rows.
struct SddmmControl {
  SddmmSchedule schedule;
  Preparation prepared;
  const char* components_of_y;
  SddmmUnit units[2];
  // Barriers: of units, and of these pipelines. That a unit has been read epilogue warps know when
  // its products have come.
  uint64_t scheduled[2];
  uint64_t tile_full[kSddmmMostStages], tile_empty[kSddmmMostStages];
  uint64_t product_full[kSddmmProducts][kSddmmWarps];
  uint64_t product_empty[kSddmmProducts][kSddmmWarps];
  // Of each epilogue warp, the tiles that have entries. Warps may be one unit apart.
  uint32_t found[2][kSddmmWarps];
  uint32_t queue[2 * kSddmmUnitTiles];  // which tiles of y are multiplied, of the two units

  template <int kStages>
  __device__ __forceinline__ PipelineStage TileAt(PipelineState<kStages> at) {
    static_assert(kStages <= kSddmmMostStages);
    return {&tile_full[at.stage], &tile_empty[at.stage], at.phase};
  }
  __device__ __forceinline__ PipelineStage ProductAt(PipelineState<kSddmmProducts> at, int warp) {
    return {&product_full[at.stage][warp], &product_empty[at.stage][warp], at.phase};
  }
};
static_assert(sizeof(SddmmControl) <= kSddmmControlBytes);

// The bits that any of the lanes has.
__device__ __forceinline__ uint32_t BitsOfLanes(uint32_t bits) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    bits |= __shfl_xor_sync(kAllLanes, bits, distance);
  }
  return bits;
}

// Where the starts of a unit's row are. There are none of rows in tiles that do not exist.
__device__ __forceinline__ const int32_t* StartsOfRow(const Preparation& prepared,
                                                      const SddmmUnit& unit, int row) {
  const int below = row / kTileSize;
  if (unit.first_row / kTileSize + below >= prepared.starts.down) return nullptr;
  return unit.starts + prepared.starts.At(0, below) + row % kTileSize;
}

// Writes padding. Blocks share that of each batch entry.
template <typename Out>
__device__ __forceinline__ void WritePadding(const SddmmProblem& p) {
  const int64_t nse = p.pattern.nse;
  const int64_t parts = gridDim.x > p.batch.count ? gridDim.x / p.batch.count : 1;
#pragma unroll 1
  for (int64_t share = blockIdx.x; share < p.batch.count * parts; share += gridDim.x) {
    const int64_t entry = share / parts;
    const auto* offsets = p.pattern.row_offsets.At<const int32_t>(p.batch, entry);
    const int64_t stored = p.pattern.rows > 0 ? RowBounds::Clamp(offsets[p.pattern.rows], nse) : 0;
    Out* out = p.out.At<Out>(p.batch, entry);
    const int64_t first = share % parts * kSddmmRoleThreads + threadIdx.x % kSddmmRoleThreads;
#pragma unroll 1
    for (int64_t i = stored + first; i < nse; i += parts * kSddmmRoleThreads) {
      FromAccumulator(0.0f, &out[i]);
    }
  }
}

// Epilogue warps' search for a block's units, in turn.
template <typename T, typename Out, typename Index>
class SddmmScheduler {
  const SddmmProblem& p_;
  SddmmControl& control_;
  const int thread_ = threadIdx.x % kSddmmRoleThreads;
  uint32_t round_ = 0, tile_, searches_ = 0;

 public:
  __device__ SddmmScheduler(const SddmmProblem& p, SddmmControl& control)
      : p_(p), control_(control), tile_(control.schedule.BeginOf(control.schedule.RunAt(0))) {}

  // Hands out the next unit that has entries, once all epilogue warps are done with the one that
  // was in the slot. Where there is none, hands out one without tiles, and writes the padding.
  __device__ SddmmUnit Schedule(int slot) {
    SddmmUnit unit;
    unit.tiles = 0;
#pragma unroll 1
    while (unit.tiles == 0 && NextUnit(&unit)) unit.tiles = TilesOf(unit);
    if (unit.tiles == 0) WaitAt<kSddmmRoleThreads>(kEpilogueBarrier);
    if (thread_ == 0) {
      SddmmUnit& scheduled = control_.units[slot];
      scheduled = unit;
      if (unit.tiles != 0) {
        scheduled.column_indices = p_.pattern.column_indices.At<const Index>(p_.batch, unit.entry);
        scheduled.scale_by = p_.scale_by.At<const T>(p_.batch, unit.entry);
        scheduled.out = p_.out.At<Out>(p_.batch, unit.entry);
      }
      Arrive(&control_.scheduled[slot]);
    }
    if (unit.tiles == 0) WritePadding<Out>(p_);
    return unit;
  }

 private:
  __device__ bool NextUnit(SddmmUnit* unit) {
    const SddmmSchedule& schedule = control_.schedule;
    while (round_ < schedule.rounds) {
      const uint32_t end = schedule.BeginOf(schedule.RunAt(round_) + 1);
      if (tile_ < end) {
        *unit = schedule.UnitAt(tile_, end);
        tile_ += unit->count;
        const Preparation& prepared = control_.prepared;
        const int64_t of_y = OwnEntry(p_.batch, p_.y, unit->entry);
        unit->tile_of_y = static_cast<uint32_t>(of_y * prepared.components.down) + unit->first;
        unit->starts = prepared.StartsOf(p_.batch, p_.pattern, p_.workspace, unit->entry) +
                       prepared.starts.At(0, unit->first_row / kTileSize) + unit->first * kTileSize;
        return true;
      }
      if (++round_ < schedule.rounds) tile_ = schedule.BeginOf(schedule.RunAt(round_));
    }
    return false;
  }

  // The tiles of a unit that have entries, and the last one of rows if the columns of any do not
  // rise. Each thread looks at half of a row.
  __device__ __forceinline__ uint32_t TilesOf(const SddmmUnit& unit) {
    constexpr int kHalf = kSddmmUnitTiles / 2;
    static_assert(kSddmmRoleThreads == 2 * kSddmmTileRows);
    const int first = thread_ / kSddmmTileRows * kHalf;
    const int count = p_.pattern.columns == 0 ? 0 : static_cast<int>(unit.count) - first;
    const int32_t* starts = StartsOfRow(control_.prepared, unit, thread_ % kSddmmTileRows);
    uint32_t found = 0;
    if (starts != nullptr) {
      int32_t places[kHalf + 1] = {};
#pragma unroll
      for (int i = 0; i <= kHalf; ++i) {
        if (count > 0 && i <= count) places[i] = starts[(first + i) * kTileSize];
      }
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        if (i < count && (places[i] < places[i + 1] || places[i + 1] < 0)) found |= 1u << i;
      }
    }
    found = BitsOfLanes(found << first);
    uint32_t (&of_warps)[kSddmmWarps] = control_.found[searches_++ % 2];
    if (thread_ % kWarp == 0) of_warps[thread_ / kWarp] = found;
    WaitAt<kSddmmRoleThreads>(kEpilogueBarrier);
    return BitsOfLanes(of_warps[thread_ % kSddmmWarps]);
  }
};

}  // namespace jaxsparse
