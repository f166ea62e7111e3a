// What the host tells the kernel that fills memory before another kernel begins.
#pragma once

#include "types.h"

namespace jaxsparse {

// Words of 4 bytes, which is what `at` is a multiple of, that all get one value.
struct FilledRegion {
  void* at = nullptr;
  int64_t words = 0;
  uint32_t value = 0;
};
constexpr int kMostFilledRegions = 32;

struct FillProblem {
  FilledRegion regions[kMostFilledRegions];
  int count = 0;
};
constexpr int kFillThreads = 256;
constexpr int kWordsOfFill = 4;  // that a thread stores at once

}  // namespace jaxsparse
