// What the values of each row come to, for every batch entry:
//   maximum:     out[m] = max of values[e] over the row's e, or -inf
//   logsumexp:   out[m] = log(sum of exp(values[e]) over the row's e), or -inf
// A NaN in a row is its result.
#pragma once

#include "types.h"

namespace jaxsparse {

enum class Reduction : int { kMaximum, kLogSumExp };

struct ReduceRowsProblem {
  Pattern pattern;  // column_indices and permutation are not read
  Reduction reduction = Reduction::kMaximum;
  DType dtype = DType::kFloat32;
  Batch batch;
  Array values;
  Array out;
  Workspace workspace;
  Array row_cuts;  // of the pattern, int32 as RowCut says (cuda/row_cuts.h), or null
};

}  // namespace jaxsparse
