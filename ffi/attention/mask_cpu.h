// How CPU kernels read a block mask: a row of tiles, cell by cell. Compiled once for each
// instruction set, as the kernels are.
#pragma once

#include "attention/problem.h"
#include "cpu/pattern.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

constexpr int kCell = kMaskCell;
constexpr int kCellsOfTile = kMaskTile / kMaskCell;  // in each direction

// From so many stored positions on, all products of a cell cost less than those of its stored
// positions one by one.
constexpr int kDenseCell = kCell * kCell * 3 / 8;

JAXSPARSE_INLINE uint64_t LowBits(int64_t count) {
  return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

// Columns of a mask, whole tiles of it but for the last one.
struct ColumnRange {
  int64_t begin, end;
};

// The mask of one head.
struct HeadMask {
  int64_t rows = 0, capacity = 0, cells = 0;
  const int32_t* offsets;
  const uint32_t* entries;
  const int32_t* bits_at;
  const uint32_t* bits;
  const int32_t* order;

  HeadMask() = default;
  JAXSPARSE_INLINE HeadMask(const MaskTiles& mask, const Batch& batch, int64_t entry, int64_t group,
                            int64_t of_group)
      : rows(mask.rows), capacity(mask.capacity), cells(mask.cells) {
    const int64_t own = mask.Own(group, of_group);
    offsets = mask.offsets.At<const int32_t>(batch, entry) + own * (rows + 1);
    entries = mask.entries.At<const uint32_t>(batch, entry) + own * capacity;
    bits_at = mask.bits_at.At<const int32_t>(batch, entry) + own * capacity;
    bits = mask.bits.At<const uint32_t>(batch, entry) + own * cells * kMaskCellWords;
    order = mask.order.At<const int32_t>(batch, entry) + own * rows;
  }

  // Rows of tiles by falling length, as far as `order` is right.
  JAXSPARSE_INLINE int64_t RowOfTiles(int64_t place) const {
    return Within(static_cast<uint32_t>(order[place]), static_cast<uint32_t>(rows));
  }

  JAXSPARSE_INLINE bool HasTiles(int64_t row_of_tiles, const ColumnRange& range) const {
    const RowBounds bounds(offsets, row_of_tiles, capacity);
    for (int64_t i = bounds.begin; i < bounds.end; ++i) {
      const int64_t first = int64_t{MaskColumnOf(entries[i])} * kMaskTile;
      if (range.begin <= first && first < range.end) return true;
    }
    return false;
  }

  // Calls visit(cell's row in the tile, first column, words) for the cells of a row of tiles that
  // are not empty, column by column; words are null for a full one.
  template <typename F>
  JAXSPARSE_INLINE void ForEachCell(int64_t row_of_tiles, F&& visit) const {
    const RowBounds bounds(offsets, row_of_tiles, capacity);
    for (int64_t i = bounds.begin; i < bounds.end; ++i) {
      const uint32_t entry = entries[i];
      int64_t words_at[kCellsOfTile][kCellsOfTile], at = bits_at[i];
      for (int down = 0; down < kCellsOfTile; ++down) {
        for (int across = 0; across < kCellsOfTile; ++across) {
          words_at[down][across] = at;
          at += MaskCellOf(entry, down, across) == MaskCell::kPartial;
        }
      }
      for (int across = 0; across < kCellsOfTile; ++across) {
        const int64_t first = (int64_t{MaskColumnOf(entry)} * kCellsOfTile + across) * kCell;
        for (int down = 0; down < kCellsOfTile; ++down) {
          const MaskCell state = MaskCellOf(entry, down, across);
          if (state == MaskCell::kFull) {
            visit(down, first, nullptr);
          } else if (state == MaskCell::kPartial && cells > 0) {
            visit(down, first,
                  bits + Between(0, words_at[down][across], cells - 1) * kMaskCellWords);
          }
        }
      }
    }
  }
};

// 64 x 64 bits, by exchanging blocks of half the size, and so on.
JAXSPARSE_INLINE void TransposeBits(const uint64_t* rows, uint64_t* columns) {
  for (int r = 0; r < kCell; ++r) columns[r] = rows[r];
  uint64_t low = 0xffffffffu;
  for (int size = kCell / 2; size > 0; size /= 2, low ^= low << size) {
    for (int block = 0; block < kCell; block += 2 * size) {
      for (int r = block; r < block + size; ++r) {
        const uint64_t exchanged = ((columns[r] >> size) ^ columns[r + size]) & low;
        columns[r] ^= exchanged << size;
        columns[r + size] ^= exchanged;
      }
    }
  }
}

// A cell that stores positions of a matrix: bit c of rows[r], bit r of columns[c].
struct Cell {
  int down;            // which of the tile's rows of cells
  int64_t first = -1;  // column
  int columns = 0;     // of the matrix
  int stored = 0;      // positions
  bool is_full = false;
  uint64_t used_rows = 0, used_columns = 0;
  uint64_t row_bits[kCell], column_bits[kCell];

  // Whether all products are taken.
  JAXSPARSE_INLINE bool IsDense() const { return stored >= kDenseCell; }
  // Bits that make a difference: null where all positions are stored.
  JAXSPARSE_INLINE const uint64_t* Rows() const { return is_full ? nullptr : row_bits; }
  JAXSPARSE_INLINE const uint64_t* Columns() const { return is_full ? nullptr : column_bits; }

  // Rows below and columns to the right of the matrix are left out. Null words: a full cell.
  JAXSPARSE_INLINE void Read(int down_in_tile, int64_t first_column, const uint32_t* words,
                             int64_t row_count, int64_t column_count) {
    down = down_in_tile;
    first = first_column;
    columns = static_cast<int>(column_count);
    is_full = words == nullptr;
    const uint64_t all = LowBits(column_count);
    if (is_full && row_count * column_count >= kDenseCell) {
      stored = kDenseCell;
      used_columns = all;
      return;
    }
    if (!is_full) Unpack(words);
    stored = 0;
    used_rows = used_columns = 0;
    for (int r = 0; r < kCell; ++r) {
      row_bits[r] = r < row_count ? (is_full ? all : row_bits[r] & all) : 0;
      stored += __builtin_popcountll(row_bits[r]);
      used_columns |= row_bits[r];
      used_rows |= uint64_t{row_bits[r] != 0} << r;
    }
    if (IsDense()) {
      used_columns = all;
      TransposeBits(row_bits, column_bits);
    }
  }

 private:
  // A word has two bits of every eighth column of row r, then two of row r + 8, and so on.
  JAXSPARSE_INLINE void Unpack(const uint32_t* words) {
    for (int r = 0; r < kCell; ++r) {
      const int shift = r % 16 / 8 * 2;
      const uint32_t* of_row = words + r / 16 * 32 + r % 8 * 4;
      uint64_t row = 0;
      for (int c = 0; c < 4; ++c) {
        uint64_t pairs = (of_row[c] >> shift) & 0x33333333u;
        pairs = (pairs | pairs << 16) & 0x0000ffff0000ffffu;
        pairs = (pairs | pairs << 8) & 0x00ff00ff00ff00ffu;
        pairs = (pairs | pairs << 4) & 0x0303030303030303u;
        row |= pairs << (2 * c);
      }
      row_bits[r] = row;
    }
  }
};

// The stored positions of a cell, row by row.
struct Positions {
  int begins[kCell + 1];
  uint8_t columns[kCell * kCell];

  JAXSPARSE_INLINE int count() const { return begins[kCell]; }

  JAXSPARSE_INLINE explicit Positions(const uint64_t* row_bits) {
    int count = 0;
    for (int r = 0; r < kCell; ++r) {
      begins[r] = count;
      for (uint64_t bits = row_bits[r]; bits != 0; bits &= bits - 1) {
        columns[count++] = static_cast<uint8_t>(__builtin_ctzll(bits));
      }
    }
    begins[kCell] = count;
  }
};

// The rows of a row of tiles that a task has, of each row of cells; 0 of one that it does not have.
struct TaskRowsOfTiles {
  int64_t row_of_tiles;
  int64_t counts[kCellsOfTile];

  JAXSPARSE_INLINE int64_t FirstRow(int down) const {
    return (row_of_tiles * kCellsOfTile + down) * kCell;
  }
};

// Calls visit(cell, the cell after it) for the cells of such rows and columns that store anything.
template <typename F>
JAXSPARSE_INLINE void VisitCells(const HeadMask& mask, const TaskRowsOfTiles& rows,
                                 const ColumnRange& range, F&& visit) {
  Cell cells[2];
  int now = 0;
  mask.ForEachCell(rows.row_of_tiles, [&](int down, int64_t first, const uint32_t* words) {
    const int64_t count = rows.counts[down];
    const int64_t columns = Between(0, range.end - first, kCell);
    if (first < range.begin || columns == 0 || count == 0) return;
    Cell& next = cells[1 - now];
    next.Read(down, first, words, count, columns);
    if (next.stored == 0) return;
    if (cells[now].stored > 0) visit(cells[now], next);
    now = 1 - now;
  });
  if (cells[now].stored > 0) visit(cells[now], Cell{});
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
