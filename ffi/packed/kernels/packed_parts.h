// The workspace of products by packed matrices, for host and device: where several parts make a
// result, each leaves its sums there, behind a count for each tile of the blocks that have done so.
#pragma once

#include "packed/problem.h"

namespace jaxsparse {

// Of rows and columns that a block makes at once, those of the smallest tile. There is room to
// count as many tiles as it may take, so that the prologue need not know which they are.
constexpr int kPackedLeastTileRows = 2 * kPackedStripRows, kPackedLeastTileColumns = 8;

JAXSPARSE_INLINE int64_t PackedTiles(const PackedProblem& p, int rows, int columns) {
  return CeilDivide(p.m, rows) * CeilDivide(p.n, columns);
}
JAXSPARSE_INLINE int64_t PackedCountsBytes(const PackedProblem& p) {
  if (p.parts == 1) return 0;
  return CeilDivide(PackedTiles(p, kPackedLeastTileRows, kPackedLeastTileColumns), 4) * 16;
}
JAXSPARSE_INLINE int64_t PackedSumsBytes(const PackedProblem& p, int rows, int columns) {
  return p.parts == 1 ? 0 : PackedTiles(p, rows, columns) * p.parts * rows * columns * 4;
}
JAXSPARSE_INLINE int64_t PackedWorkspaceBytes(const PackedProblem& p, int rows, int columns) {
  return PackedCountsBytes(p) + PackedSumsBytes(p, rows, columns);
}

}  // namespace jaxsparse
