// Where a script has what a kernel reads: one array of int32, by which a program that is compiled
// once runs over any graphs (jaxsparse/dynamic/script.py).
//
//   header       kAlignment words
//   group_tiles  groups + 1: group g owns tiles group_tiles[g] to group_tiles[g + 1] - 1
//   records      one of each tile: its kind; the tile that it waits for on the way back; sources,
//                (row, slot); the row of xs of each of its rows
//
// Sections and records begin at multiples of kAlignment words.
#pragma once

#include "types.h"

namespace jaxsparse {

struct ScriptShape {
  static constexpr int kAlignment = 32;

  int slots = 1;  // children of a row
  int width = 8;  // rows of a tile

  JAXSPARSE_INLINE static constexpr int64_t Aligned(int64_t words) {
    return (words + kAlignment - 1) / kAlignment * kAlignment;
  }
  JAXSPARSE_INLINE static constexpr int64_t GroupTilesAt() { return kAlignment; }
  JAXSPARSE_INLINE static constexpr int64_t RecordsAt(int64_t groups) {
    return GroupTilesAt() + Aligned(groups + 1);
  }
  JAXSPARSE_INLINE constexpr int64_t record_words() const {
    return Aligned(kSourcesAt + width * slots + width);
  }
  // Within a record.
  static constexpr int kWaitAt = 1, kSourcesAt = 2;
  JAXSPARSE_INLINE constexpr int SourceAt(int row, int slot) const {
    return kSourcesAt + row * slots + slot;
  }
  JAXSPARSE_INLINE constexpr int RowOfXsAt(int row) const {
    return kSourcesAt + width * slots + row;
  }
};

}  // namespace jaxsparse
