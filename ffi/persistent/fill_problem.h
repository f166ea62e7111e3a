// What the host tells the kernel that fills memory before another kernel begins.
#pragma once

#include "types.h"

namespace jaxsparse {

// Words of 4 bytes, which is what `at` is a multiple of, that all get one value. Where part_words
// is not 0, they are parts of so many words, and only the first ones, those that are used, are
// filled.
struct FilledRegion {
  void* at = nullptr;
  int64_t words = 0;
  uint32_t value = 0;
  int64_t part_words = 0;

  // How many words are filled, whatever number of parts is said to be used.
  JAXSPARSE_INLINE int64_t Words(int32_t used_parts) const {
    const int64_t used = used_parts < 0 ? 0 : used_parts * part_words;
    return part_words > 0 && used < words ? used : words;
  }
};
constexpr int kMostFilledRegions = 32;

struct FillProblem {
  FilledRegion regions[kMostFilledRegions];
  int count = 0;
  const int32_t* used_parts = nullptr;  // where the kernel runs; may be null if nothing has parts
};
constexpr int kFillThreads = 1024;
constexpr int kWordsOfFill = 4;  // that a thread stores at once

}  // namespace jaxsparse
