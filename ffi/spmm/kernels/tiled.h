// How the tiled kernel of the sparse-dense product is configured, by the host, for the device.
#pragma once

#include "spmm/problem.h"

namespace jaxsparse {

// What the tiled kernel gains by; a variant does without one, to measure what it brings.
enum class SpmmTechnique : int {
  kNone,
  kWideLoads,     // a lane owns neighbouring columns of x, and loads them at once
  kSharing,       // long rows are shared by groups of lanes
  kOrder,         // rows are taken in the order of their lengths
  kUnrolledRest,  // what is left of a row is added at once, too
  kLateScaling,   // a column becomes a place in x where it is used, not when it is loaded
};

struct SpmmTiledProblem : SpmmProblem {
  uint32_t long_row = 1u << 30;  // entries from which on groups help with a row
};

constexpr int kSpmmTiledThreads = 256;  // of a block
// Blocks for which a multiprocessor has registers, if so many bytes are a number.
constexpr int SpmmTiledBlocks(int64_t number_bytes) { return number_bytes == 4 ? 4 : 3; }

struct SpmmTiledConfig {
  int vector = 1;         // neighbouring columns of a lane
  int lanes = 1;          // of a group, which is as wide as a tile of the result
  int rows = 1;           // of a block, among which its groups are shared
  int at_once = 4;        // entries that a group adds
  bool permuted = false;  // whether a permutation tells where values stand
  SpmmTechnique without = SpmmTechnique::kNone;
  bool batched = false;

  constexpr int Columns() const { return lanes * vector; }  // of a tile
  constexpr int Groups() const { return kSpmmTiledThreads / lanes; }
  // Whether groups with a row each may help with long ones. The longest is the first in the order.
  constexpr bool GroupsMayHelp() const {
    return rows == Groups() && rows <= kWarp && without != SpmmTechnique::kOrder &&
           without != SpmmTechnique::kSharing;
  }
  // Of shared memory, in which groups that share a row leave their parts of it, and those that may
  // help another one with a long row their parts of one column.
  constexpr int64_t SharedBytes(int64_t number_bytes) const {
    const int columns = rows < Groups() ? vector : GroupsMayHelp() ? 1 : 0;
    return kSpmmTiledThreads * columns * (number_bytes < 4 ? 4 : number_bytes);
  }
};

}  // namespace jaxsparse
