// Random masks of attention: which positions are stored, as lists of tiles and as patterns.
#pragma once

#include <algorithm>
#include <array>

#include "attention/attention.h"
#include "operands.h"

namespace jaxsparse {
namespace {

// Which positions a head stores.
struct TestMask {
  int64_t rows, columns;
  std::vector<char> stored;

  bool operator()(int64_t row, int64_t column) const {
    return stored[static_cast<size_t>(row * columns + column)] != 0;
  }

  // Cells of every kind; some rows store nothing, whatever cells are.
  TestMask(Random& random, int64_t rows, int64_t columns)
      : rows(rows), columns(columns), stored(static_cast<size_t>(rows * columns)) {
    const int64_t across = CeilDivide(columns, kMaskCell);
    std::vector<int64_t> percent(static_cast<size_t>(CeilDivide(rows, kMaskCell) * across));
    constexpr int64_t kEdge = -1;  // of a band, with some positions behind it
    for (int64_t& p : percent)
      p = std::array<int64_t, 6>{0, 3, 20, 60, 100, kEdge}[random.Below(6)];
    for (int64_t row = 0; row < rows; ++row) {
      const bool is_empty = random.Below(10) == 0;
      for (int64_t c = 0; c < columns; ++c) {
        const int64_t cell = row / kMaskCell * across + c / kMaskCell;
        int64_t chance = percent[static_cast<size_t>(cell)];
        if (chance == kEdge) chance = c % kMaskCell <= row % kMaskCell ? 100 : 3;
        const bool is_stored = random.Below(100) < chance;
        stored[static_cast<size_t>(row * columns + c)] = is_stored && !is_empty;
      }
    }
  }

  TestMask Transposed() const {
    TestMask result = *this;
    std::swap(result.rows, result.columns);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t c = 0; c < columns; ++c) {
        result.stored[static_cast<size_t>(c * rows + row)] = (*this)(row, c);
      }
    }
    return result;
  }
};

// The lists of several masks of one shape, one behind the other.
struct MaskLists {
  int64_t rows, columns, capacity = 1, cells = 0;
  std::unique_ptr<int32_t[]> offsets, bits_at, order;
  std::unique_ptr<uint32_t[]> entries, bits;

  explicit MaskLists(const std::vector<TestMask>& masks)
      : rows(CeilDivide(masks[0].rows, kMaskTile)),
        columns(CeilDivide(masks[0].columns, kMaskTile)) {
    std::vector<One> all;
    for (const TestMask& mask : masks) {
      all.emplace_back(mask);
      capacity = std::max(capacity, static_cast<int64_t>(all.back().entries.size()));
      cells = std::max(cells, static_cast<int64_t>(all.back().bits.size()) / kMaskCellWords);
    }
    const auto count = static_cast<int64_t>(masks.size());
    offsets = Block<int32_t>(count * (rows + 1));
    order = Block<int32_t>(count * rows);
    entries = Block<uint32_t>(count * capacity);
    bits_at = Block<int32_t>(count * capacity);
    bits = Block<uint32_t>(count * cells * kMaskCellWords);
    // Room that is not used holds garbage that must not be followed.
    std::fill_n(entries.get(), count * capacity, 0xffffffffu);
    std::fill_n(bits_at.get(), count * capacity, 1 << 30);
    std::fill_n(bits.get(), count * cells * kMaskCellWords, 0xffffffffu);
    for (int64_t i = 0; i < count; ++i) {
      const One& one = all[static_cast<size_t>(i)];
      std::copy(one.offsets.begin(), one.offsets.end(), offsets.get() + i * (rows + 1));
      std::copy(one.entries.begin(), one.entries.end(), entries.get() + i * capacity);
      std::copy(one.bits_at.begin(), one.bits_at.end(), bits_at.get() + i * capacity);
      std::copy(one.bits.begin(), one.bits.end(), bits.get() + i * cells * kMaskCellWords);
      for (int64_t r = 0; r < rows; ++r) order[i * rows + r] = static_cast<int32_t>(rows - 1 - r);
    }
  }

  MaskTiles View(int64_t groups, int64_t per_group) const {
    MaskTiles view;
    view.groups = groups;
    view.per_group = per_group;
    view.rows = rows;
    view.columns = columns;
    view.capacity = capacity;
    view.cells = cells;
    view.offsets.data = offsets.get();
    view.entries.data = entries.get();
    view.bits_at.data = bits_at.get();
    view.bits.data = bits.get();
    view.order.data = order.get();
    return view;
  }

