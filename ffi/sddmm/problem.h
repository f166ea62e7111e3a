// out[e] = (sum_d x[row(e),d] * y[column(e),d]) * scale_by[e] at the stored entries e of a pattern,
// for every batch entry; 0 at padding.
#pragma once

#include "types.h"

namespace jaxsparse {

struct SddmmProblem {
  Gpu gpu;
  Pattern pattern;
  int64_t d = 0;
  DType dtype = DType::kFloat32;      // x, y, scale_by
  DType out_dtype = DType::kFloat32;  // out
  Batch batch;
  Array x;              // (rows, d)
  Array y;              // (columns, d)
  Array scale_by;       // (nse,) or null
  Array out;            // (nse,)
  Workspace workspace;  // for components of y and starts of tiles, if it is large enough for them
};

}  // namespace jaxsparse
