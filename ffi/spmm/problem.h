// out[m,n] = activation(sum_k a[m,k] * x[k,n] + bias[m]), a sparse, for every batch entry.
//
// `pattern` is the one that is walked by rows of `out`: for a transposed product the transposed
// pattern, whose permutation finds the values, unless a kernel walks over `stored` instead. A
// product with columns contiguous has x as (n, k) and out as (n, m), both row-major: the dense
// matrix stands on the left.
#pragma once

#include "cuda/activation.h"
#include "types.h"

namespace jaxsparse {

// Aligned as the tensor map that a kernel's own problem adds, so that parameters of all kernels
// begin at the same offset: they were measured so, and a compiler makes other code where they do
// not.
struct alignas(64) SpmmProblem {
  Gpu gpu;
  Pattern pattern;
  // The one by whose rows values are stored: the same, or of a transposed product that of which it
  // is the transpose. Without an order of rows, as nothing needs it.
  Pattern stored;
  int64_t n = 0;
  bool transposed = false;  // the product by the stored matrix
  bool dense_on_left = false;
  DType dtype = DType::kFloat32;      // values, x, bias
  DType out_dtype = DType::kFloat32;  // out, preactivation
  Activation activation = Activation::kNone;
  Batch batch;
  Array values;
  Array x;
  Array bias;  // or null
  Array out;
  Array preactivation;  // or null: what the activation was applied to, for its derivative
  Workspace workspace;
  Array row_cuts;  // of `pattern`, int32 as RowCut says (cuda/row_cuts.h), or null
};

}  // namespace jaxsparse
