// How the kernels of attention with few queries are configured, by the host, for the device.
#pragma once

#include "attention/problem.h"

namespace jaxsparse {

constexpr int kDecodeRows = 16;  // of an item: those of a product of tensor cores
constexpr int kDecodeKeys = 16;  // that a warp takes at once: a slice of a tile
constexpr int kDecodeSlices = kMaskTile / kDecodeKeys;
constexpr int kDecodeMostQueries = kMaskCell;  // one row of cells
constexpr int kDecodeMostMultiprocessors = 192;
constexpr int kDecodeControlBytes = 2048;
constexpr int kDecodeMergeWarps = 8;  // of a block of the second kernel

struct AttentionDecodeConfig {
  int head_size = 128;   // a multiple of 16
  int value_size = 128;  // a multiple of 32
  int warps = 8;         // of a block; a divisor of the slices
  int stages = 3;        // of each warp

  // Lines in shared memory have 16 bytes more than numbers, so that eight neighbours lie in
  // different banks.
  constexpr int KeyLineBytes() const { return head_size * 2 + 16; }
  constexpr int ValueLineBytes() const { return value_size * 2 + 16; }
  // A warp's stage: the keys of a slice, then their values.
  constexpr int ValuesAt() const { return kDecodeKeys * KeyLineBytes(); }
  constexpr int StageBytes() const { return ValuesAt() + kDecodeKeys * ValueLineBytes(); }
  // Once its stages are done with, a warp leaves its sums there: for each row its values' sums, the
  // shift and the sum of its probabilities.
  constexpr int SumsPitch() const { return value_size + 8; }  // numbers
  constexpr int WarpBytes() const { return stages * StageBytes(); }
  // Shared memory: what controls the block's work, then what each warp has.
  constexpr int SharedBytes() const { return kDecodeControlBytes + warps * WarpBytes(); }
};

// Items are up to 16 rows each, pairs of a query head and a query, that share a key head and a list
// of tiles. All tiles of all items form a line, of which each block has an equal part.
struct AttentionDecodeProblem : PagedAttentionProblem {
  uint32_t blocks = 1;         // that have parts of the line
  uint32_t lists = 1;          // of all batch entries
  uint32_t items_of_list = 1;  // they follow each other: first the items of a key head
  uint32_t heads_of_list = 1;  // query heads of a key head that share a list
};

JAXSPARSE_INLINE int64_t DecodeHeadsOfList(const AttentionOperands& p) {
  return p.mask.per_group > 1 ? 1 : p.per_group;
}
JAXSPARSE_INLINE int64_t DecodeItemsOfHead(const AttentionOperands& p) {
  return CeilDivide(DecodeHeadsOfList(p) * p.queries, kDecodeRows);
}
JAXSPARSE_INLINE int64_t DecodeItemsOfList(const AttentionOperands& p) {
  return (p.mask.groups > 1 ? 1 : p.groups) * DecodeItemsOfHead(p);
}
JAXSPARSE_INLINE int64_t DecodeLists(const AttentionOperands& p) {
  return p.batch.count * p.mask.groups * p.mask.per_group;
}

// In the workspace: of each block two parts of items that it shares with others, the one that its
// part of the line begins with and the one that it ends with. A part has the sums of values of each
// row, then the rows' shifts, then the sums of their probabilities.
JAXSPARSE_INLINE int64_t DecodeRowsOfPart(const AttentionOperands& p) {
  const int64_t rows = DecodeHeadsOfList(p) * p.queries;
  return rows < kDecodeRows ? rows : kDecodeRows;
}
JAXSPARSE_INLINE int64_t DecodePartNumbers(const AttentionOperands& p) {
  return DecodeRowsOfPart(p) * (p.value_size + 2);
}
JAXSPARSE_INLINE int64_t DecodeWorkspaceBytes(const AttentionOperands& p, int64_t blocks) {
  return 2 * blocks * DecodePartNumbers(p) * 4;
}

}  // namespace jaxsparse
