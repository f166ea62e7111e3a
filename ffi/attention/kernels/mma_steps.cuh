// What a block of attention's kernels by mma.sync works on: its item, the steps that this takes,
// and copies to shared memory.
#pragma once

#include "attention/kernels/mask_cells.cuh"
#include "attention/kernels/mma.h"

namespace jaxsparse {

// A row of tiles of a head, in shared memory.
struct MmaItem {
  BatchPlace place;
  MaskRow mask;
  uint32_t head;  // of its batch entry's
  uint32_t row;   // of tiles

  // By one thread: an item of queries of a head, or of keys of a group.
  template <typename Problem>
  __device__ __forceinline__ void Set(const Problem& p, uint32_t number) {
    const auto per_group = static_cast<uint32_t>(p.per_group);
    SetRow(p, p.mask, static_cast<uint32_t>(p.groups) * per_group, per_group, number);
  }
  template <typename Problem>
  __device__ __forceinline__ void SetKeys(const Problem& p, uint32_t number) {
    SetRow(p, p.transposed_mask, static_cast<uint32_t>(p.groups), 1, number);
  }
  // By one thread: the same row of the mask of another head of the group.
  __device__ __forceinline__ void SetMask(const Batch& batch, const MaskTiles& tiles,
                                          uint32_t group, uint32_t of_group) {
    mask.Set(tiles, batch, place, OwnMask(tiles, group, of_group), row);
  }

 private:
  // An item of so many heads of a batch entry, `per_group` of which are a group of the mask's. Each
  // has a row of the mask's tiles.
  template <typename Problem>
  __device__ __forceinline__ void SetRow(const Problem& p, const MaskTiles& tiles, uint32_t heads,
                                         uint32_t per_group, uint32_t number) {
    const AttentionItems::Place at = p.items.At(number);
    head = at.head % heads;
    place.Set(p.batch, at.head / heads);
    const uint32_t own = OwnMask(tiles, head / per_group, head % per_group);
    row = MaskRowInOrder(tiles, p.batch, place, own, at.row);
    mask.Set(tiles, p.batch, place, own, row);
  }
  __device__ __forceinline__ static uint32_t OwnMask(const MaskTiles& tiles, uint32_t group,
                                                     uint32_t of_group) {
    return static_cast<uint32_t>(tiles.Own(group, of_group));
  }
};

// Has one thread set what controls the work of a block, in shared memory.
template <typename T, typename Control, auto kConfig, typename Problem>
__device__ __forceinline__ Control& SetMmaControl(const Problem& p, unsigned char* shared,
                                                  uint32_t block) {
  static_assert(sizeof(Control) <= kMmaControlBytes && kConfig.ControlAt() % 16 == 0 &&
                kConfig.tiles.number_bytes == sizeof(T));
  Control& control = *reinterpret_cast<Control*>(shared + kConfig.ControlAt());
  if (threadIdx.x == 0) control.Set(p, block / kConfig.tiles.BlocksOfTile());
  __syncthreads();
  return control;
}

// Which rows of an item a block owns, and each of its warps.
template <MmaTiles kTiles>
struct MmaRows {
  const MmaItem& item;
  int first_cell;  // of the block's, of its tile's
  int of_warp;     // the warp's first row, of the block's

  __device__ __forceinline__ MmaRows(const MmaItem& item, uint32_t block)
      : item(item),
        first_cell(static_cast<int>(block) % kTiles.BlocksOfTile()),
        of_warp(WarpOfBlock() * kTiles.strips * kMmaStrip) {}

  // The first one of all of the head's.
  __device__ __forceinline__ uint32_t First() const {
    return item.row * kMaskTile + first_cell * kMaskCell;
  }
  __device__ __forceinline__ uint32_t FirstOfWarp() const { return First() + of_warp; }
  // How many there are from the warp's first one on, or less than 0, where a head has `rows`.
  __device__ __forceinline__ int LeftOfWarp(int64_t rows) const {
    return static_cast<int>(rows) - static_cast<int>(FirstOfWarp());
  }
  // The warp's row of cells of the tile, and its first strip of that.
  __device__ __forceinline__ int Down() const { return first_cell + of_warp / kMaskCell; }
  __device__ __forceinline__ int Strip() const { return of_warp % kMaskCell / kMmaStrip; }
};

// The steps of an item: the columns of cells of its listed tiles in which the block's rows, kCells
// cells from cell `first` on, have one that is not empty.
template <int kCells>
class MmaSteps {
  const MaskRow& row_;
  uint32_t next_ = 0;  // two for each entry
  uint32_t entry_ = 0, upcoming_;
  int first_;

 public:
  __device__ __forceinline__ MmaSteps(const MaskRow& row, int first) : row_(row), first_(first) {
    upcoming_ = row.count > 0 ? row.entries[0] : 0;
  }

