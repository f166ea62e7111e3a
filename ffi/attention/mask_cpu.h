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
constexpr int64_t kDenseCell = kCell * kCell / 4;

JAXSPARSE_INLINE uint64_t LowBits(int64_t count) {
  return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

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

  // Calls visit(cell's row in the tile, first column, that of the cell to its right, words) for the
  // cells of a row of tiles that are not empty, column by column; words are null for a full one.
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
        const bool is_last = across + 1 == kCellsOfTile;
        const uint32_t next_entry = is_last && i + 1 < bounds.end ? entries[i + 1] : entry;
        const int64_t next =
            is_last ? int64_t{MaskColumnOf(next_entry)} * kMaskTile : first + kCell;
        for (int down = 0; down < kCellsOfTile; ++down) {
          const MaskCell state = MaskCellOf(entry, down, across);
          if (state == MaskCell::kFull) {
            visit(down, first, next, nullptr);
          } else if (state == MaskCell::kPartial && cells > 0) {
            visit(down, first, next,
                  bits + Between(0, words_at[down][across], cells - 1) * kMaskCellWords);
          }
        }
      }
    }
  }
};

// Which positions of a cell are stored: bit c of rows[r], bit r of columns[c].
struct CellBits {
  uint64_t rows[kCell], columns[kCell];

  // Rows below and columns to the right of the matrix are left out. Null `words` are a full cell.
  // Returns the number of stored positions.
  JAXSPARSE_INLINE int64_t ReadRows(const uint32_t* words, int64_t row_count,
                                    int64_t column_count) {
    if (words != nullptr) Unpack(words);
    int64_t stored = 0;
    for (int64_t r = 0; r < kCell; ++r) {
      const uint64_t row = words == nullptr ? ~uint64_t{0} : rows[r];
      rows[r] = r < row_count ? row & LowBits(column_count) : 0;
      stored += __builtin_popcountll(rows[r]);
    }
    return stored;
  }

  // By exchanging blocks of half the size, and so on.
  JAXSPARSE_INLINE void TransposeRows() {
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
      rows[r] = row;
    }
  }
};

// Cells whose stored positions are read one by one, a row at a time: of a row that few cells store
// much of, one cell has too little to work on.
class ScatteredCells {
  static constexpr int kMost = 32;

 public:
  JAXSPARSE_INLINE bool IsFull() const { return count_ == kMost; }
  JAXSPARSE_INLINE void Add(const CellBits& bits, int64_t first_column) {
    for (int r = 0; r < kCell; ++r) rows_[count_][r] = bits.rows[r];
    columns_[count_++] = first_column;
  }

  // Calls visit(row, columns, number of columns), for at most 64 columns at once, and forgets them.
  template <typename F>
  JAXSPARSE_INLINE void TakeRows(int64_t row_count, F&& visit) {
    int32_t columns[kCell];
    for (int64_t r = 0; r < row_count && count_ > 0; ++r) {
      int count = 0;
      for (int cell = 0; cell < count_; ++cell) {
        for (uint64_t bits = rows_[cell][r]; bits != 0; bits &= bits - 1) {
          columns[count++] = static_cast<int32_t>(columns_[cell] + __builtin_ctzll(bits));
          if (count < kCell) continue;
          visit(r, columns, count);
          count = 0;
        }
      }
      if (count > 0) visit(r, columns, count);
    }
    count_ = 0;
  }

 private:
  int count_ = 0;
  int64_t columns_[kMost];
  uint64_t rows_[kMost][kCell];
};

// A cell of which all products are taken. Null bits: all of its positions are stored.
struct DenseCell {
  int down = 0;  // which of the tile's rows of cells
  int64_t first = 0, columns = 0;
  int64_t next = 0;  // the first column of the cell to its right
  const CellBits* bits = nullptr;

  JAXSPARSE_INLINE const uint64_t* Rows() const { return bits == nullptr ? nullptr : bits->rows; }
  JAXSPARSE_INLINE const uint64_t* Columns() const {
    return bits == nullptr ? nullptr : bits->columns;
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

// Visits what such rows of a mask store: cells with many positions by `dense`(cell), the others by
// `scattered`(down, row, columns, number of columns). `dense` returns false for a cell with bits
// that has to be visited by position.
template <typename Dense, typename Scattered>
JAXSPARSE_INLINE void VisitRows(const HeadMask& mask, const TaskRowsOfTiles& rows,
                                int64_t column_count, Dense&& dense, Scattered&& scattered) {
  ScatteredCells others[kCellsOfTile];
  CellBits bits;
  const auto take_others = [&](int down) {
    others[down].TakeRows(rows.counts[down], [&](int64_t row, const int32_t* columns, int count) {
      scattered(down, row, columns, count);
    });
  };
  mask.ForEachCell(rows.row_of_tiles,
                   [&](int down, int64_t first, int64_t next, const uint32_t* words) {
                     const int64_t count = rows.counts[down];
                     const int64_t columns = Between(0, column_count - first, kCell);
                     if (columns == 0 || count == 0) return;
                     DenseCell cell{down, first, columns, next, nullptr};
                     if (words == nullptr && count * columns >= kDenseCell) {
                       dense(cell);
                       return;
                     }
                     if (bits.ReadRows(words, count, columns) >= kDenseCell) {
                       bits.TransposeRows();
                       cell.bits = &bits;
                       if (dense(cell)) return;
                     }
                     if (others[down].IsFull()) take_others(down);
                     others[down].Add(bits, first);
                   });
  for (int down = 0; down < kCellsOfTile; ++down) take_others(down);
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
