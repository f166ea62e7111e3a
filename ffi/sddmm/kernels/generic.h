// What host and device share of the generic kernel of the sampled dense-dense product.
#pragma once

#include "sddmm/problem.h"

namespace jaxsparse {

constexpr int kSddmmGenericThreads = 128;      // of a block
constexpr int kSddmmGenericEntriesAtOnce = 4;  // whose loads overlap

// Stored entries that a group of lanes owns: one for each lane, or fewer where there would be too
// few groups to fill a GPU.
JAXSPARSE_INLINE int SddmmEntriesOfGroup(const SddmmProblem& p) {
  constexpr int64_t kEnoughGroups = 8192;
  int entries = LanesFor(p.d);
  while (entries > 4 && p.batch.count * CeilDivide(p.pattern.nse, entries) < kEnoughGroups) {
    entries /= 2;
  }
  return entries;
}

}  // namespace jaxsparse
