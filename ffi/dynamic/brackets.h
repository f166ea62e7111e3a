// Trees from text in brackets, as treebanks have it: "(3 (2 It) (4 (2 's) (4 great)))".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace jaxsparse {

struct BracketTrees {
  std::vector<int64_t> offsets = {0};  // trees + 1
  std::vector<int32_t> children;       // (rows, slots), each behind its children
  std::vector<int32_t> labels;         // (rows)
  std::vector<int32_t> words;          // (rows), -1 of rows with children
  std::vector<std::string> new_words;  // in the order in which they come
};

// Words are numbered in the order of `vocabulary` and, unless it is closed, of those that are new;
// if it is, all others have the number that follows. None, and an error that names tree and line,
// where the text is no such text.
std::optional<BracketTrees> ParseBrackets(std::string_view text, int64_t slots,
                                          const std::vector<std::string>& vocabulary, bool closed,
                                          std::string* error);

}  // namespace jaxsparse
