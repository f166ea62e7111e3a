// Cuts of the rows of a pattern, as they come with it.
#pragma once

#include "cuda/row_cuts.h"
#include "device/operands.h"

namespace jaxsparse {

// Lengths of rows of a power law.
inline std::vector<int> Skewed(int rows, int longest) {
  std::vector<int> lengths(static_cast<size_t>(rows));
  std::uniform_real_distribution<double> uniform(0.01, 1);
  for (int& length : lengths) {
    length = static_cast<int>(std::min<double>(longest, std::pow(uniform(generator), -1.5))) - 1;
  }
  return lengths;
}

// Of batch entries that have offsets of their own, or of all.
inline std::vector<int32_t> CutsOf(const Pattern& pattern, int64_t own) {
  std::vector<int32_t> cuts;
  const auto* offsets = static_cast<const int32_t*>(pattern.row_offsets.data);
  for (int64_t entry = 0; entry < own; ++entry, offsets += pattern.rows + 1) {
    const int64_t units = RowUnits(pattern.rows, pattern.nse);
    int64_t row = 0;
    for (int64_t unit = 0; unit <= units; ++unit) {
      const int64_t wanted = unit * kPlacesOfUnit;
      const auto place_of = [&](int64_t of) { return offsets[of] + kPlacesOfRow * of; };
      while (row < pattern.rows && place_of(row + 1) <= wanted) ++row;
      const int64_t length = row < pattern.rows ? int64_t{offsets[row + 1]} - offsets[row] : 0;
      const int64_t within = length > kMostOfWholeRow ? wanted - place_of(row) : 0;
      const bool at_end = length > 0 && within >= length;
      cuts.push_back(static_cast<int32_t>(row + at_end));
      cuts.push_back(static_cast<int32_t>(offsets[row] + std::min(within, length)));
    }
  }
  return cuts;
}

}  // namespace jaxsparse
