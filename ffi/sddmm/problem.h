// out[e] = (sum_d x[row(e),d] * y[column(e),d]) * scale_by[e] at the stored entries e of a pattern,
// for every batch entry; 0 at padding.
#pragma once

#include "common/types.h"

namespace jaxsparse {

// Stored entries that a group of lanes of the CUDA kernel owns: long enough to look a row up
// seldom.
inline constexpr int kSddmmEntriesPerGroup = 16;

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

}  // namespace jaxsparse
