// How the split kernel of the sparse-dense product is configured, by the host, for the device.
#pragma once

#include "cuda/row_cuts.h"
#include "spmm/problem.h"

namespace jaxsparse {

struct SpmmSplitConfig {
  int vector = 1;         // neighbouring columns of a lane
  int lanes = 1;          // of a group, which is as wide as a tile of the result
  int at_once = 4;        // entries that a group adds
  bool permuted = false;  // whether a permutation tells where values stand
  bool batched = false;

  constexpr int Columns() const { return lanes * vector; }  // of a tile
  constexpr int Threads() const {
    constexpr int kUnits = 8;
    return lanes * kUnits < kWarp ? kWarp : lanes * kUnits;
  }
  constexpr int Units() const { return Threads() / lanes; }  // of a block, one for each group
  constexpr int Blocks() const { return 768 / Threads(); }   // for which registers are left
};

// Blocks down the rows of the result: each takes neighbouring units.
JAXSPARSE_INLINE int64_t SpmmSplitBlocksDown(const SpmmProblem& p, int units) {
  return CeilDivide(RowUnits(p.pattern.rows, p.pattern.nse), units);
}

// What a block leaves in the workspace for the next kernel: its part of a row that has begun in an
// earlier block, and its part of one that has begun here and goes on in the next. Each is as wide
// as the result.
enum class SpmmPart : int { kOfBegun, kOfNew };
constexpr int kSpmmPartsOfBlock = 2;

JAXSPARSE_INLINE int64_t SpmmPartAt(const SpmmProblem& p, int64_t down, int64_t entry,
                                    int64_t block, SpmmPart part) {
  return ((entry * down + block) * kSpmmPartsOfBlock + static_cast<int>(part)) * p.n;
}

// The kernel that adds parts: a block looks at so many boundaries between blocks of the first one,
// a lane at each.
constexpr int kSpmmAddThreads = 256, kSpmmAddBoundaries = kWarp;

}  // namespace jaxsparse
