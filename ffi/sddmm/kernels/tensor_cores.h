// How the tensor core kernel of the sampled dense-dense product is configured, by the host, for the
// device.
#pragma once

#include "cuda/preparation.h"
#include "sddmm/problem.h"

namespace jaxsparse {

// A block has two consumer warpgroups, which multiply tiles, and as many epilogue warps, which pick
// the stored entries of the products and have tiles of y copied.
constexpr int kSddmmRoleThreads = 256, kSddmmTensorThreads = 2 * kSddmmRoleThreads;
// Rows and columns of a tile of the product.
constexpr int kSddmmTileRows = 128;
constexpr int kSddmmTileColumns = kTileSize;
// Tiles of a work unit at most, for which rows of x stay in registers.
constexpr int kSddmmUnitTiles = 32;
// Buffers for products of tiles, whose rows have space behind them, lest rows that a warp writes at
// once share banks.
constexpr int kSddmmProducts = 2;
constexpr int kSddmmProductPitch = kSddmmTileColumns + 8;  // numbers of float32
constexpr int kSddmmProductBytes = kSddmmTileRows * kSddmmProductPitch * 4;
constexpr int kSddmmMostStages = 8;
constexpr int kSddmmControlBytes = 1024;  // barriers, work units and queues of copies

struct SddmmTensorConfig {
  static constexpr int kLeastInner = 32;

  int inner = kLeastInner;  // places of d that there is room for, no fewer than d
  bool scaled = false;      // sums are multiplied by scale_by

  // Bytes of a stage: a tile of y in so many components of 16 bits.
  constexpr int StageBytes(int components) const {
    return components * kSddmmTileColumns * inner * 2;
  }
  constexpr int Stages(int components) const {
    constexpr int kBytes = 144 << 10;
    const int room = kBytes / StageBytes(components);
    return room < kSddmmMostStages ? room : kSddmmMostStages;
  }
  // Of shared memory: stages, then products of tiles, then what controls the block's work.
  constexpr int ProductsAt(int components) const {
    return Stages(components) * StageBytes(components);
  }
  constexpr int ControlAt(int components) const {
    return ProductsAt(components) + kSddmmProducts * kSddmmProductBytes;
  }
  constexpr int SharedBytes(int components) const {
    return ControlAt(components) + kSddmmControlBytes;
  }
};

// What the prologue prepares, of rows of y with so many places.
JAXSPARSE_INLINE Preparation SddmmPreparation(const SddmmProblem& p, int inner, int components) {
  return Preparation(p.batch, p.pattern, p.pattern.columns, p.y, p.d, inner, components);
}

// A batch entry's product in tiles. There is always one, since a block has to write the padding.
struct SddmmTiles {
  int64_t down = 1, across = 1;
};

JAXSPARSE_INLINE SddmmTiles SddmmTilesOf(const SddmmProblem& p) {
  SddmmTiles tiles;
  if (p.pattern.rows > 0) tiles.down = CeilDivide(p.pattern.rows, kSddmmTileRows);
  if (p.pattern.columns > 0) tiles.across = CeilDivide(p.pattern.columns, kSddmmTileColumns);
  return tiles;
}

}  // namespace jaxsparse
