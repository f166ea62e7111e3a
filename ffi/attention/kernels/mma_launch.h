// What the host decides for all of attention's kernels by mma.sync.
#pragma once

#include <algorithm>
#include <string>

#include "attention/kernels/items_launch.h"
#include "attention/kernels/mma.h"
#include "attention/kernels/score_source.h"
#include "attention/kernels/tile_sums.h"
#include "host/variant.h"
#include "nvrtc/expression.h"

namespace jaxsparse {

inline MmaTiles MmaTilesOf(const AttentionOperands& p) {
  return {.head_size = MmaSizeOf(p.head_size),
          .value_size = MmaSizeOf(p.value_size),
          .number_bytes = static_cast<int>(SizeOf(p.dtype))};
}

inline std::string MmaTilesExpression(const MmaTiles& tiles) {
  return ConfigExpression(
      "MmaTiles", {Field("head_size", tiles.head_size), Field("value_size", tiles.value_size),
                   Field("number_bytes", tiles.number_bytes), Field("rows", tiles.rows),
                   Field("strips", tiles.strips)});
}

// As much as shared memory has room for: first all rows of a tile, then two stages.
template <typename Config>
Config Fitted(const Gpu& gpu, Config config) {
  for (const int rows : {kMaskTile, kMaskCell}) {
    for (const int stages : {2, 1}) {
      config.tiles.rows = rows;
      config.stages = stages;
      if (config.SharedBytes() <= gpu.shared_bytes) return config;
    }
  }
  return config;
}

// Columns of scores beside what a warp's registers have to have room for.
inline int MmaColumnsOf(const MmaTiles& tiles, bool has_room) {
  const int most = tiles.number_bytes == 2 ? kMaskCell : kMaskCell / 2;
  return has_room ? most : most / 2;
}

// Whether copies of 16 bytes can take an array from there.
inline bool IsMmaAligned(const Array& array) {
  return reinterpret_cast<uint64_t>(array.data) % 16 == 0;
}

// Functions of scores are printed in forms that are exact enough for operands of 16 bits. Of sums
// over tiles there are none.
inline bool MmaTakes(const AttentionScores& scores, DType dtype) {
  return !scores.Exist() || (SizeOf(dtype) == 2 && FitsScores(scores) &&
                             TileSumsBefore(scores, scores.gradients) == 0);
}

// Tensor cores of warps multiply bfloat16 numbers since compute capability 8.0. Lines of heads are
// copied by 16 bytes.
inline bool MmaTakes(const AttentionOperands& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t at_once = 16 / SizeOf(p.dtype);
  const auto sized = [&](int64_t size) {
    return 0 < size && size <= kMmaMostSize && size % at_once == 0;
  };
  return p.has_mask && MmaTakes(p.scores, p.dtype) && p.dtype != DType::kFloat64 &&
         p.gpu.compute_capability >= 80 && sized(p.head_size) && sized(p.value_size) &&
         IsMmaAligned(p.query) && IsMmaAligned(p.key) && IsMmaAligned(p.value) && 0 < p.keys &&
         p.keys < kMost && p.queries < kMost;
}
// Whether numbers of a mask's entries and cells, and of blocks for so many heads, have 32 bits.
inline bool MmaTakes(const AttentionOperands& p, const MaskTiles& mask, int64_t heads) {
  constexpr int64_t kMost = int64_t{1} << 28;
  return mask.capacity < kMost && mask.cells < kMost &&
         p.batch.count * heads < kMost / std::max<int64_t>(mask.rows, 1);
}

// Clocks of a multiprocessor but for the launch, fitted to times on an H200.
struct MmaCostModel {
  double launch_us;     // microseconds
  double tile;          // of 128 x 128 positions of a head, with sizes of 128, in 16 bits
  double tile_of_size;  // the part of it that grows with them
  double other_size;    // times as many in 16 bits with a size beyond 64 that is not 128
  double exact;         // times as many in float32
  double item;
};

inline double MmaMicroseconds(const MmaCostModel& model, const AttentionOperands& p,
                              const MaskTiles& mask, const AttentionItems& items, double size) {
  const auto heads = static_cast<double>(p.batch.count * p.groups * p.per_group);
  const auto count = static_cast<double>(items.Count());
  const double blocks = std::max(1.0, std::min(count, static_cast<double>(p.gpu.multiprocessors)));
  double of_tile = model.tile * (1 - model.tile_of_size + model.tile_of_size * size);
  const auto is_usual = [](int64_t of_head) { return of_head <= 64 || of_head == 128; };
  if (p.dtype == DType::kFloat32) of_tile *= model.exact;
  else if (!is_usual(p.head_size) || !is_usual(p.value_size)) of_tile *= model.other_size;
  const double clocks = heads * static_cast<double>(mask.capacity) * of_tile + count * model.item;
  return clocks / blocks / kClocksOfMicrosecond;
}

}  // namespace jaxsparse
