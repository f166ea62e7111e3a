// The work of attention with few queries: all tiles of all items in a line, which is cut into equal
// parts, whatever the lengths of the lists are.
#pragma once

#include "attention/kernels/decode.h"
#include "attention/kernels/mask_cells.cuh"

namespace jaxsparse {

// Where a part of the line ends and the next one begins.
__device__ __forceinline__ uint32_t BeginOfBlock(uint32_t tiles, uint32_t blocks, uint32_t block) {
  return static_cast<uint32_t>(MultiplyWide(tiles, block) / blocks);
}

// The tiles of a list: a batch entry's, of one of its masks.
__device__ __forceinline__ uint32_t TilesOfList(const AttentionDecodeProblem& p, uint32_t list) {
  const auto of_entry = static_cast<uint32_t>(p.mask.groups * p.mask.per_group);
  const uint32_t entry = list / of_entry, own = list - entry * of_entry;
  const int32_t* offsets = p.mask.offsets.At<const int32_t>(p.batch, entry) + own * 2;
  const uint32_t begin = RowBounds::Clamp(offsets[0], p.mask.capacity);
  const uint32_t end = RowBounds::Clamp(offsets[1], p.mask.capacity);
  return end > begin ? end - begin : 0;
}

// A tile of the line.
struct DecodePlace {
  uint32_t list, tiles;  // of the list
  uint32_t item, tile;   // of the list, of the item

  // The first tile of the next item. There has to be one.
  __device__ __forceinline__ void ToNextItem(const AttentionDecodeProblem& p) {
    tile = 0;
    if (++item < p.items_of_list) return;
    item = 0;
    do {
      tiles = TilesOfList(p, ++list);
    } while (tiles == 0);
  }
};

// What searches leave in shared memory.
struct DecodeSearch {
  uint32_t sums[kDecodeMergeWarps];  // of warps, of which a block has at most as many
  uint32_t list, begin, tiles;       // of the list that was found
};

// Searches by all kWarps warps of a block.
template <int kWarps>
class DecodeLine {
  static constexpr uint32_t kThreads = kWarps * kWarp;
  static_assert(kWarps <= kDecodeMergeWarps);

 public:
  __device__ __forceinline__ DecodeLine(const AttentionDecodeProblem& p, DecodeSearch& shared)
      : p_(p), shared_(shared) {}

  // The tiles of the line.
  __device__ __forceinline__ uint32_t Tiles() const {
    uint32_t own = 0;
#pragma unroll 1
    for (uint32_t list = threadIdx.x; list < p_.lists; list += kThreads) {
      own += TilesOfList(p_, list);
    }
    const uint32_t of_warp = SumOverLanes(own, kWarp);
    uint32_t before;
    return OverWarps(of_warp, before) * p_.items_of_list;
  }

  // Where a tile of the line lies, which has to have as many.
  __device__ __forceinline__ DecodePlace Find(uint32_t tile) const {
    uint32_t passed = 0;  // of all lists before these
#pragma unroll 1
    for (uint32_t first = 0; first < p_.lists && passed <= tile; first += kThreads) {
      const uint32_t list = first + threadIdx.x;
      const uint32_t tiles = list < p_.lists ? TilesOfList(p_, list) : 0;
      uint32_t up_to = tiles;
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        const uint32_t other = __shfl_up_sync(kAllLanes, up_to, distance);
        if (threadIdx.x % kWarp >= distance) up_to += other;
      }
      uint32_t before;
      const uint32_t all =
          OverWarps(__shfl_sync(kAllLanes, up_to, kWarp - 1), before) * p_.items_of_list;
      const uint32_t begin = passed + (before + up_to - tiles) * p_.items_of_list;
      if (begin <= tile && tile - begin < tiles * p_.items_of_list) {
        shared_.list = list;
        shared_.begin = begin;
        shared_.tiles = tiles;
      }
      passed += all;
    }
    __syncthreads();
    const uint32_t in_list = tile - shared_.begin, item = in_list / shared_.tiles;
    return {shared_.list, shared_.tiles, item, in_list - item * shared_.tiles};
  }

