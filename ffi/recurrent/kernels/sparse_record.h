// What the host's layout of a sparse matrix and the kernel that walks it have to agree on.
//
// Columns are numbered by place: unit u lies at place (block, i), i-th of the units of its block,
// and state part s of it in column s * places + block * units + i. The columns are cut into as many
// equal parts as a cluster has blocks: the block of rank r keeps and multiplies part r for all rows
// of its cluster.
//
// A block's entries lie in a table of lanes x entries x threads. A lane's entries belong to one
// row; `group` neighbouring threads form a group whose entries belong to one row as well. The sum
// over a group is one of the row's partial sums, and goes to a place among the partial sums of the
// block that owns the unit. A row's partial sums are neighbours there.
#pragma once

#include "types.h"

namespace jaxsparse {

struct SparseShape {
  int products = 1;     // gates: rows are products x hidden
  int state_parts = 1;  // columns are state parts x hidden
  int blocks = 1;       // a multiple of cluster
  int cluster = 1;      // blocks over which the columns are split
  int units = 1;        // places per block
  int threads = 32;     // per block
  int lanes = 1;        // per thread
  int entries = 1;      // per lane
  int group = 1;        // threads, a power of 2 up to a warp

  JAXSPARSE_INLINE constexpr int places() const { return blocks * units; }
  JAXSPARSE_INLINE constexpr int columns() const { return state_parts * places(); }
  JAXSPARSE_INLINE constexpr int part_columns() const { return columns() / cluster; }
  JAXSPARSE_INLINE constexpr int groups() const { return lanes * threads / group; }
  JAXSPARSE_INLINE constexpr int slots() const { return lanes * entries * threads; }

  // One block's record, in words: hidden unit of each place or -1; where each row's partial sums
  // begin, row (product, i) at product * units + i, and behind the last; where each group's sum
  // goes, (rank << 16) + place, or -1; column within the part of each slot, (lane * entries +
  // entry) * threads + thread; and which stored value it takes, or -1 for none.
  JAXSPARSE_INLINE constexpr int rows_at() const { return units; }
  JAXSPARSE_INLINE constexpr int groups_at() const { return rows_at() + products * units + 1; }
  JAXSPARSE_INLINE constexpr int columns_at() const { return groups_at() + groups(); }
  JAXSPARSE_INLINE constexpr int values_at() const { return columns_at() + slots(); }
  JAXSPARSE_INLINE constexpr int words() const { return values_at() + slots(); }
};

constexpr int kBankBytes = 128;  // one wavefront: a word of each bank of shared memory

// Behind a slice of a block's part of the state lie columns of zeros, one in each bank, for entries
// that only pad: what they read must not be a NaN.
constexpr int kZeroBytes = kBankBytes;

// What a kernel has to know of a layout.
struct SparseForm {
  SparseShape shape;
  int partial_sums = 1;  // most that one block receives
  int row_sums = 1;      // most that one row has, all parts together; at least 1
  int piece_bytes = 4;   // what one load takes of a column: 4, 8 or 16 bytes

  // Of a slice of a block's part, with those of zeros.
  JAXSPARSE_INLINE constexpr int shared_columns() const {
    return shape.part_columns() + kZeroBytes / piece_bytes;
  }
};

}  // namespace jaxsparse
