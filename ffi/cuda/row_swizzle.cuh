// How the rows of a sparse matrix are shared out among tiles of so many, and among a tile's warps,
// where each row is one warp's.
#pragma once

#include "cuda/device.cuh"

namespace jaxsparse {

// Which of a tile's rows, the longest first, row `r` of a warp is: they are given out forth and
// back, so that all warps get about as many entries.
template <int kWarps>
__device__ __forceinline__ int SwizzledTurn(int warp, int r) {
  return r * kWarps + (r % 2 == 0 ? warp : kWarps - 1 - warp);
}

// The place in the order of lengths of a tile's row of a turn, which gives one row to every tile.
__device__ __forceinline__ uint32_t PlaceOfTurn(uint32_t tiles, uint32_t tile, int turn,
                                                bool back) {
  return turn * tiles + (back ? tiles - 1 - tile : tile);
}

// That of row `r` of a warp where turns go forth and back.
template <int kWarps>
__device__ __forceinline__ uint32_t SwizzledRow(uint32_t tiles, uint32_t tile, int warp, int r) {
  const int turn = SwizzledTurn<kWarps>(warp, r);
  return PlaceOfTurn(tiles, tile, turn, turn % 2 == 1);
}

// A row of more entries would keep its warp, which has kRows rows, busy for longer than the others:
// several warps share it.
template <int kWarps, int kRows>
__device__ __forceinline__ int64_t MostEntriesOfWarp(const Pattern& pattern) {
  return (kRows > 4 ? kRows / 2 : 2) * (pattern.nse / pattern.rows) + kWarps * kWarp / 4;
}

}  // namespace jaxsparse
