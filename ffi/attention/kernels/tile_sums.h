// Where the kernel of rows leaves what the tiles of a mask add to cotangents of operands of scores
// that are summed by columns or by distances, for the host and for the device.
//
// Rows of tiles belong to different blocks, and a column or a distance meets many of them. So each
// listed tile of each head has a place of its own in the workspace for its sums over each of its
// 128 columns, or over each of its 255 diagonals, and the kernel of keys adds up those of a column
// of tiles, or of a diagonal, in the order of rows: nothing is added by atomics, and results repeat
// bitwise.
#pragma once

#include "attention/problem.h"

namespace jaxsparse {

// Where sums need more of the workspace, no kernel takes the call.
constexpr int64_t kMostTileSumsBytes = int64_t{1} << 31;

// The kernel of rows has eight warps with 16 rows of a tile each, and slots in shared memory for
// their sums: of 128 columns, or of diagonals, whose column - row is from -15 to 127, with one
// place more in front.
constexpr int kSummingWarps = 8, kDiagonals = kMaskTile + 16;
constexpr int kTileSumSlots = 2;
constexpr int kTileSumsOfWarp = kDiagonals * 4, kTileSumBytes = kSummingWarps * kTileSumsOfWarp;

// The numbers of a tile: of each column; or of each distance of a row and a column within it, from
// -128, which there is not, to 127.
JAXSPARSE_INLINE constexpr int TileSumsOf(ScoreSums sums) {
  return sums == ScoreSums::kByColumn     ? kMaskTile
         : sums == ScoreSums::kByDistance ? 2 * kMaskTile
                                          : 0;
}

// How many of them a tile has for all cotangents in front of one, or for all.
JAXSPARSE_INLINE int TileSumsBefore(const AttentionScores& scores, int gradient) {
  int sums = 0;
  for (int i = 0; i < gradient; ++i) sums += TileSumsOf(scores.sums[i]);
  return sums;
}

// The places for tiles of all heads.
JAXSPARSE_INLINE int64_t TilesOfHeads(const AttentionOperands& p) {
  return p.batch.count * p.groups * p.per_group * p.mask.capacity;
}

// Where numbers of a cotangent's tile begin, in front of which there are those of so many heads, of
// all batch entries.
JAXSPARSE_INLINE int64_t TileSumsAt(const AttentionOperands& p, int gradient, int64_t head,
                                    uint32_t tile) {
  return TileSumsBefore(p.scores, gradient) * TilesOfHeads(p) +
         (head * p.mask.capacity + tile) * TileSumsOf(p.scores.sums[gradient]);
}

}  // namespace jaxsparse
