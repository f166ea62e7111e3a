// How the tensor core kernel of the sparse-dense product is configured, by the host, for the
// device.
#pragma once

#include "cuda/pipeline.h"
#include "cuda/preparation.h"
#include "cuda/tensor_map.h"
#include "spmm/problem.h"

namespace jaxsparse {

// A block has two consumer warpgroups, which multiply tiles, and producer warps in teams of as many
// threads, which write out those of the sparse matrix. A tile has so many rows and inner places,
// and meets a tile of x by so many columns.
constexpr int kSpmmTeamThreads = 256;
constexpr int kSpmmTileRows = kTileSize;
constexpr int kSpmmTileInner = kTileSize;
constexpr int kSpmmTilePitch = kSpmmTileInner + 8;  // numbers of float32, lest rows share banks

constexpr int kSpmmFlagBytes = 16, kSpmmBiasBytes = kSpmmTileRows * 4;
constexpr int kSpmmOrderBytes = kSpmmTeamThreads / kWarp * kSpmmTileRows;  // of a team

struct SpmmTensorProblem : SpmmProblem {
  TensorMap tiles_of_x = {};  // where x is copied as it is (SpmmCopiesX)
};

struct SpmmTensorConfig {
  int columns = 32;         // of x that a block multiplies by: 32, 64 or 128
  bool transposed = false;  // the product by the transpose of the stored matrix

  // Bytes of a stage in which x has so many components of 16 bits. The matrix is written out as it
  // is, in float32 with space behind each row.
  constexpr int XBytes(int components) const { return components * kSpmmTileInner * columns * 2; }
  constexpr int StageBytes(int components) const {
    return XBytes(components) +
           kSpmmTileRows * (components > 1 ? kSpmmTilePitch * 4 : kSpmmTileInner * 2);
  }
  constexpr int Stages(int components) const {
    constexpr int kMost = 4, kBytes = 216 << 10;
    const int room = kBytes / StageBytes(components);
    return room < kMost ? room : kMost;
  }
  // Two teams of producers where there are registers for them: a warp waits for most instructions.
  constexpr int Teams(int components) const { return components == 1 || columns <= 32 ? 2 : 1; }
  constexpr int Threads(int components) const { return (1 + Teams(components)) * kSpmmTeamThreads; }
  // Shared memory: stages, their barriers, flags, the bias of the tile's rows, orders of rows.
  constexpr int BarriersAt(int components) const {
    return Stages(components) * StageBytes(components);
  }
  constexpr int FlagsAt(int components) const {
    return BarriersAt(components) + Stages(components) * kPipelineBarrierBytes;
  }
  constexpr int BiasAt(int components) const { return FlagsAt(components) + kSpmmFlagBytes; }
  constexpr int OrdersAt(int components) const { return BiasAt(components) + kSpmmBiasBytes; }
  constexpr int SharedBytes(int components) const {
    return OrdersAt(components) + Teams(components) * kSpmmOrderBytes;
  }
};

// Tiles of the result, of so many columns, and along the inner places of each.
JAXSPARSE_INLINE int64_t SpmmTilesOf(const SpmmProblem& p, int columns) {
  return p.batch.count * CeilDivide(p.pattern.rows, kSpmmTileRows) * CeilDivide(p.n, columns);
}
JAXSPARSE_INLINE int64_t SpmmStepsOf(const SpmmProblem& p) {
  return CeilDivide(p.pattern.columns, kSpmmTileInner);
}

// Split-K: where several blocks share a tile of the result, each of them, with its part of the
// inner places, leaves its sums in the workspace, behind what the prologue prepared and a count for
// each tile of the blocks that have done so. There are at most so many parts.
constexpr int kSpmmMostParts = 512, kSpmmArrivedBytes = kSpmmMostParts * 4;
constexpr int64_t SpmmPartsBytes(int64_t parts, int columns) {
  return parts * kSpmmTileRows * columns * 4;
}

// Whether the kernel has tiles of so many columns of x copied as it is, by tensor maps: one
// component, of aligned rows. Tiles of 32 columns come as slowly as those of 64, which costs more
// than a prologue does.
JAXSPARSE_INLINE bool SpmmCopiesX(const SpmmProblem& p, int columns) {
  constexpr int64_t kMost = int64_t{1} << 31, kAlignment = 16;
  return SizeOf(p.dtype) == 2 && columns >= 64 && p.n < kMost && p.n * 2 % kAlignment == 0 &&
         p.pattern.columns > 0 && reinterpret_cast<uint64_t>(p.x.data) % kAlignment == 0;
}

// What the prologue prepares. Where x is copied as it is, that is no x.
JAXSPARSE_INLINE Preparation SpmmPreparation(const SpmmProblem& p, int columns, int components) {
  Preparation prepared(p.batch, p.stored, p.pattern.columns, p.x, p.n, columns, components);
  if (SpmmCopiesX(p, columns)) prepared.own_components = 0;
  return prepared;
}

}  // namespace jaxsparse
