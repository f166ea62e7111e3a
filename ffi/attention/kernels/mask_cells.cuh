// A block mask (attention/problem.h) as kernels read it: the lists of rows of tiles, with limits on
// all that is read, and words of partial cells, applied to products of tiles.
#pragma once

#include "attention/kernels/batch_place.cuh"
#include "attention/problem.h"

namespace jaxsparse {

// Cells of a listed tile, row by row, have their states in two bits each; these are the lower bits
// of those that are partial.
__device__ __forceinline__ uint32_t PartialCellsOf(uint32_t entry) {
  const uint32_t states = entry >> kMaskStatesAt;
  return states & ~(states >> 1) & 0x55;
}
__device__ __forceinline__ uint32_t CountPartialCells(uint32_t entry) {
  return __popc(PartialCellsOf(entry));
}
// Of those in front of a cell: so many cells' words lie in front of its own.
__device__ __forceinline__ uint32_t CountPartialCells(uint32_t entry, int down, int across) {
  return __popc(PartialCellsOf(entry) & ((1u << (4 * down + 2 * across)) - 1));
}

// The number of the first entry of a row of tiles, of all of its mask's; no more than there is room
// for.
__device__ __forceinline__ uint32_t FirstEntryOf(const MaskTiles& mask, const Batch& batch,
                                                 const BatchPlace& place, uint32_t own,
                                                 uint32_t row) {
  const int32_t* offsets = place.At<const int32_t>(batch, mask.offsets) + own * (mask.rows + 1);
  return RowBounds::Clamp(offsets[row], mask.capacity);
}

// The listed tiles of a row of tiles. Numbers of entries are to be below `count`; then nothing
// outside of the mask's arrays is read, whatever these hold.
struct MaskRow {
  const uint32_t* entries;  // the row's first ones
  const int32_t* bits_at;
  const uint32_t* bits;  // the mask's first ones
  uint32_t count;        // of entries
  uint32_t columns;      // of tiles
  uint32_t cells;        // that there are bits of

  // `own`: which of the batch entry's masks it is; `row`: of tiles. The first step does not need
  // it.
  __device__ __forceinline__ void Set(const MaskTiles& mask, const Batch& batch,
                                      const BatchPlace& place, uint32_t own, uint32_t row) {
    SetBits(mask, batch, place, own);
    SetEntries(mask, batch, place, own, row);
  }
  __device__ __forceinline__ void SetBits(const MaskTiles& mask, const Batch& batch,
                                          const BatchPlace& place, uint32_t own) {
    columns = static_cast<uint32_t>(mask.columns);
    cells = static_cast<uint32_t>(mask.cells);
    bits = place.At<const uint32_t>(batch, mask.bits) + own * mask.cells * kMaskCellWords;
  }
  __device__ __forceinline__ void SetEntries(const MaskTiles& mask, const Batch& batch,
                                             const BatchPlace& place, uint32_t own, uint32_t row) {
    const int32_t* offsets =
        place.At<const int32_t>(batch, mask.offsets) + own * (mask.rows + 1) + row;
    const uint32_t begin = RowBounds::Clamp(offsets[0], mask.capacity);
    const uint32_t end = RowBounds::Clamp(offsets[1], mask.capacity);
    count = end > begin ? end - begin : 0;
    const int64_t first = own * mask.capacity + begin;
    entries = place.At<const uint32_t>(batch, mask.entries) + first;
    bits_at = place.At<const int32_t>(batch, mask.bits_at) + first;
  }

  // The column of tiles of an entry.
  __device__ __forceinline__ uint32_t ColumnOf(uint32_t entry) const {
    return Within(MaskColumnOf(entry), columns);
  }
  // The first of so many cells' words, one cell behind the other, of an entry that has them at
  // `at`. There have to be as many cells.
  __device__ __forceinline__ const uint32_t* WordsAt(int32_t at, uint32_t count_of_cells) const {
    const uint32_t last = cells - count_of_cells, first = static_cast<uint32_t>(at);
    return bits + int64_t{first < last ? first : last} * kMaskCellWords;
  }
};

// An entry whose partial cells are empty if there are no words for them.
__device__ __forceinline__ uint32_t WithWords(const MaskRow& row, uint32_t entry) {
  const uint32_t partial = PartialCellsOf(entry);
  return __popc(partial) <= row.cells ? entry : entry & ~(partial << kMaskStatesAt);
}

// Whether a partial cell stores a place, by its words.
__device__ __forceinline__ bool IsStored(const uint32_t* words, uint32_t row, uint32_t column) {
  const uint32_t word = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
  const uint32_t bit = column / 8 * 4 + row / 8 % 2 * 2 + column % 2;
  return (words[word] >> bit & 1) != 0;
}

// Which row of tiles comes in place `at` of a mask's order.
__device__ __forceinline__ uint32_t MaskRowInOrder(const MaskTiles& mask, const Batch& batch,
                                                   const BatchPlace& place, uint32_t own,
                                                   uint32_t at) {
  const int32_t* order = place.At<const int32_t>(batch, mask.order) + own * mask.rows;
  return Within(static_cast<uint32_t>(order[at]), mask.rows);
}

// Puts `other` in place of the numbers that a cell does not store; `numbers` from kFirst on are
// this thread's of a product of 64 x 64, or its first ones if there are fewer. Four instructions
// bring a word's bits to predicates, and each number is selected by one.
template <int kFirst, int kCount>
__device__ __forceinline__ void ApplyMaskWord(uint32_t word, float other,
                                              float (&numbers)[kCount]) {
  constexpr int kOfWord = kCount - kFirst < 32 ? kCount - kFirst : 32;
#pragma unroll
  for (int i = 0; i < kOfWord; ++i) {
    numbers[kFirst + i] = (word & (1u << i)) != 0 ? numbers[kFirst + i] : other;
  }
}

// The same by a cell's state; `word` is read of a partial one.
template <int kFirst, int kCount>
__device__ __forceinline__ void ApplyMaskCell(MaskCell cell, uint32_t word, float other,
                                              float (&numbers)[kCount]) {
  if (cell == MaskCell::kFull) return;
  if (cell == MaskCell::kPartial) {
    ApplyMaskWord<kFirst>(word, other, numbers);
    return;
  }
#pragma unroll
  for (int i = 0; i < 32; ++i) numbers[kFirst + i] = other;
}

}  // namespace jaxsparse
