#include "packed/pattern.h"

#include <algorithm>
#include <numeric>

namespace jaxsparse {

std::string DamageOf(const PackedPattern& pattern) {
  const int32_t* offsets = pattern.row_offsets;
  if (offsets[0] != 0) return "row_offsets must begin with 0, got " + std::to_string(offsets[0]);
  std::vector<bool> is_in_order(pattern.rows);
  for (int64_t r = 0; r < pattern.rows; ++r) {
    const int32_t row = pattern.row_order[r];
    if (row < 0 || row >= pattern.rows || is_in_order[row]) {
      return "row_order must name each of " + std::to_string(pattern.rows) +
             " rows once, got row " + std::to_string(row) + " at place " + std::to_string(r);
    }
    is_in_order[row] = true;
    if (offsets[r + 1] < offsets[r]) {
      return "row_offsets must not fall, got " + std::to_string(offsets[r + 1]) + " behind " +
             std::to_string(offsets[r]);
    }
  }
  const int32_t stored = offsets[pattern.rows];
  if (stored > pattern.entries) {
    return "row_offsets must end with at most " + std::to_string(pattern.entries) +
           ", the number of column_indices, got " + std::to_string(stored);
  }
  for (int32_t i = 0; i < stored; ++i) {
    const int32_t column = pattern.column_indices[i];
    if (column < 0 || column >= pattern.columns) {
      return "column_indices must be of " + std::to_string(pattern.columns) + " columns, got " +
             std::to_string(column);
    }
  }
  return "";
}

Entries EntriesOf(const PackedPattern& pattern, int32_t row, std::string* error) {
  const int32_t* columns = pattern.column_indices;
  Entries entries(pattern.row_offsets[row + 1] - pattern.row_offsets[row]);
  std::iota(entries.begin(), entries.end(), pattern.row_offsets[row]);
  const auto before = [&](int32_t a, int32_t b) { return columns[a] < columns[b]; };
  if (!std::is_sorted(entries.begin(), entries.end(), before)) {
    std::sort(entries.begin(), entries.end(), before);
  }
  const auto twice = std::adjacent_find(entries.begin(), entries.end(), [&](int32_t a, int32_t b) {
    return columns[a] == columns[b];
  });
  if (twice == entries.end()) return entries;
  *error =
      "row " + std::to_string(row) + " stores column " + std::to_string(columns[*twice]) + " twice";
  return {};
}

std::vector<Entries> EntriesOfRows(const PackedPattern& pattern, int64_t first, int64_t count,
                                   std::string* error) {
  std::vector<Entries> rows;
  for (int64_t r = first; r < std::min(first + count, pattern.rows); ++r) {
    rows.push_back(EntriesOf(pattern, pattern.row_order[r], error));
    if (!error->empty()) break;
  }
  return rows;
}

}  // namespace jaxsparse
