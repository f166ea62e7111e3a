// Packs a pattern in streams of lanes, as problem.h says, on the host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "packed/pattern.h"

namespace jaxsparse {

struct PackedStreams {
  std::vector<uint32_t> masks;   // (pieces, steps, lanes)
  std::vector<int32_t> starts;   // (pieces + 1): rows of words in front of each piece
  std::vector<int32_t> panels;   // (pieces, panels, 2): rows of the piece that all its streams are
                                 // through with when a panel begins, and that are read when it ends
  std::vector<int32_t> sources;  // (rows of words, lanes, numbers of a word): the entry of each
                                 // number; -1: none
};

// How it is to be packed. Four numbers of a word, of 8 bits, have cells of 1.
struct PackedForm {
  int cell = 1;
  int parts = 1;
  int numbers_of_word = 2;
};

// Returns why the pattern can't be packed, or an empty string. Whatever its arrays hold, nothing is
// read or written outside of them.
std::string PackStreams(const PackedPattern& pattern, const PackedForm& form,
                        PackedStreams* streams);

}  // namespace jaxsparse
