// How the reduction of rows by lanes that own a row is configured, by the host, for the device.
#pragma once

#include "reduce_rows/problem.h"

namespace jaxsparse {

struct ReduceRowsConfig {
  Reduction reduction = Reduction::kMaximum;
  int lanes = 1;  // that own a row: a power of 2, at most kMostLanes

  static constexpr int kMostLanes = 512;
  static constexpr int kLoads = 4;  // of 16 bytes, on their way at once to a lane, of wide numbers
  constexpr int Loads(int bytes) const { return bytes == 2 ? kLoads / 2 : kLoads; }

  // Of a block: if a row has more lanes than a warp, it has no others.
  constexpr int Threads() const {
    constexpr int kThreads = 128;
    return lanes > kWarp ? lanes : kThreads;
  }
  // For which registers are left, of elements of so many bytes.
  constexpr int Blocks(int bytes) const { return (bytes == 8 ? 512 : 1024) / Threads(); }
  constexpr int Owners() const { return lanes > kWarp ? 1 : Threads() / lanes; }  // of a block
};

}  // namespace jaxsparse
