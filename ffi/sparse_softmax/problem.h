// Over the stored entries e of each row, for every batch entry:
//   forward:  out[e] = exp(scale * values[e]) / sum of the same over the row
//   backward: out[e] = scale * y[e] * (t[e] - sum over the row of y * t), y = values, t = tangent
// The Jacobian is symmetric, so `backward` serves both modes of differentiation. Padding gets 0.
#pragma once

#include "types.h"

namespace jaxsparse {

struct SparseSoftmaxProblem {
  Pattern pattern;  // column_indices and permutation are not read
  double scale = 1;
  bool backward = false;
  DType dtype = DType::kFloat32;
  Batch batch;
  Array values;
  Array tangent;  // backward only
  Array out;
  Workspace workspace;
  Array row_cuts;  // of the pattern, int32 as RowCut says (cuda/row_cuts.h), or null
};

}  // namespace jaxsparse
