// How work on a pattern is cut into units of about as many entries, whatever the lengths of rows
// are, for host and device (Merrill and Garland 2016, "Merge-Based Parallel Sparse Matrix-Vector
// Multiplication", count rows and entries alike so).
//
// A row takes kPlacesOfRow places and one for each of its entries, so that empty rows are shared
// out, too. Unit t is to begin at place t * kPlacesOfUnit. Where that is within a row it begins at
// the row's begin, unless the row is longer than kMostOfWholeRow: then it begins within, and each
// unit of the row has a piece of it. So a unit is whole rows, at most MostRowsOfUnits(1), with a
// piece of a long row in front of them or behind.
//
// On small graphs, all of whose units run at once, the longest unit sets the time. So units are
// short, and the longest is twice as long as they are in the mean.
#pragma once

#include "types.h"

namespace jaxsparse {

constexpr int kPlacesOfUnit = 64, kPlacesOfRow = 4, kMostOfWholeRow = 64;
// Of neighbouring units: they begin at most one short row in front of their place.
constexpr int MostRowsOfUnits(int units) { return units * kPlacesOfUnit / kPlacesOfRow + 1; }
constexpr int MostEntriesOfUnits(int units) { return units * kPlacesOfUnit + kMostOfWholeRow; }

// Where a unit begins: the row and the entry; of the last one's end, the number of rows and of
// entries.
struct RowCut {
  int32_t row, entry;
};

// Into how many units rows are cut; there is one cut more.
JAXSPARSE_INLINE int64_t RowUnits(int64_t rows, int64_t nse) {
  return CeilDivide(nse + kPlacesOfRow * rows, kPlacesOfUnit);
}

// Whether cuts come with a pattern: where rows are short and few places are stored, as of graphs,
// whose rows are of very different lengths. Weights of networks, at most 99 % sparse, keep their
// kernels.
JAXSPARSE_INLINE bool ComesWithRowCuts(int64_t rows, int64_t columns, int64_t nse) {
  constexpr int64_t kMostPlaces = int64_t{1} << 30, kMostMeanLength = 100, kLeastPlaces = 128;
  return 0 < nse && nse < kMostMeanLength * rows && kPlacesOfRow * rows < kMostPlaces - nse &&
         kLeastPlaces * nse < rows * columns;
}

// Whether kernels of runs fit, whose counters have 32 bits: there are cuts, and not too many units.
JAXSPARSE_INLINE bool RunsFit(const Pattern& pattern, const Batch& batch, const Array& row_cuts) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t entries = batch.count > 1 ? batch.count : 1;
  return row_cuts.data != nullptr && pattern.nse < kMost &&
         RowUnits(pattern.rows, pattern.nse) < kMost / entries;
}

}  // namespace jaxsparse
