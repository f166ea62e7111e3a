// How the rows of a sparse matrix are shared out among tiles of so many, and among a tile's warps,
// where each row is one warp's.
#pragma once

#include "common/device.cuh"

namespace jaxsparse {

// Which of a tile's rows, the longest first, row `r` of a warp is: they are dealt forth and back,
// so that all warps get about as many entries.
template <int kWarps>
__device__ __forceinline__ int DealtTurn(int warp, int r) {
  return r * kWarps + (r % 2 == 0 ? warp : kWarps - 1 - warp);
}

// The same among tiles. Returns the place of the row in the order of lengths.
template <int kWarps>
__device__ __forceinline__ uint32_t DealtRow(uint32_t tiles, uint32_t tile, int warp, int r) {
  const uint32_t turn = DealtTurn<kWarps>(warp, r);
  return turn * tiles + (turn % 2 == 0 ? tile : tiles - 1 - tile);
}

// A row of more entries would keep its warp, which has kRows rows, busy for longer than the others:
// several warps share it.
template <int kWarps, int kRows>
__device__ __forceinline__ int64_t MostEntriesOfWarp(const Pattern& pattern) {
  return (kRows > 4 ? kRows / 2 : 2) * (pattern.nse / pattern.rows) + kWarps * kWarp / 4;
}

}  // namespace jaxsparse
