// How the kernel of cotangents of queries is configured, by the host, for the device.
#pragma once

#include "attention/kernels/cotangent.h"
#include "attention/kernels/tile_sums.h"
#include "cuda/pipeline.h"

namespace jaxsparse {

struct AttentionRowsConfig {
  int head_size = 128;  // of keys and of values: 64 or 128

  static constexpr int kWordsBytes = 4 * kMaskCellWords * 4;  // of a tile's cells

  constexpr int Stages() const { return head_size == 64 ? 4 : 2; }
  // Of 64 queries, or of their cotangents; and of a tile of keys, or of values; in blocks of 64
  // numbers of each.
  constexpr int RowsBytes() const { return kMaskCell * head_size * 2; }
  constexpr int TileBytes() const { return kMaskTile * head_size * 2; }
  // Shared memory: both warpgroups' queries, cotangents of theirs, stages of a tile of keys and one
  // of values, words of cells, lse and ct_sums of both warpgroups, what controls the block's work,
  // and slots of sums of columns or distances, which most kernels leave alone. Values of a stage
  // are done with first, so the next keys take their place, and values that of the keys: keys are
  // the second tile of a stage in every other round.
  constexpr int StagesAt() const { return 2 * kCotangentGroups * RowsBytes(); }
  constexpr int KeysAt(uint32_t stage, uint32_t phase) const {
    return StagesAt() + static_cast<int>(2 * stage + phase) * TileBytes();
  }
  constexpr int ValuesAt(uint32_t stage, uint32_t phase) const { return KeysAt(stage, phase ^ 1); }
  constexpr int WordsAt() const { return StagesAt() + 2 * Stages() * TileBytes(); }
  constexpr int ShiftsAt() const { return WordsAt() + Stages() * kWordsBytes; }
  constexpr int ControlAt() const { return ShiftsAt() + kCotangentGroups * kShiftsBytes; }
  constexpr int TileSumsAt() const { return ControlAt() + kCotangentControlBytes; }
  constexpr int SharedBytes() const { return TileSumsAt() + kTileSumSlots * kTileSumBytes; }
};

}  // namespace jaxsparse