  // As many wrong numbers as right ones.
  void Spoil(Random& random, int64_t count) {
    const auto spoil = [&](auto* numbers, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        if (random.Below(2) == 0) numbers[i] = static_cast<int32_t>(random.engine());
      }
    };
    if (random.Below(2) == 0) spoil(offsets.get(), count * (rows + 1));
    spoil(entries.get(), count * capacity);
    spoil(bits_at.get(), count * capacity);
    if (random.Below(2) == 0) spoil(order.get(), count * rows);
  }

 private:
  struct One {
    std::vector<int32_t> offsets = {0}, bits_at;
    std::vector<uint32_t> entries, bits;

    explicit One(const TestMask& mask) {
      for (int64_t row = 0; row < mask.rows; row += kMaskTile) {
        for (int64_t column = 0; column < mask.columns; column += kMaskTile) {
          const auto at = static_cast<int32_t>(bits.size() / kMaskCellWords);
          uint32_t states = 0;
          for (int cell = 0; cell < 4; ++cell) {
            const MaskCell state =
                AddCell(mask, row + cell / 2 * kMaskCell, column + cell % 2 * kMaskCell);
            states |= static_cast<uint32_t>(state) << (kMaskStatesAt + 2 * cell);
          }
          if (states == 0) continue;
          entries.push_back(states | static_cast<uint32_t>(column / kMaskTile));
          bits_at.push_back(at);
        }
        offsets.push_back(static_cast<int32_t>(entries.size()));
      }
    }

    MaskCell AddCell(const TestMask& mask, int64_t row, int64_t column) {
      std::vector<uint32_t> words(kMaskCellWords);
      int stored = 0;
      for (int word = 0; word < kMaskCellWords; ++word) {
        for (int i = 0; i < 32; ++i) {
          const int64_t r = row + word / 32 * 16 + word % 32 / 4 + 8 * (i / 2 % 2);
          const int64_t c = column + 8 * (i / 4) + 2 * (word % 4) + i % 2;
          if (r >= mask.rows || c >= mask.columns || !mask(r, c)) continue;
          words[static_cast<size_t>(word)] |= 1u << i;
          ++stored;
        }
      }
      if (stored == kMaskCell * kMaskCell) return MaskCell::kFull;
      if (stored == 0) return MaskCell::kEmpty;
      bits.insert(bits.end(), words.begin(), words.end());
      return MaskCell::kPartial;
    }
  };
};

// The entries of several masks of one shape as patterns, one behind the other, with padding.
struct PatternLists {
  int64_t rows, columns, nse = 0;
  std::unique_ptr<int32_t[]> offsets, indices;

  explicit PatternLists(const std::vector<TestMask>& masks)
      : rows(masks[0].rows), columns(masks[0].columns) {
    const auto count = static_cast<int64_t>(masks.size());
    offsets = Block<int32_t>(count * (rows + 1));
    std::vector<std::vector<int32_t>> all;
    for (const TestMask& mask : masks) {
      int32_t* to = offsets.get() + static_cast<int64_t>(all.size()) * (rows + 1);
      std::vector<int32_t>& stored = all.emplace_back();
      *to = 0;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t c = 0; c < columns; ++c) {
          if (mask(row, c)) stored.push_back(static_cast<int32_t>(c));
        }
        *++to = static_cast<int32_t>(stored.size());
      }
      nse = std::max(nse, static_cast<int64_t>(stored.size()) + 2);
    }
    indices = Block<int32_t>(count * nse);
    std::fill_n(indices.get(), count * nse, 1 << 30);
    for (int64_t i = 0; i < count; ++i) {
      const std::vector<int32_t>& stored = all[static_cast<size_t>(i)];
      std::copy(stored.begin(), stored.end(), indices.get() + i * nse);
    }
  }

  MaskPattern View(int64_t groups, int64_t per_group) const {
    MaskPattern view;
    view.groups = groups;
    view.per_group = per_group;
    view.rows = rows;
    view.columns = columns;
    view.nse = rows == 0 || columns == 0 ? 0 : nse;
    view.row_offsets.data = offsets.get();
    view.column_indices.data = indices.get();
    return view;
  }

  // As many wrong numbers as right ones.
  void Spoil(Random& random, int64_t count) {
    const auto spoil = [&](int32_t* numbers, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        if (random.Below(2) == 0) numbers[i] = static_cast<int32_t>(random.engine());
      }
    };
    if (random.Below(2) == 0) spoil(offsets.get(), count * (rows + 1));
    spoil(indices.get(), count * nse);
  }
};

}  // namespace
}  // namespace jaxsparse