 private:
  // The sum over warps, and over those before this one, of a number that a warp's lanes agree on.
  __device__ __forceinline__ uint32_t OverWarps(uint32_t of_warp, uint32_t& before) const {
    __syncthreads();
    if (threadIdx.x % kWarp == 0) shared_.sums[threadIdx.x / kWarp] = of_warp;
    __syncthreads();
    uint32_t all = 0;
    before = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < kWarps; ++warp) {
      if (warp == threadIdx.x / kWarp) before = all;
      all += shared_.sums[warp];
    }
    return all;
  }

  const AttentionDecodeProblem& p_;
  DecodeSearch& shared_;
};

// An item's rows, and where what they read and write lies.
struct DecodeItem {
  BatchPlace place;
  uint32_t own;        // of the batch entry's masks
  uint32_t group;      // key head
  uint32_t first_row;  // of the rows of the key head that share a list
  uint32_t rows;
  uint32_t first_head;  // that these rows are of; the other heads follow

  __device__ __forceinline__ void Set(const AttentionDecodeProblem& p, uint32_t list,
                                      uint32_t item) {
    const auto groups = static_cast<uint32_t>(p.mask.groups);
    const auto per_group = static_cast<uint32_t>(p.mask.per_group);
    const uint32_t entry = list / (groups * per_group);
    place.Set(p.batch, entry);
    own = list - entry * (groups * per_group);
    const uint32_t all_rows = p.heads_of_list * static_cast<uint32_t>(p.queries);
    const uint32_t of_head = (all_rows + kDecodeRows - 1) / kDecodeRows;
    const uint32_t head = item / of_head;
    group = groups > 1 ? own / per_group : head;
    first_row = (item - head * of_head) * kDecodeRows;
    rows = all_rows - first_row < kDecodeRows ? all_rows - first_row : kDecodeRows;
    first_head = group * static_cast<uint32_t>(p.per_group) + (per_group > 1 ? own % per_group : 0);
  }

  // Which head and query a row is; rows behind the last one are taken for it.
  struct Row {
    uint32_t head, query;
  };
  __device__ __forceinline__ Row RowAt(const AttentionDecodeProblem& p, uint32_t row) const {
    const auto queries = static_cast<uint32_t>(p.queries);
    const uint32_t at = first_row + (row < rows ? row : rows - 1), head = at / queries;
    return {first_head + head, at - head * queries};
  }

  // Where a row's numbers begin, in an array (queries, heads, size), and its lse.
  template <typename T>
  __device__ __forceinline__ T* NumbersOf(const AttentionDecodeProblem& p, const Array& array,
                                          const Row& row, uint32_t size) const {
    const auto heads = static_cast<uint32_t>(p.groups * p.per_group);
    return place.At<T>(p.batch, array) + MultiplyWide(row.query * heads + row.head, size);
  }
  __device__ __forceinline__ float* LseOf(const AttentionDecodeProblem& p, const Row& row) const {
    return place.At<float>(p.batch, p.lse) +
           MultiplyWide(row.head, static_cast<uint32_t>(p.queries)) + row.query;
  }
};

// A part of an item in the workspace.
struct DecodePart {
  float* numbers;
  uint32_t rows, size;  // that there is room for; of a row's values

  // `second`: what the block's part of the line ends with.
  __device__ __forceinline__ DecodePart(const AttentionDecodeProblem& p, uint32_t block,
                                        bool second)
      : numbers(reinterpret_cast<float*>(p.workspace.data) +
                MultiplyWide(2 * block + second, static_cast<uint32_t>(DecodePartNumbers(p)))),
        rows(static_cast<uint32_t>(DecodeRowsOfPart(p))),
        size(static_cast<uint32_t>(p.value_size)) {}

  __device__ __forceinline__ float& Sum(uint32_t row, uint32_t column) const {
    return numbers[row * size + column];
  }
  __device__ __forceinline__ float& Shift(uint32_t row) const { return numbers[rows * size + row]; }
  __device__ __forceinline__ float& Total(uint32_t row) const {
    return numbers[rows * (size + 1) + row];
  }
};

}  // namespace jaxsparse
