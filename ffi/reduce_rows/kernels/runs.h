// How the reduction of rows by runs is configured, by the host, for the device.
#pragma once

#include "cuda/row_cuts.h"
#include "reduce_rows/problem.h"

namespace jaxsparse {

constexpr int kReduceRunsThreads = 128;  // of a block

struct ReduceRunsConfig {
  Reduction reduction = Reduction::kMaximum;
  int units = 4;  // of a run, of those that rows are cut into

  // Vectors of 16 bytes for each lane of a warp that suffice for the longest run, of elements of so
  // many bytes, wherever it begins within a vector.
  constexpr int LoadsOfLane(int bytes) const {
    const int of_vector = 16 / bytes, of_load = of_vector * kWarp;
    return (MostEntriesOfUnits(units) + of_vector - 1 + of_load - 1) / of_load;
  }
  // For which registers are left, of elements of so many bytes: in the first kernel and in the
  // second one.
  constexpr int Blocks(int bytes) const { return bytes == 8 ? 4 : 10; }
  constexpr int BlocksOfPieces(int bytes) const { return bytes == 8 ? 4 : 8; }
};

// Of a batch entry, each of which is a warp's.
JAXSPARSE_INLINE int64_t ReduceRunsOf(int64_t rows, int64_t nse, int units) {
  return CeilDivide(RowUnits(rows, nse), units);
}

// What a run leaves in the workspace: its piece of a row that has begun in an earlier one, and its
// piece of one that begins here and goes on.
constexpr int kReducedPieces = 2;

}  // namespace jaxsparse
