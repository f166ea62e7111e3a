// Whether a pattern may be walked: offsets start at 0, never fall and end within the indices;
// columns of a row rise and are in range; row_order and permutation, which are derived, stay in
// range.
#pragma once

#include "types.h"

namespace jaxsparse {

struct CheckTopologyProblem {
  Pattern pattern;
  Batch batch;
  Array checked_offsets;  // result: row_offsets, so that whatever uses them runs later
  unsigned long long* bad_row = nullptr;  // result: batch_entry * (rows + 1) + row, or all ones
};

// What is wrong with a row; the place behind the last row stands for the end of the arrays.
template <typename Index>
JAXSPARSE_INLINE bool RowIsValid(const int32_t* row_offsets, const Index* columns,
                                 const int32_t* row_order, const int32_t* permutation, int64_t rows,
                                 int64_t column_count, int64_t nse, int64_t row) {
  if (row == 0 && row_offsets[0] != 0) return false;
  if (row == rows) return row_offsets[rows] >= 0 && row_offsets[rows] <= nse;
  const int64_t begin = row_offsets[row], end = row_offsets[row + 1];
  if (begin < 0 || begin > end || end > nse) return false;
  if (row_order[row] < 0 || row_order[row] >= rows) return false;
  int64_t previous = -1;
  for (int64_t i = begin; i < end; ++i) {
    if (columns[i] <= previous || columns[i] >= column_count) return false;
    if (permutation != nullptr && (permutation[i] < 0 || permutation[i] >= nse)) return false;
    previous = columns[i];
  }
  return true;
}

}  // namespace jaxsparse
