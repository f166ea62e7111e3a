// out[m,n] = activation(sum_k a[m,k] * x[k,n] + bias[m]), a sparse, for every batch entry.
//
// `pattern` is the one that is walked by rows of `out`: for a transposed product the transposed
// pattern, whose permutation finds the values, unless a kernel walks over `stored` instead. A
// product with columns contiguous has x as (n, k) and out as (n, m), both row-major: the dense
// matrix stands on the left.
#pragma once

#include "cuda/pipeline.h"
#include "cuda/preparation.h"
#include "types.h"

namespace jaxsparse {

enum class Activation : int { kNone, kRelu, kGelu };

// Columns of the result that one lane of a generic CUDA kernel owns.
constexpr int kSpmmColumnsPerLane = 4;

// Tile by tile of a row: threads of a block, and how many blocks a multiprocessor has registers
// for, if so many bytes are a number. In shared memory threads leave sums of so many columns where
// groups of them share rows, or help each other.
constexpr int kSpmmTiledThreads = 256;
constexpr int SpmmTiledBlocks(int64_t number_bytes) { return number_bytes == 4 ? 4 : 3; }
constexpr int64_t SpmmTiledBytes(int columns, int64_t number_bytes) {
  return kSpmmTiledThreads * columns * (number_bytes < 4 ? 4 : number_bytes);
}

// What the product tile by tile gains by; a variant does without one, to measure what it brings.
enum class SpmmTechnique : int {
  kNone,
  kWideLoads,     // a lane owns neighbouring columns of x, and loads them at once
  kSharing,       // long rows are shared by groups of lanes
  kOrder,         // rows are taken in the order of their lengths
  kUnrolledRest,  // what is left of a row is added at once, too
  kLateScaling,   // a column becomes a place in x where it is used, not when it is loaded
};
// Whether groups with a row each may help with long ones. The longest is the first in the order.
constexpr bool SpmmGroupsMayHelp(SpmmTechnique without, int rows, int groups) {
  return rows == groups && rows <= kWarp && without != SpmmTechnique::kOrder &&
         without != SpmmTechnique::kSharing;
}

// On tensor cores: threads of each role in a block, one of which multiplies tiles, others write
// those of the sparse matrix; tiles of so many rows and inner places, as many of x by so many
// columns.
constexpr int kSpmmTensorRole = 256;
constexpr int kSpmmTensorRows = kTileSize;
constexpr int kSpmmTensorInner = kTileSize;
constexpr int kSpmmTensorPitch = kSpmmTensorInner + 8;  // numbers of float32
// Of a stage, in which x has so many components of 16 bits; how many stages. The matrix is written
// out as it is, in float32 with space behind each row.
constexpr int SpmmTensorStageBytes(int components, int columns) {
  return components * kSpmmTensorInner * columns * 2 +
         kSpmmTensorRows * (components > 1 ? kSpmmTensorPitch * 4 : kSpmmTensorInner * 2);
}
constexpr int SpmmTensorStages(int stage_bytes) {
  constexpr int kMost = 4, kBytes = 216 << 10;
  return kBytes / stage_bytes < kMost ? kBytes / stage_bytes : kMost;
}
// Two teams of writers where there are registers for them: a warp waits for most instructions.
constexpr int SpmmWriterTeams(int components, int columns) {
  return components == 1 || columns <= 32 ? 2 : 1;
}
constexpr int SpmmTensorThreads(int components, int columns) {
  return (1 + SpmmWriterTeams(components, columns)) * kSpmmTensorRole;
}
constexpr int kSpmmCounterBytes = 16;  // of a stage
constexpr int kSpmmFlagBytes = 16, kSpmmBiasBytes = kSpmmTensorRows * 4;
constexpr int kSpmmOrdersBytes = kSpmmTensorRole / 32 * kSpmmTensorRows;  // of a team of writers
constexpr int SpmmTensorBytes(int components, int columns) {
  const int stage = SpmmTensorStageBytes(components, columns);
  const int orders = SpmmWriterTeams(components, columns) * kSpmmOrdersBytes;
  return SpmmTensorStages(stage) * (stage + kSpmmCounterBytes) + kSpmmFlagBytes + kSpmmBiasBytes +
         orders;
}

// Where several blocks share a tile of the result, each leaves its sums in the workspace, behind
// what is prepared and a count for each tile of those who have. There are at most so many.
constexpr int kSpmmMostParts = 512, kSpmmArrivedBytes = kSpmmMostParts * 4;
constexpr int64_t SpmmPartsBytes(int64_t parts, int columns) {
  return parts * kSpmmTensorRows * columns * 4;
}

// With x staged in shared memory: what a block of so many warps has of it for panels of so many
// rows of x, of so many bytes each, of which `stages` are there at a time. Behind them lie two
// buffers of 256 bytes for each warp, and the counters of each stage.
constexpr int SpmmStagedBytes(int row_bytes, int panel, int stages, int warps) {
  return stages * (panel * row_bytes + kPipelineCounterBytes) + warps * 512;
}

struct SpmmProblem {
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
  Array preactivation;   // or null: what the activation was applied to, for its derivative
  Workspace workspace;   // for components of x, if it is large enough for them
  TensorMap tiles_of_x;  // if SpmmCopiesX says so
  // With tiles of rows: groups that have one each help with the longest ones if one has so many
  // entries.
  uint32_t long_row = 1u << 30;
};

// Whether tensor cores have tiles of so many columns of x copied as it is: one component, of
// aligned rows. Those of 32 columns come as slowly as those of 64, which costs more than components
// do.
JAXSPARSE_INLINE bool SpmmCopiesX(const SpmmProblem& p, int columns) {
  constexpr int64_t kMost = int64_t{1} << 31, kAlignment = 16;
  return SizeOf(p.dtype) == 2 && columns >= 64 && p.n < kMost && p.n * 2 % kAlignment == 0 &&
         p.pattern.columns > 0 && reinterpret_cast<uint64_t>(p.x.data) % kAlignment == 0;
}

}  // namespace jaxsparse
