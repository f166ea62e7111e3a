// Finds where the entries of tiles begin (TileStarts), once for all blocks, if they don't come with
// the pattern: a warp reads a row, to see whether its columns rise, and bisects for the starts in
// what it has read.
//
// Columns are taken to be those of the matrix: one that is not may be found in any tile.
//
// Floors: from memory come the columns, once; to L2 go 4 bytes for each row and tile.
#pragma once

#include "cuda/device.cuh"
#include "cuda/preparation.h"

namespace jaxsparse {

extern __shared__ int32_t found_starts[];  // of some tiles, for each row of a block

// Whether each column of a row is beyond the one before, called by all lanes of a warp. Several
// columns for each lane are under way at once.
template <typename Index>
__device__ __forceinline__ bool Rises(const Index* columns, int begin, int end) {
  constexpr int kAtOnce = 8;
  const Index* column = columns + begin + 1 + threadIdx.x % kWarp;
  int left = end - begin - 1 - static_cast<int>(threadIdx.x % kWarp);
  bool falls = false;
#pragma unroll 1
  for (int all = end - begin - 1; all > 0; all -= kAtOnce * kWarp) {
    int before[kAtOnce], here[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool exists = left > i * kWarp;
      before[i] = exists ? static_cast<int>(column[i * kWarp - 1]) : 0;
      here[i] = exists ? static_cast<int>(column[i * kWarp]) : 1;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) falls = falls || here[i] <= before[i];
    column += kAtOnce * kWarp;
    left -= kAtOnce * kWarp;
  }
  return !__any_sync(kAllLanes, falls);
}

// Writes the starts of kCount times 32 tiles from `tile` on, of a row for each warp of a block.
// They pass through shared memory, so that rows stand next to one another when they are written.
template <int kCount, typename Index>
__device__ __forceinline__ void WriteStartsOfTiles(const Index* columns, int begin, int end,
                                                   uint32_t tile, uint32_t across, int32_t* to) {
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  uint32_t wanted[kCount];
  int first[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) wanted[i] = (tile + i * kWarp + lane) * kTileSize;
  FirstFrom<kCount>(columns, begin, end, wanted, first);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    found_starts[(i * kWarp + lane) * kPrepareRows + warp] = first[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint32_t t = tile + i * kWarp + threadIdx.x / kPrepareRows;
    if (t < across) {
      to[t * kTileSize + threadIdx.x % kPrepareRows] =
          found_starts[i * kPrepareThreads + threadIdx.x];
    }
  }
  __syncthreads();
}

// Writes the starts of neighbouring rows of a pattern, one for each warp of a block. All rows of
// all of the pattern's own batch entries are numbered, those that fill up the last tiles included.
//
// Most blocks have nothing else to do, and a row takes few instructions: those of 64 bits and
// divisions would be most of them.
template <typename Index>
__device__ __forceinline__ void WriteStartsOfRows(const Pattern& pattern, uint32_t unit,
                                                  int32_t* to) {
  constexpr uint32_t kUnits = kTileSize / kPrepareRows;  // of a tile
  const auto down = static_cast<uint32_t>(CeilDivide(pattern.rows, kTileSize));
  const auto across = static_cast<uint32_t>(CeilDivide(pattern.columns, kTileSize));
  const uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t tile_down = unit / kUnits;
  const uint32_t own = tile_down < down ? 0 : tile_down / down;
  const uint32_t row_of_tile = unit % kUnits * kPrepareRows;
  const uint32_t row = (tile_down - own * down) * kTileSize + row_of_tile + warp;
  const auto* columns = static_cast<const Index*>(pattern.column_indices.data) + own * pattern.nse;
  int begin = 0, end = 0;
  if (row < pattern.rows) {
    const auto* offsets =
        static_cast<const int32_t*>(pattern.row_offsets.data) + own * (pattern.rows + 1) + row;
    const auto nse = static_cast<int>(pattern.nse);
    begin = Clamp(offsets[0], 0, nse);
    end = Clamp(offsets[1], begin, nse);
  }
  const bool rises = Rises(columns, begin, end);
  to += static_cast<int64_t>(tile_down) * (across + 1) * kTileSize + row_of_tile;
  if (lane == 0) to[across * kTileSize + warp] = rises ? end : ~end;
  if (!rises) end = begin;
  uint32_t tile = 0;
#pragma unroll 1
  for (; tile + kWarp < across; tile += kMostTiles * kWarp) {
    WriteStartsOfTiles<kMostTiles>(columns, begin, end, tile, across, to);
  }
  if (tile < across) WriteStartsOfTiles<1>(columns, begin, end, tile, across, to);
}

}  // namespace jaxsparse
