// Where the entries of tiles begin (TileStarts), found once for all who come to the tiles: a warp
// reads a row, to see whether its columns rise, and bisects for the starts in what it has read.
//
// Columns are taken to be those of the matrix: one that is not may be found in any tile.
//
// Floors: from memory come the columns, once; to L2 go 4 bytes for each row and tile. To compare
// the tiles of neighbouring entries, and write where one begins, took three times as long.
#pragma once

#include "common/packet.cuh"

namespace jaxsparse {

extern __shared__ int32_t found_starts[];  // of some tiles, for each row of a block

// Whether columns of a row rise, called by all lanes of a warp.
template <typename Index>
__device__ __forceinline__ bool Rises(const Index* column_indices, const RowBounds& row, int nse) {
  constexpr int kRun = 16 / sizeof(Index);  // entries that a lane loads at once
  using Run = Packet<Index, kRun>;
  const int lane = threadIdx.x % kWarp;
  const bool wide = IsAligned<Run>(column_indices);
  const int begin = static_cast<int>(row.begin), end = static_cast<int>(row.end);
  const uint32_t pairs = end > begin ? end - begin - 1 : 0;
  bool rises = true;
#pragma unroll 2
  for (int first = begin / kRun * kRun; first < end; first += kWarp * kRun) {
    const int at = first + lane * kRun;
    int columns[kRun + 1];  // the first one is that of the entry before
    columns[0] = -1;
    if (at > begin && at < end) columns[0] = static_cast<int>(column_indices[at - 1]);
    Run run = {};
    if (at < end) run = LoadPacket<kRun>(column_indices + at, wide, nse - at);
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      columns[e + 1] = static_cast<int>(run.elements[e]);
      const bool is_pair = static_cast<uint32_t>(at + e - begin - 1) < pairs;
      rises = rises && !(is_pair && columns[e + 1] <= columns[e]);
    }
  }
  return !__any_sync(kAllLanes, !rises);
}

// Writes the starts of neighbouring rows of a pattern, one for each warp of a block. All rows of
// all of the pattern's own batch entries are numbered, those that fill up the last tiles included.
template <typename Index>
__device__ __forceinline__ void WriteStartsOfRows(const Pattern& pattern, int64_t first,
                                                  int32_t* to) {
  const TileStarts starts(pattern.rows, pattern.columns);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t rows = starts.down * kTileSize, own = first / rows, row = first % rows + warp;
  const auto* columns = static_cast<const Index*>(pattern.column_indices.data) + own * pattern.nse;
  const auto* offsets =
      static_cast<const int32_t*>(pattern.row_offsets.data) + own * (pattern.rows + 1);
  const bool exists = row < pattern.rows;
  const RowBounds bounds(offsets, exists ? row : 0, exists ? pattern.nse : 0);
  const bool rises = Rises(columns, bounds, static_cast<int>(pattern.nse));
  to += starts.At(own, first % rows / kTileSize) + first % kTileSize;
  if (lane == 0) {
    const int end = static_cast<int>(bounds.end);
    to[starts.across * kTileSize + warp] = rises ? end : ~end;
  }
  // Of some tiles at a time, so that rows stand next to one another when they are written.
#pragma unroll 1
  for (int64_t tile = 0; tile < starts.across; tile += kWarp) {
    const auto column = static_cast<uint32_t>((tile + lane) * kTileSize);
    found_starts[lane * kPrepareRows + warp] =
        rises ? FirstFrom(columns, bounds, column) : static_cast<int>(bounds.begin);
    __syncthreads();
    const int64_t t = tile + threadIdx.x / kPrepareRows;
    if (t < starts.across) {
      to[t * kTileSize + threadIdx.x % kPrepareRows] = found_starts[threadIdx.x];
    }
    __syncthreads();
  }
}

}  // namespace jaxsparse
