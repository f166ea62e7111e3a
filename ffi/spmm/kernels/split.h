// How the split kernel of the sparse-dense product is configured, by the host, for the device.
#pragma once

#include "cuda/row_cuts.h"
#include "spmm/problem.h"

namespace jaxsparse {

// If all threads fit at once, at most 384 on a multiprocessor, a group loads more rows of x.
constexpr int kSpmmSplitAtOnceOfFew = 16, kSpmmSplitThreadsOfFew = 384;

struct SpmmSplitConfig {
  int vector = 1;         // neighbouring columns of a lane
  int lanes = 1;          // of a group, which is as wide as a tile of the result
  int group_units = 1;    // neighbouring units of a group
  int at_once = 8;        // entries of which a group asks for rows of x
  bool permuted = false;  // whether a permutation tells where values stand
  bool batched = false;

  constexpr int Columns() const { return lanes * vector; }  // of a tile
  constexpr int Threads() const {
    constexpr int kUnits = 8, kMost = 128;
    const int threads = lanes * kUnits;
    return threads < kWarp ? kWarp : threads < kMost ? threads : kMost;
  }
  constexpr int Groups() const { return Threads() / lanes; }  // of a block
  constexpr int Units() const { return Groups() * group_units; }
  // Threads of a multiprocessor for which registers are left, of elements of so many bytes. 768
  // threads have 80 registers each. A group of one lane needs 88: with 80 it would spill.
  constexpr int ThreadsAtOnce(int bytes) const {
    if (at_once > 8) return kSpmmSplitThreadsOfFew;
    return permuted || batched ? 512 : bytes == 4 && lanes > 1 ? 768 : 640;
  }
  constexpr int Blocks(int bytes) const { return ThreadsAtOnce(bytes) / Threads(); }
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
// a lane of each warp at each. So its blocks are few, and hardly take time where no row is cut.
constexpr int kSpmmAddThreads = 256, kSpmmAddBoundaries = kWarp;

}  // namespace jaxsparse
