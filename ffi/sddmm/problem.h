// out[e] = (sum_d x[row(e),d] * y[column(e),d]) * scale_by[e] at the stored entries e of a pattern,
// for every batch entry; 0 at padding.
#pragma once

#include "cuda/pipeline.h"
#include "cuda/preparation.h"
#include "types.h"

namespace jaxsparse {

constexpr int kSddmmThreads = 128;  // of a block of the generic CUDA kernel

// In tiles of entries: threads of a block, and blocks that a multiprocessor runs at once where a
// lane has so many registers of a row.
constexpr int kSddmmTiledThreads = 128;
constexpr int SddmmTiledBlocks(int registers) { return registers > 8 ? 6 : registers > 4 ? 7 : 9; }
// Registers of a lane's pieces of a row, of so many bytes each.
constexpr int SddmmTiledRegisters(int pieces, int piece_bytes) {
  return pieces * (piece_bytes < 4 ? 1 : piece_bytes / 4);
}
// Entries of a group of lanes that are loaded at once, if a lane has so many registers of a row of
// y, and as many of x if each entry loads its own.
constexpr int SddmmTiledTogether(int registers, bool own_rows) {
  constexpr int kInFlight = 32;
  int entries = 1;  // a power of 2, as the entries of a group are
  while (2 * entries * registers * (own_rows ? 2 : 1) <= kInFlight) entries *= 2;
  return entries;
}

// On tensor cores: threads of a block, half of which multiply, the others pick entries; tiles of
// the product of so many rows by columns; how many of them at most a unit has, whose rows of x stay
// in registers.
constexpr int kSddmmTensorRole = 256, kSddmmTensorThreads = 2 * kSddmmTensorRole;
constexpr int kSddmmTensorRows = 128;
constexpr int kSddmmTensorColumns = kTileSize;
constexpr int kSddmmUnitTiles = 32;
// Places of d that a kernel is compiled for, the least that has all of them.
constexpr int kSddmmTensorLeastInner = 32;
constexpr int SddmmTensorInner(int64_t d) {
  int inner = kSddmmTensorLeastInner;
  while (inner < d) inner *= 2;
  return inner;
}
// Stages of a tile of y each, in matrices of 16 bits: one, or several (`components`).
constexpr int kSddmmMostStages = 8;
constexpr int SddmmStageBytes(int components, int inner) {
  return components * kSddmmTensorColumns * inner * 2;
}
constexpr int SddmmStages(int components, int inner) {
  constexpr int kBytes = 144 << 10;
  const int stages = kBytes / SddmmStageBytes(components, inner);
  return stages < kSddmmMostStages ? stages : kSddmmMostStages;
}
// Of products of tiles: how many have room, and the pitch of their rows, with which rows that a
// warp writes at once lie in different banks.
constexpr int kSddmmProducts = 2;
constexpr int kSddmmProductPitch = kSddmmTensorColumns + 8;
constexpr int kSddmmProductBytes = kSddmmTensorRows * kSddmmProductPitch * 4;
// Barriers, what is known of units, and which tiles of y are copied.
constexpr int kSddmmNotesBytes = 1024;
constexpr int SddmmSharedBytes(int components, int inner) {
  return SddmmStages(components, inner) * SddmmStageBytes(components, inner) +
         kSddmmProducts * kSddmmProductBytes + kSddmmNotesBytes;
}

// With y staged in shared memory: warps of a block, and what a block has of it for panels of so
// many rows of y, `stages` at a time, and for so many rows of x for each warp. Behind them lie the
// counters of each stage.
constexpr int kSddmmStagedWarps = 16;
constexpr int kSddmmStagedThreads = kSddmmStagedWarps * kWarp;
constexpr int SddmmStagedBytes(int row_bytes, int rows, int panel, int stages) {
  return (stages * panel + kSddmmStagedWarps * rows) * row_bytes + stages * kPipelineCounterBytes;
}

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

// Entries that a group of lanes of the generic CUDA kernel owns: one for each lane, or fewer where
// there would be too few groups to fill a GPU.
JAXSPARSE_INLINE int SddmmRun(const SddmmProblem& p) {
  constexpr int64_t kEnoughGroups = 8192;
  int run = LanesFor(p.d);
  while (run > 4 && p.batch.count * CeilDivide(p.pattern.nse, run) < kEnoughGroups) run /= 2;
  return run;
}

// A batch entry's product in tiles of tensor cores. There is always one, since somebody writes the
// padding.
struct SddmmTiles {
  int64_t down = 1, across = 1;
};

JAXSPARSE_INLINE SddmmTiles SddmmTilesOf(const SddmmProblem& p) {
  SddmmTiles tiles;
  if (p.pattern.rows > 0) tiles.down = CeilDivide(p.pattern.rows, kSddmmTensorRows);
  if (p.pattern.columns > 0) tiles.across = CeilDivide(p.pattern.columns, kSddmmTensorColumns);
  return tiles;
}

}  // namespace jaxsparse
