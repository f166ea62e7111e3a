// What the host decides of preparations for products on tensor cores (cuda/preparation.h): what
// comes with a pattern, and when and how a prologue kernel prepares the rest.
#pragma once

#include <cstdint>

#include "cuda/preparation.h"
#include "nvrtc/kernel.h"

namespace jaxsparse {

// Whether starts of tiles come with a pattern: not if they were over two numbers for each entry, as
// of matrices that are too sparse or too narrow for tensor cores.
inline bool ComesWithTileStarts(int64_t rows, int64_t columns, int64_t nse) {
  constexpr int64_t kMost = int64_t{1} << 30;  // places of which fit 32 bits
  const int64_t starts = TileStarts(rows, columns).At(1, 0);
  return 0 < starts && starts <= kMost && starts <= 2 * nse;
}
// A single 0 comes in place of those that don't: JAX 0.11 can't compile an array of size 0 in a
// shard_map.
constexpr int64_t kNoTileStarts = 1;

// The rate at which components of a dense operand are written, and read by the next kernel.
constexpr double kComponentsBytes = 2e6;  // a microsecond

// Of a prologue kernel.
inline LaunchShape PrepareShape(const Preparation& of) {
  constexpr int64_t kMostBlocks = 1 << 16;
  return {of.Units() < kMostBlocks ? of.Units() : kMostBlocks, kPrepareThreads, kPrepareBytes};
}

// Whether a product on tensor cores is given so many bytes of workspace where it is not asked for
// by its name: not if so few entries are stored that another kernel is chosen, nor if it is much.
inline bool PaysToPrepare(const Pattern& stored, int64_t bytes) {
  constexpr int64_t kMost = int64_t{1} << 29, kPlacesOfEntry = 64;
  return bytes <= kMost && stored.nse * kPlacesOfEntry >= stored.rows * stored.columns;
}

}  // namespace jaxsparse
