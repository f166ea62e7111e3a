// Packs a pattern by gaps, as problem.h says of cells of 0, on the host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "packed/pattern.h"

namespace jaxsparse {

struct GapArrays {
  std::vector<uint32_t> gaps;    // (steps, lanes)
  std::vector<int32_t> starts;   // (pieces + 1): steps in front of each piece
  std::vector<int32_t> sources;  // (steps, lanes, numbers of a step): the entry of each number; -1:
                                 // none
};

// The rows by the numbers that their longest streams take, most first, and those that take as many
// as they stand in `row_order`: all streams of a strip take as long as its longest. Those of
// several parts are summed, so that only with one part the padding is the least. Returns why the
// pattern can't be packed, or an empty string.
std::string OrderForGaps(const PackedPattern& pattern, int parts, std::vector<int32_t>* order);

// Returns why the pattern can't be packed in so many parts, or an empty string. Whatever its arrays
// hold, nothing is read or written outside of them.
std::string PackGaps(const PackedPattern& pattern, int parts, GapArrays* packed);

}  // namespace jaxsparse
