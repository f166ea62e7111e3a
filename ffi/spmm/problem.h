// out[m,n] = activation(sum_k a[m,k] * x[k,n] + bias[m]), a sparse, for every batch entry.
//
// `pattern` is the one that is walked by rows of `out`: for a transposed product the transposed
// pattern, whose permutation finds the values. A product with columns contiguous has x as (n, k)
// and out as (n, m), both row-major: the dense matrix stands on the left.
#pragma once

#include "common/types.h"

namespace jaxsparse {

enum class Activation : int { kNone, kRelu, kGelu };

// Columns of the result that one lane of a generic CUDA kernel owns.
constexpr int kSpmmColumnsPerLane = 4;
constexpr int kSpmmTiledThreads = 128;  // of a block

// On tensor cores: threads of a block; tiles of so many rows and inner places, each a matrix of 16
// bits or several (`planes`), with as many places of x by so many columns; how many at a time.
constexpr int kSpmmTensorThreads = 256;
constexpr int kSpmmTensorRows = 64;
constexpr int kSpmmTensorInner = 64;
constexpr int kSpmmStages = 2;
constexpr int SpmmStageBytes(int planes, int columns) {
  return planes * (kSpmmTensorRows + columns) * kSpmmTensorInner * 2;
}

// With x staged in shared memory: what a block of so many warps has of it for panels of so many
// rows of x, of so many bytes each, of which `stages` are there at a time. Behind them lie two
// buffers of 256 bytes for each warp, and the counters of each stage.
constexpr int SpmmStagedBytes(int row_bytes, int panel, int stages, int warps) {
  return stages * (panel * row_bytes + kRingCounterBytes) + warps * 512;
}

struct SpmmProblem {
  Gpu gpu;
  Pattern pattern;
  int64_t n = 0;
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
};

}  // namespace jaxsparse
