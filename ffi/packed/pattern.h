// A pattern that is to be packed, on the host: its checks, and its rows' entries in order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxsparse {

// One pattern in compressed rows, and the order in which its rows make strips.
struct PackedPattern {
  const int32_t* row_offsets;
  const int32_t* column_indices;
  const int32_t* row_order;
  int64_t rows, columns;
  int64_t entries;  // of column_indices
};

// Why the arrays are no pattern in compressed rows, or an empty string.
std::string DamageOf(const PackedPattern& pattern);

using Entries = std::vector<int32_t>;
constexpr int32_t kNoEntry = -1;  // of a number that none has

// The entries of a row of a pattern without damage, by rising columns; empty, and an error, if a
// column stands there twice.
Entries EntriesOf(const PackedPattern& pattern, int32_t row, std::string* error);

// Those of so many rows, fewer at the end, from a place of the order on.
std::vector<Entries> EntriesOfRows(const PackedPattern& pattern, int64_t first, int64_t count,
                                   std::string* error);

}  // namespace jaxsparse
