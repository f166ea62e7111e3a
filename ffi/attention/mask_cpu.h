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

  // Moves what is stored in sparse blocks of 8 x 8 positions to `rest`, where tiles of products can
  // leave out so many blocks then that this pays: at the edge of a band, if few positions behind it
  // are stored as well. Returns whether it has done so.
  JAXSPARSE_INLINE bool Split(Cell* rest) {
    if (is_full || !IsDense()) return false;
    rest->stored = 0;
    int left_out = 0;  // blocks
    for (int r = 0; r < kCell; r += kBlock) {
      const uint64_t blocks = DenseBlocks(row_bits + r), before = AnyOf(row_bits + r);
      uint64_t after = 0;
      for (int i = r; i < r + kBlock; ++i) {
        rest->row_bits[i] = row_bits[i] & ~blocks;
        rest->stored += __builtin_popcountll(rest->row_bits[i]);
        after |= row_bits[i] & blocks;
      }
      left_out += Width(before) - Width(after);
    }
    const int gained = left_out * kBlock * kBlock - rest->stored * kOfOnePosition;
    if (gained <= 0 || stored - rest->stored < kDenseCell) return false;
    rest->down = down, rest->first = first, rest->columns = columns;
    used_rows = rest->used_rows = rest->used_columns = 0;
    for (int r = 0; r < kCell; ++r) {
      row_bits[r] &= ~rest->row_bits[r];
      used_rows |= uint64_t{row_bits[r] != 0} << r;
      rest->used_columns |= rest->row_bits[r];
      rest->used_rows |= uint64_t{rest->row_bits[r] != 0} << r;
    }
    rest->is_full = false;
    stored -= rest->stored;
    TransposeBits(row_bits, column_bits);
    return true;
  }

 private:
  static constexpr int kBlock = 8;
  // As many products of a dense cell take the time of a single position.
  static constexpr int kOfOnePosition = 6;

  JAXSPARSE_INLINE static uint64_t AnyOf(const uint64_t* rows) {
    uint64_t any = 0;
    for (int r = 0; r < kBlock; ++r) any |= rows[r];
    return any;
  }

  // Blocks from the first to the last one in which a bit is set.
  JAXSPARSE_INLINE static int Width(uint64_t bits) {
    return bits == 0 ? 0
                     : (63 - __builtin_clzll(bits)) / kBlock - __builtin_ctzll(bits) / kBlock + 1;
  }

  // All bits of the blocks of eight rows of which 3/8 or more are set.
  JAXSPARSE_INLINE static uint64_t DenseBlocks(const uint64_t* rows) {
    uint64_t counts = 0;  // a byte for each block
    for (int r = 0; r < kBlock; ++r) {
      uint64_t sums = rows[r] - (rows[r] >> 1 & 0x5555555555555555u);
      sums = (sums & 0x3333333333333333u) + (sums >> 2 & 0x3333333333333333u);
      counts += (sums + (sums >> 4)) & 0x0f0f0f0f0f0f0f0fu;
    }
    uint64_t blocks = 0;
    for (int at = 0; at < 64; at += 8) {
      const bool is_dense = (counts >> at & 0xff) >= kBlock * kBlock * 3 / 8;
      blocks |= is_dense ? uint64_t{0xff} << at : 0;
    }
    return blocks;
  }

  // A word has two bits of every eighth column of row r, then two of row r + 8, and so on.
  JAXSPARSE_INLINE void Unpack(const uint32_t* words) {
    constexpr int kWords = kMaskCellWords / (kCell / 16);  // of 16 rows
    for (int first = 0; first < kCell; first += 16, words += kWords) {
      for (int below = 0; below < 2; ++below) {
        uint64_t spread[kWords];
        for (int w = 0; w < kWords; ++w) {
          uint64_t pairs = words[w] >> (2 * below) & 0x33333333u;
          pairs = (pairs | pairs << 16) & 0x0000ffff0000ffffu;
          pairs = (pairs | pairs << 8) & 0x00ff00ff00ff00ffu;
          pairs = (pairs | pairs << 4) & 0x0303030303030303u;
          spread[w] = pairs << (2 * (w % 4));
        }
        uint64_t* rows = row_bits + first + 8 * below;
        for (int r = 0; r < 8; ++r) {
          const uint64_t* of_row = spread + 4 * r;
          rows[r] = of_row[0] | of_row[1] | of_row[2] | of_row[3];
        }
      }
    }
  }
};

// The stored positions of a cell, row by row. The last one is repeated up to a multiple of 16, so
// that vectors of them can be taken.
struct Positions {
  int begins[kCell + 1];
  uint8_t rows[kCell * kCell], columns[kCell * kCell];

  JAXSPARSE_INLINE int count() const { return begins[kCell]; }

  Positions() = default;
  JAXSPARSE_INLINE explicit Positions(const uint64_t* row_bits) {
    int count = 0;
    for (int r = 0; r < kCell; ++r) {
      begins[r] = count;
      for (uint64_t bits = row_bits[r]; bits != 0; bits &= bits - 1) {
        rows[count] = static_cast<uint8_t>(r);
        columns[count++] = static_cast<uint8_t>(__builtin_ctzll(bits));
      }
    }
    begins[kCell] = count;
    for (; count % 16 != 0; ++count) {
      rows[count] = rows[count - 1];
      columns[count] = columns[count - 1];
    }
  }

  // The positions of the transposed cell, and their values. It repeats none.
  template <typename Acc>
  JAXSPARSE_INLINE void SortByColumns(const Acc* values, Positions* sorted,
                                      Acc* sorted_values) const {
    int next[kCell] = {};
    for (int i = 0; i < count(); ++i) ++next[columns[i]];
    int begin = 0;
    for (int c = 0; c < kCell; ++c) {
      sorted->begins[c] = begin;
      begin += next[c];
      next[c] = sorted->begins[c];
    }
    sorted->begins[kCell] = begin;
    for (int i = 0; i < count(); ++i) {
      const int to = next[columns[i]]++;
      sorted->rows[to] = columns[i];
      sorted->columns[to] = rows[i];
      sorted_values[to] = values[i];
    }
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

// Calls visit(cell, the cell after it) for the cells of such rows that store anything. One may come
// in two parts, the sparse one first: the dense one has the time to fetch what comes next.
template <typename F>
JAXSPARSE_INLINE void VisitCells(const HeadMask& mask, const TaskRowsOfTiles& rows,
                                 int64_t column_count, F&& visit) {
  constexpr int kCells = 3;
  Cell cells[kCells];
  int now = 0;
  mask.ForEachCell(rows.row_of_tiles, [&](int down, int64_t first, const uint32_t* words) {
    const int64_t count = rows.counts[down];
    const int64_t columns = Between(0, column_count - first, kCell);
    if (columns == 0 || count == 0) return;
    int next = (now + 1) % kCells, last = next;
    const int other = (now + 2) % kCells;
    cells[next].Read(down, first, words, count, columns);
    if (cells[next].stored == 0) return;
    if (cells[next].Split(&cells[other])) next = other;
    if (cells[now].stored > 0) visit(cells[now], cells[next]);
    if (next != last) visit(cells[next], cells[last]);
    now = last;
  });
  if (cells[now].stored > 0) visit(cells[now], Cell{});
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