  // Goes to the first step, or the next one; false if there is none.
  __device__ __forceinline__ bool Next() {
#pragma unroll 1
    while (next_ < 2 * row_.count) {
      if (next_ % 2 == 0) {
        entry_ = WithWords(row_, upcoming_);
        if (next_ / 2 + 1 < row_.count) upcoming_ = row_.entries[next_ / 2 + 1];
      }
      ++next_;
      bool stored = false;
#pragma unroll
      for (int i = 0; i < kCells; ++i) stored = stored || CellAt(first_ + i) != MaskCell::kEmpty;
      if (stored) return true;
    }
    return false;
  }

  // Of the step: its first column, and the cell of one half of the tile's rows.
  __device__ __forceinline__ uint32_t Column() const {
    return row_.ColumnOf(entry_) * kMaskTile + Across() * kMaskCell;
  }
  __device__ __forceinline__ MaskCell CellAt(int down) const {
    return MaskCellOf(entry_, down, Across());
  }
  // A lane's words of kStrips strips of a cell, the first one of which is strip `strip`. Those of
  // cells that are full have all bits.
  template <int kStrips>
  __device__ __forceinline__ void LoadWords(int down, int strip, uint32_t (&words)[kStrips]) const {
    const bool partial = CellAt(down) == MaskCell::kPartial;
    const uint32_t* from = nullptr;
    if (partial) {
      const uint32_t* cells =
          row_.WordsAt(row_.bits_at[(next_ - 1) / 2], CountPartialCells(entry_));
      from =
          cells + CountPartialCells(entry_, down, Across()) * kMaskCellWords + threadIdx.x % kWarp;
    }
#pragma unroll
    for (int i = 0; i < kStrips; ++i) {
      words[i] = partial ? from[(strip + i) * kWarp] : 0xffffffffu;
    }
  }

 private:
  __device__ __forceinline__ int Across() const { return static_cast<int>(next_ - 1) % 2; }
};

// Walks the steps of a block's item whose cells of the other operands come to stages in shared
// memory, from `stages` on: copy(stage, column) has a step's copied, and add(stage, column,
// partial, words) adds the cell of the warp's rows where it is not empty. Whether one of these was
// partial. Copies of the block's own rows may be on their way.
template <auto kConfig, typename Copy, typename Add>
__device__ __forceinline__ bool WalkStages(const MmaRows<kConfig.tiles>& rows, uint32_t stages,
                                           Copy copy, Add add) {
  const int down = rows.Down(), strip = rows.Strip();
  MmaSteps<kConfig.tiles.rows / kMaskCell> steps(rows.item.mask, rows.first_cell);
  uint32_t stage = stages;
  bool masked = false, more = steps.Next();
  if (more) copy(stage, steps.Column());
#pragma unroll 1
  while (more) {
    const MaskCell cell = steps.CellAt(down);
    const bool partial = cell == MaskCell::kPartial;
    const uint32_t column = steps.Column();
    uint32_t words[kConfig.tiles.strips];
    steps.LoadWords(down, strip, words);
    WaitForCopies();
    __syncthreads();
    const uint32_t own = stage;
    if constexpr (kConfig.stages > 1) {
      stage = 2 * stages + kConfig.StageBytes() - stage;  // the other one
      more = steps.Next();
      if (more) copy(stage, steps.Column());
    }
    masked |= partial;
    if (cell != MaskCell::kEmpty) add(own, column, partial, words);
    if constexpr (kConfig.stages == 1) {
      __syncthreads();
      more = steps.Next();
      if (more) copy(stage, steps.Column());
    }
  }
  WaitForCopies();
  return masked;
}

// Has a block's threads copy kRows rows of a head to a PlainTile of kWidth numbers each, without
// waiting; the head has `rows` of them from there on, `step` numbers apart and of `width` numbers.
// What it lacks is 0.
template <typename T, int kRows, int kWidth, int kThreads>
__device__ __forceinline__ void CopyRows(uint32_t to, const T* from, int64_t step, int64_t rows,
                                         int64_t width) {
  constexpr int kVector = 16 / sizeof(T), kOfRow = kWidth / kVector;
  constexpr int kPitchBytes = (kWidth + 8) * sizeof(T);
  static_assert(kRows * kOfRow % kThreads == 0);
  const int most = static_cast<int>(rows < kRows ? rows : kRows);
  if constexpr (kThreads % kOfRow == 0) {
    constexpr int kRowsAtOnce = kThreads / kOfRow;
    int row = threadIdx.x / kOfRow;
    const int chunk = threadIdx.x % kOfRow;
    from += row * step + chunk * kVector;
    to += row * kPitchBytes + chunk * 16;
#pragma unroll
    for (int i = 0; i < kRows / kRowsAtOnce; ++i) {
      AsyncCopyOrZero(to + i * kRowsAtOnce * kPitchBytes, from,
                      row < most && chunk * kVector < width);
      row += kRowsAtOnce;
      from += kRowsAtOnce * step;
    }
  } else {
#pragma unroll 2
    for (int i = threadIdx.x; i < kRows * kOfRow; i += kThreads) {
      const int row = i / kOfRow, chunk = i % kOfRow;
      AsyncCopyOrZero(to + row * kPitchBytes + chunk * 16, from + row * step + chunk * kVector,
                      row < most && chunk * kVector < width);
    }
  }
}

}  // namespace jaxsparse
