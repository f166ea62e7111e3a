// out[e] = (sum_d x[row(e),d] * y[column(e),d]) * scale_by[e] at the stored entries e of a pattern,
// for every batch entry; 0 at padding.
#pragma once

#include "common/types.h"

namespace jaxsparse {

constexpr int kSddmmThreads = 128;  // of a block of the generic CUDA kernel

// On tensor cores: threads of a block; tiles of the product of so many rows by columns, in steps of
// so many places of d, each a matrix of 16 bits or several (`planes`); steps of which x is kept
// from tile to tile, and how many of y are there at a time.
constexpr int kSddmmTensorThreads = 256;
constexpr int kSddmmTensorRows = 64;
constexpr int kSddmmTensorColumns = 128;
constexpr int kSddmmTensorInner = 32;
constexpr int kSddmmTensorKept = 4;
constexpr int kSddmmTensorKeptInner = kSddmmTensorKept * kSddmmTensorInner;
constexpr int kSddmmStages = 2;
// Of a row of a product in shared memory: rows that a warp writes at once lie in different banks.
constexpr int kSddmmTensorPitch = kSddmmTensorColumns + 8;
constexpr int SddmmStageBytes(int planes) {
  return planes * kSddmmTensorColumns * kSddmmTensorInner * 2;
}
// The stages of y, whose place a product takes when it is complete.
constexpr int SddmmTileBytes(int planes) {
  const int stages = kSddmmStages * SddmmStageBytes(planes);
  const int product = kSddmmTensorRows * kSddmmTensorPitch * 4;
  return stages > product ? stages : product;
}
constexpr int SddmmKeptBytes(int planes) {
  return planes * kSddmmTensorKept * kSddmmTensorRows * kSddmmTensorInner * 2;
}
constexpr int SddmmSharedBytes(int planes) {  // and a number of each warp
  return SddmmKeptBytes(planes) + SddmmTileBytes(planes) + kSddmmTensorThreads / kWarp * 4;
}

// With y staged in shared memory: warps of a block, and what a block has of it for panels of so
// many rows of y, `stages` at a time, and for so many rows of x for each warp. Behind them lie the
// counters of each stage.
constexpr int kSddmmStagedWarps = 16;
constexpr int kSddmmStagedThreads = kSddmmStagedWarps * kWarp;
constexpr int SddmmStagedBytes(int row_bytes, int rows, int panel, int stages) {
  return (stages * panel + kSddmmStagedWarps * rows) * row_bytes + stages * kRingCounterBytes;
}

struct SddmmProblem {
  Gpu gpu;
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

// Entries that a group of lanes of the generic CUDA kernel owns: one for each lane, or fewer where
// there would be too few groups to fill a GPU.
JAXSPARSE_INLINE int SddmmRun(const SddmmProblem& p) {
  constexpr int64_t kEnoughGroups = 8192;
  int run = LanesFor(p.d);
  while (run > 4 && p.batch.count * CeilDivide(p.pattern.nse, run) < kEnoughGroups) run /= 2;
  return run;
}

// Parts of a batch entry's product that blocks of tensor cores take, each with a tile's rows and
// with `columns` of the pattern: several tiles of them, if there are still enough parts to fill a
// GPU. There is always one, since somebody writes the padding.
struct SddmmParts {
  int down = 1, across = 1, columns = 8 * kSddmmTensorColumns;
};

JAXSPARSE_INLINE SddmmParts SddmmPartsOf(const SddmmProblem& p) {
  constexpr int64_t kEnoughParts = 256;
  SddmmParts parts;
  const int64_t down = CeilDivide(p.pattern.rows, kSddmmTensorRows);
  while (parts.columns > kSddmmTensorColumns &&
         p.batch.count * down * CeilDivide(p.pattern.columns, parts.columns) < kEnoughParts) {
    parts.columns /= 2;
  }
  if (down > 0) parts.down = static_cast<int>(down);
  if (p.pattern.columns > 0) {
    parts.across = static_cast<int>(CeilDivide(p.pattern.columns, parts.columns));
  }
  return parts;
}

}  // namespace jaxsparse
