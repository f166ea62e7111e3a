// out[e] = (sum_d x[row(e),d] * y[column(e),d]) * scale_by[e] at the stored entries e of a pattern,
// for every batch entry; 0 at padding.
#pragma once

#include "common/types.h"

namespace jaxsparse {

constexpr int kSddmmThreads = 128;  // of a block of the CUDA kernel

struct SddmmProblem {
  Pattern pattern;
  int64_t d = 0;
  DType dtype = DType::kFloat32;      // x, y, scale_by
  DType out_dtype = DType::kFloat32;  // out
  Batch batch;
  Array x;         // (rows, d)
  Array y;         // (columns, d)
  Array scale_by;  // (nse,) or null
  Array out;       // (nse,)
};

// Entries that a group of lanes of the CUDA kernel owns: one for each lane, or fewer where there
// would be too few groups to fill a GPU.
JAXSPARSE_INLINE int SddmmRun(const SddmmProblem& p) {
  constexpr int64_t kEnoughGroups = 8192;
  int run = LanesFor(p.d);
  while (run > 4 && p.batch.count * CeilDivide(p.pattern.nse, run) < kEnoughGroups) run /= 2;
  return run;
}

}  // namespace jaxsparse
