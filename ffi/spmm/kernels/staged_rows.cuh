// Which rows a tile of a staged block has, and how its longest rows are cut into parts that several
// warps share.
#pragma once

#include "cuda/row_swizzle.cuh"
#include "spmm/kernels/staged_entries.cuh"

namespace jaxsparse {

// A row of a tile, and where its entries are.
struct TileRow {
  int row = StagedSlots::kNone;
  int begin = 0, end = 0;

  __device__ int Entries() const { return end > begin ? end - begin : 0; }
  __device__ TileRow Of(int lane) const {
    return {__shfl_sync(kAllLanes, row, lane), __shfl_sync(kAllLanes, begin, lane),
            __shfl_sync(kAllLanes, end, lane)};
  }
};

// Which rows a tile has: each turn gives one to every tile, in the order of lengths, forth and
// back. Where the matrix has long rows, lengths differ most in the first turn, often by as much as
// in many others together: there it goes forth, some turns back, and others forth and back again.
template <int kTileRows>
struct SwizzledTurns {
  uint32_t tiles, tile;

  __device__ static bool IsBack(int turn, int turns_back) {
    return turn > turns_back ? (turn - turns_back) % 2 == 0 : turn > 0;
  }

  // Rows that tell how many turns go back, and whether rows are cut: the tile's longest one, the
  // longest of all, and the last ones of the first turn, of an eighth of the turns, a quarter, a
  // half, all.
  static constexpr int kSamples = 7;
  __device__ uint32_t PlaceOfSample(int sample) const {
    if (sample < 2) return sample == 0 ? tile : 0;
    return (sample == 2 ? 1 : kTileRows >> (kSamples - 1 - sample)) * tiles - 1;
  }
  // After as many turns back as lengths take to fall by what they fell in the first one, the first
  // tile has as much as the last one.
  __device__ static int TurnsBack(int entries, int first_sample) {
    const int longest = __shfl_sync(kAllLanes, entries, first_sample + 1);
    const int last = __shfl_sync(kAllLanes, entries, first_sample + 2);
    const int sample = static_cast<int>(threadIdx.x % kWarp) - first_sample;
    const int above = __popc(__ballot_sync(
        kAllLanes, sample > 2 && sample < kSamples && entries > last - (longest - last)));
    return above == 0 ? 1 : kTileRows >> (kSamples - 3 - above);
  }
};

// How a tile's longest rows are cut into parts, of which each warp has one, then some a second one.
template <int kWarps, int kRows, int kSpares>
struct CutRows {
  int rows;   // so many are cut
  int parts;  // of all

  // Lane i knows the tile's row i. Gives the warp's parts to lanes behind those of its rows.
  __device__ __forceinline__ CutRows(const Pattern& pattern, const TileRow& row, int warp,
                                     StagedSlots& slots) {
    constexpr int kLongest = 1 << 25;   // a sum of so many for each row is a number of 32 bits
    constexpr int kLeast = 8 * kWarps;  // entries: less is not worth a visit
    constexpr int kMostRows =
        kWarps * 3 / 4;  // so that warps whose rows are cut have parts instead
    const int lane = threadIdx.x % kWarp;
    // Of a quarter of a warp's rows, or of one.
    const int64_t mean = pattern.nse / pattern.rows * (kRows > 4 ? kRows / 4 : 1);
    const int entries = row.Entries() < kLongest ? row.Entries() : kLongest;
    const unsigned are_long = __ballot_sync(kAllLanes, lane < kMostRows && entries > mean + kLeast);
    rows = __ffs(static_cast<int>(~are_long)) - 1;
    const bool is_cut = lane < rows;
    const int all = SumOverLanes(is_cut ? entries : 0, kWarp);
    // With at least so many entries there are no more parts than warps have room for.
    int least = (all + kSpares * kWarps - 1 - rows) / (kSpares * kWarps - rows);
    if (least < mean) least = static_cast<int>(mean);
    if (least < kLeast) least = kLeast;
    const int of_row = is_cut ? (entries - 1) / least + 1 : 0;
    int behind = of_row;
#pragma unroll
    for (int distance = 1; distance < kMostRows; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, behind, distance);
      if (lane >= distance) behind += before;
    }
    parts = __shfl_sync(kAllLanes, behind, kMostRows - 1);
#pragma unroll
    for (int spare = 0; spare < kSpares; ++spare) {
      const int number = spare * kWarps + warp;
      const int from = __popc(__ballot_sync(kAllLanes, lane < kMostRows && behind <= number));
      const TileRow its = row.Of(from);
      const int its_parts = __shfl_sync(kAllLanes, of_row, from);
      const int part = number - (__shfl_sync(kAllLanes, behind, from) - its_parts);
      if (number >= parts || lane != kRows + spare) continue;
      slots.row = part == 0 ? its.row : StagedSlots::kNone;
      slots.begin = its.begin + part * kWarp;
      slots.end = its.end;
      slots.parts = its_parts;
    }
  }
};

// Adds up the parts of long rows, in order. The whole is the sum of a row's first part.
template <typename Shape, int kWarps, int kSpares, int kVector>
__device__ __forceinline__ void AddUpParts(const StagedSlots& slots, int first_slot, int parts,
                                           uint32_t all_buffers, float (*sums)[kVector]) {
  const int warp = threadIdx.x / kWarp;
  const auto element = [&](int part, int c) -> float& {
    const int at = c * (kWarp / Shape::kGroups) + Shape::Lane();
    return SharedAt<float>(all_buffers + part % kWarps * (2 * Shape::kBufferBytes) +
                           at * sizeof(float));
  };
#pragma unroll
  for (int spare = 0; spare < kSpares; ++spare) {
    if (spare * kWarps >= parts) break;
    __syncthreads();  // buffers are read
    if (__shfl_sync(kAllLanes, slots.row, first_slot + spare) == StagedSlots::kNone &&
        Shape::Group() == 0) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) element(warp, c) = sums[spare][c];
    }
    __syncthreads();
#pragma unroll
    for (int whole = 0; whole <= spare; ++whole) {
      if (__shfl_sync(kAllLanes, slots.row, first_slot + whole) == StagedSlots::kNone) continue;
      const int number = whole * kWarps + warp, from = spare * kWarps;
      int end = number + __shfl_sync(kAllLanes, slots.parts, first_slot + whole);
      if (end > from + kWarps) end = from + kWarps;
#pragma unroll 1
      for (int part = number + 1 > from ? number + 1 : from; part < end; ++part) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) sums[whole][c] += element(part, c);
      }
    }
  }
  __syncthreads();
}

}  // namespace jaxsparse
