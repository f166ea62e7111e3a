// Arrays of a random block mask, as kernels get them.
#pragma once

#include "attention/problem.h"
#include "device/operands.h"

namespace jaxsparse {

// A block mask as its arrays, from positions that are stored.
class BlockMaskArrays {
 public:
  // `stored(mask, row, column)` of so many masks.
  template <typename Stored>
  BlockMaskArrays(int64_t masks, int64_t rows, int64_t columns, const Stored& stored)
      : masks_(masks),
        rows_(CeilDivide(rows, kMaskTile)),
        columns_(CeilDivide(columns, kMaskTile)) {
    std::vector<std::vector<Tile>> lists;
    for (int64_t mask = 0; mask < masks; ++mask) {
      std::vector<Tile> tiles;
      for (int64_t row = 0; row < rows_; ++row) {
        for (int64_t column = 0; column < columns_; ++column) {
          const Tile tile = TileOf(row, column, [&](int64_t r, int64_t c) {
            return r < rows && c < columns && stored(mask, r, c);
          });
          if (tile.entry >> kMaskStatesAt != 0) tiles.push_back(tile);
        }
      }
      lists.push_back(std::move(tiles));
    }
    for (const std::vector<Tile>& tiles : lists) {
      size_t cells = 0;
      for (const Tile& tile : tiles) cells += tile.words.size() / kMaskCellWords;
      capacity_ = std::max(capacity_, tiles.size() + 2);
      cells_ = std::max(cells_, cells + 1);
    }
    for (const std::vector<Tile>& tiles : lists) Append(tiles);
  }

  void Spoil() {
    jaxsparse::Spoil(offsets_);
    jaxsparse::Spoil(entries_);
    jaxsparse::Spoil(bits_at_);
    jaxsparse::Spoil(order_);
  }

  // Of `entries` batch entries that have masks of their own, or of all.
  MaskTiles AsOperand(int64_t groups, int64_t per_group, int64_t entries) {
    const auto of = [&](auto& array) {
      return Of(array, 0, entries > 1 ? static_cast<int64_t>(array.size()) / entries : 0);
    };
    MaskTiles mask;
    mask.groups = groups;
    mask.per_group = per_group;
    mask.rows = rows_;
    mask.columns = columns_;
    mask.capacity = static_cast<int64_t>(capacity_);
    mask.cells = static_cast<int64_t>(cells_);
    mask.offsets = of(offsets_);
    mask.entries = of(entries_);
    mask.bits_at = of(bits_at_);
    mask.bits = of(bits_);
    mask.order = of(order_);
    return mask;
  }

 private:
  struct Tile {
    int64_t row;
    uint32_t entry;
    std::vector<uint32_t> words;
  };

  template <typename Stored>
  static Tile TileOf(int64_t row, int64_t column, const Stored& stored) {
    Tile tile{row, static_cast<uint32_t>(column), {}};
    for (int cell = 0; cell < 4; ++cell) {
      const int64_t top = row * kMaskTile + cell / 2 * kMaskCell;
      const int64_t left = column * kMaskTile + cell % 2 * kMaskCell;
      std::vector<uint32_t> words(kMaskCellWords);
      int64_t count = 0;
      for (int word = 0; word < kMaskCellWords; ++word) {
        const int w = word / 32, l = word % 32;
        for (int i = 0; i < 32; ++i) {
          const int64_t r = 16 * w + l / 4 + 8 * (i / 2 % 2);
          const int64_t c = 8 * (i / 4) + 2 * (l % 4) + i % 2;
          if (!stored(top + r, left + c)) continue;
          words[word] |= 1u << i;
          ++count;
        }
      }
      const MaskCell state = count == 0                       ? MaskCell::kEmpty
                             : count == kMaskCell * kMaskCell ? MaskCell::kFull
                                                              : MaskCell::kPartial;
      tile.entry |= static_cast<uint32_t>(state) << (kMaskStatesAt + 2 * cell);
      if (state != MaskCell::kPartial) continue;
      tile.words.insert(tile.words.end(), words.begin(), words.end());
    }
    return tile;
  }

  // Behind a mask's entries and words there are others, which nothing must read.
  void Append(const std::vector<Tile>& tiles) {
    std::vector<int32_t> counts(static_cast<size_t>(rows_));
    const size_t first_entry = entries_.size(), first_word = bits_.size();
    for (const Tile& tile : tiles) {
      ++counts[tile.row];
      entries_.push_back(tile.entry);
      bits_at_.push_back(static_cast<int32_t>((bits_.size() - first_word) / kMaskCellWords));
      bits_.insert(bits_.end(), tile.words.begin(), tile.words.end());
    }
    entries_.resize(first_entry + capacity_, 0xaa000000u);
    bits_at_.resize(first_entry + capacity_, 0);
    bits_.resize(first_word + cells_ * kMaskCellWords, 0xffffffffu);
    int32_t offset = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      offsets_.push_back(offset);
      offset += counts[row];
    }
    offsets_.push_back(offset);
    std::vector<int32_t> order(static_cast<size_t>(rows_));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return counts[a] > counts[b]; });
    order_.insert(order_.end(), order.begin(), order.end());
  }

  int64_t masks_, rows_, columns_;
  size_t capacity_ = 0, cells_ = 0;
  std::vector<int32_t> offsets_, bits_at_, order_;
  std::vector<uint32_t> entries_, bits_;
};

}  // namespace jaxsparse
