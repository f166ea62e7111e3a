#include "dynamic/schedule.h"

#include <algorithm>
#include <bit>

namespace jaxsparse {
namespace {

// How many tiles a row should be behind its children, so that they have come when its tile begins:
// 2, or 3 if the group has 3 times as many tiles as levels.
constexpr int64_t kLeastDistance = 2, kMostDistance = 3;

constexpr uint64_t kAll = ~uint64_t{0};

}  // namespace

void ListScheduler::Begin(int64_t computed, std::vector<Place>* places) {
  places_ = places;
  rows_.resize(computed);
  children_.resize(computed * graphs_.slots);
  if (levels_.kinds > 1) kinds_.resize(computed);
  tile_kinds_.clear();
  end_row_ = 0;
}

void ListScheduler::AddGroup(const GraphOfBatch* begin, const GraphOfBatch* end) {
  Sort(begin, end);
  if (first_row_ == end_row_) return;
  const int64_t least = LeastTiles(), levels = static_cast<int64_t>(ends_.size());
  const int64_t distance = std::clamp(least / levels, kLeastDistance, kMostDistance);
  const int64_t tiles = PlaceRows(distance, least);
  if (tiles > least) {
    kept_.clear();
    for (int64_t i = first_row_; i < end_row_; ++i) kept_.push_back((*places_)[rows_[i]]);
    kept_kinds_ = own_kinds_;
    if (PlaceRows(1, least) >= tiles) {
      for (int64_t i = first_row_; i < end_row_; ++i) (*places_)[rows_[i]] = kept_[i - first_row_];
      own_kinds_.swap(kept_kinds_);
    }
  }
  tile_kinds_.insert(tile_kinds_.end(), own_kinds_.begin(), own_kinds_.end());
}

// Rows by falling tail, those of one tail in the order of the batch.
void ListScheduler::Sort(const GraphOfBatch* begin, const GraphOfBatch* end) {
  int64_t tails = 0;
  for (const GraphOfBatch* of = begin; of < end; ++of) {
    tails = std::max<int64_t>(tails, levels_.depths[of->graph]);
  }
  ends_.assign(tails, 0);
  for (const GraphOfBatch* of = begin; of < end; ++of) {
    const int64_t depth = levels_.depths[of->graph];
    const int32_t* counts = levels_.tail_counts.data() + graphs_.offsets[of->graph];
    int64_t* rows = ends_.data() + tails - depth;
    for (int64_t i = 0; i < depth; ++i) rows[i] += counts[i];
  }
  first_row_ = end_row_;
  for (int64_t& rows : ends_) {  // from here on where the next row of the tail goes
    const int64_t count = rows;
    rows = end_row_;
    end_row_ += count;
  }
  const auto none = static_cast<int32_t>(places_->size() - 1);
  const int64_t slots = graphs_.slots;
  int32_t *rows = rows_.data(), *children = children_.data();
  for (const GraphOfBatch* of = begin; of < end; ++of) {
    const int64_t at = graphs_.offsets[of->graph], depth = levels_.depths[of->graph];
    const int32_t* counts = levels_.tail_counts.data() + at;
    const int32_t* order =
        levels_.order.data() + graphs_.offsets[of->graph + 1] - levels_.computed[of->graph];
    for (int64_t tail = 0; tail < depth; ++tail, order += counts[tail - 1]) {
      int64_t& next = ends_[tails - depth + tail];
      for (int32_t i = 0; i < counts[tail]; ++i) {
        const int32_t* of_row = graphs_.children + (at + order[i]) * slots;
        rows[next + i] = of->first + order[i];
        for (int64_t k = 0; k < slots; ++k) {
          children[(next + i) * slots + k] = of_row[k] < 0 ? none : of->first + of_row[k];
        }
        if (levels_.kinds > 1) kinds_[next + i] = graphs_.kinds[at + order[i]];
      }
      next += counts[tail];
    }
  }
}

// No schedule has fewer tiles: behind the last row of a tail come as many tiles as the tail is
// long, and up to it those of all rows whose tails are not shorter.
int64_t ListScheduler::LeastTiles() {
  int64_t least = 0, tiles = 0, i = first_row_;
  auto tail = static_cast<int64_t>(ends_.size());
  lanes_.assign(levels_.kinds, 0);
  for (const int64_t end : ends_) {
    if (levels_.kinds == 1) {
      tiles = (end - first_row_ + width_ - 1) / width_;
    } else {
      for (; i < end; ++i) {
        int32_t& lane = lanes_[kinds_[i]];
        tiles += lane == 0;
        lane = lane + 1 == width_ ? 0 : lane + 1;
      }
    }
    least = std::max(least, tiles + --tail);
  }
  return least;
}

// Room for 64 tiles more.
void ListScheduler::AddTiles() {
  open_.resize(open_.size() + words_, 0);
  open_.back() = kAll;
  own_kinds_.resize(own_kinds_.size() + 64, 0);
  lanes_used_.resize(own_kinds_.size(), 0);
}

// The first tile from this one on that is empty, or has room and rows of the kind.
inline int64_t ListScheduler::FindRoom(int64_t tile, int32_t kind) {
  int64_t& full = full_words_[kind];
  int64_t word = tile / 64;
  uint64_t wanted = kAll << tile % 64;
  if (word < full) {
    word = full;
    wanted = kAll;
  }
  for (const uint64_t* open = &open_[word * words_];; open += words_, ++word) {
    const uint64_t room = open[kind] | open[words_ - 1];
    if ((room & wanted) != 0) return word * 64 + std::countr_zero(room & wanted);
    full += room == 0 && word == full;
    wanted = kAll;
  }
}

inline int32_t ListScheduler::TakeLane(int64_t tile, int32_t kind) {
  uint64_t* open = &open_[tile / 64 * words_];
  const uint64_t bit = uint64_t{1} << tile % 64;
  const int32_t lane = lanes_used_[tile]++;
  if (lane == 0) {
    own_kinds_[tile] = kind;
    open[words_ - 1] &= ~bit;
    open[kind] |= bit;
  }
  if (lane + 1 == width_) open[kind] &= ~bit;
  return lane;
}

// Each row in the first tile with room that is `distance` tiles behind its children; but less, down
// to 1, if only so as many tiles as its tail is long are left of the least number. Returns how many
// tiles there are.
int64_t ListScheduler::PlaceRows(int64_t distance, int64_t least) {
  Place* const places = places_->data();
  const int32_t *children = children_.data() + first_row_ * graphs_.slots, *rows = rows_.data();
  const int64_t slots = graphs_.slots, first_tile = tiles();
  const bool one_kind = levels_.kinds == 1;
  open_.clear();
  lanes_used_.clear();
  own_kinds_.clear();
  words_ = one_kind ? 1 : levels_.kinds + 1;
  full_words_.assign(levels_.kinds, 0);
  int64_t used = 0, behind = 0, room = 0, last = least - static_cast<int64_t>(ends_.size());
  int64_t i = first_row_;
  for (const int64_t end : ends_) {
    for (; i < end; ++i, children += slots) {
      int64_t child = places[children[0]].tile;
      for (int64_t k = 1; k < slots; ++k) {
        child = std::max<int64_t>(child, places[children[k]].tile);
      }
      child -= first_tile;
      const int64_t wanted = std::max(child + 1, std::min(child + distance, last));
      for (; room <= behind + distance; room += 64) AddTiles();
      const int32_t kind = one_kind ? 0 : kinds_[i];
      const int64_t tile = FindRoom(child < 0 ? 0 : wanted, kind);
      const int32_t lane = TakeLane(tile, kind);
      used += lane == 0;
      behind = std::max(behind, tile + 1);
      places[rows[i]] = {RowOf(first_tile + tile, lane), static_cast<int32_t>(first_tile + tile)};
    }
    ++last;
  }
  own_kinds_.resize(behind);
  if (used < behind) CloseGaps(behind);
  return used;
}

// Empty tiles, of which there are few if any, are left out.
void ListScheduler::CloseGaps(int64_t tiles) {
  int32_t used = 0;
  for (int64_t t = 0; t < tiles; ++t) {
    if (lanes_used_[t] == 0) continue;
    own_kinds_[used] = own_kinds_[t];
    lanes_used_[t] = used++;  // from here on the tile's number
  }
  own_kinds_.resize(used);
  const auto first_tile = static_cast<int32_t>(this->tiles());
  for (int64_t i = first_row_; i < end_row_; ++i) {
    Place& place = (*places_)[rows_[i]];
    const int32_t tile = first_tile + lanes_used_[place.tile - first_tile];
    place = {RowOf(tile, int64_t{place.row} - RowOf(place.tile, 0)), tile};
  }
}

}  // namespace jaxsparse
