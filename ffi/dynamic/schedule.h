// Puts the rows of a group into tiles: list scheduling of tasks that all take one unit of time, on
// as many machines as a tile has rows.
//
// Rows come by falling tail, which is the number of rows that follow one after another (T. C. Hu,
// Parallel sequencing and assembly line problems, 1961), and each goes to the first tile that has
// room behind its children. Of trees of one kind no other order makes fewer tiles.
#pragma once

#include <cstdint>
#include <vector>

#include "dynamic/graphs.h"

namespace jaxsparse {

// Where a row of a batch lies: leaves in their order, other rows in that of their tiles.
struct Place {
  int32_t row;   // among leaves, or among the lanes of all tiles
  int32_t tile;  // -1 of leaves
};

// A graph of the batch, whose rows begin at `first` among those of the batch.
struct GraphOfBatch {
  int64_t graph;
  int32_t first;
};

// Schedules the groups of a batch one after the other.
class ListScheduler {
 public:
  ListScheduler(const GraphArrays& graphs, const GraphLevels& levels, int64_t width)
      : graphs_(graphs), levels_(levels), width_(width) {}

  // A batch, of so many rows that are no leaves. `places` has one for each row and one more, which
  // is that of a child that there is none of; those of leaves are set.
  void Begin(int64_t computed, std::vector<Place>* places);

  // Sets the places of the rows of a group, whose tiles lie behind those of the groups before it.
  void AddGroup(const GraphOfBatch* begin, const GraphOfBatch* end);

  int64_t tiles() const { return static_cast<int64_t>(tile_kinds_.size()); }
  const std::vector<int32_t>& tile_kinds() const { return tile_kinds_; }
  // All rows that are no leaves, as rows of the batch, and their children: slots each, and where
  // there is none the row behind all.
  const std::vector<int32_t>& rows() const { return rows_; }
  const std::vector<int32_t>& children() const { return children_; }

 private:
  void Sort(const GraphOfBatch* begin, const GraphOfBatch* end);
  int64_t LeastTiles();
  int64_t PlaceRows(int64_t distance, int64_t least);
  void AddTiles();
  int64_t FindRoom(int64_t tile, int32_t kind);
  int32_t TakeLane(int64_t tile, int32_t kind);
  void CloseGaps(int64_t tiles);
  // Among all lanes; if they are more than there are numbers, the script is refused later.
  int32_t RowOf(int64_t tile, int64_t lane) const {
    return static_cast<int32_t>(tile * width_ + lane);
  }

  const GraphArrays& graphs_;
  const GraphLevels& levels_;
  const int64_t width_;

  std::vector<Place>* places_ = nullptr;
  std::vector<int32_t> rows_, children_;
  std::vector<int32_t> kinds_;       // of rows_, where there are several
  std::vector<int32_t> tile_kinds_;  // of the groups that are done

  // The group's rows, among rows_, and where those of each tail end, from the longest on.
  int64_t first_row_ = 0, end_row_ = 0;
  std::vector<int64_t> ends_;
  std::vector<int32_t> lanes_;  // of each kind: lanes that its last tile has used
  // The group's tiles, counted from its first one. For 64 of them there is a word for each kind,
  // which says what has rows of the kind and room, and one which says what is empty; of one kind
  // these are one word.
  std::vector<uint64_t> open_;
  int64_t words_ = 0;
  std::vector<int64_t> full_words_;  // of each kind: the first words, in which it has no room
  std::vector<int32_t> lanes_used_, own_kinds_;
  std::vector<Place> kept_;  // of another schedule
  std::vector<int32_t> kept_kinds_;
};

}  // namespace jaxsparse
