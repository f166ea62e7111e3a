// Makes scripts of graphs, which are dealt to groups, whose rows are put into tiles (schedule.h).
// The same words as jaxsparse/dynamic/packing.py makes with NumPy.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dynamic/graphs.h"
#include "dynamic/schedule.h"
#include "dynamic/script.h"

namespace jaxsparse {

// The least of 1, 1.25, 1.5 and 1.75 times a power of 2 that has room for a size.
int64_t Bucket(int64_t size, int64_t least);

// The form of what is used, with every size rounded up; no room for inputs if no graph has any.
ScriptForm RoundedUp(ScriptForm used, bool any_input);

// The room that both forms need.
ScriptForm Covering(const ScriptForm& a, const ScriptForm& b);

// What of `used` the form has no room for, or "".
std::string Missing(const ScriptForm& used, const ScriptForm& form);

int64_t WordsOf(const ScriptForm& form, const std::vector<GraphChannel>& channels);

// Packs a batch, or one after the other in memory that it keeps.
class Packer {
 public:
  Packer(const GraphArrays& graphs, const GraphLevels& levels, int64_t width, int64_t slots,
         int64_t groups)
      : graphs_(graphs),
        levels_(levels),
        width_(width),
        slots_(slots),
        groups_(groups),
        scheduler_(graphs, levels, width) {}

  // What a batch of graphs uses; ids are in range. The batch that Write is for.
  ScriptForm Plan(const int64_t* ids, int64_t count);

  // The planned batch in a form that has room for it: WordsOf(form) words.
  void Write(const ScriptForm& form, int32_t* words);

 private:
  void DealToGroups();
  void PlaceLeaves();
  void WriteHeader(const ScriptForm& form, int32_t* words) const;
  void WriteTiles(const ScriptForm& form, int32_t* records);
  void WriteInputs(const ScriptForm& form, int32_t* records) const;
  void WriteRoots(const ScriptForm& form, int32_t* roots) const;
  void WriteChannel(const ScriptForm& form, const GraphChannel& channel, int32_t* entries) const;

  int64_t LeavesOf(int64_t graph) const { return graphs_.Rows(graph) - levels_.computed[graph]; }
  // The number of a row in a form with room for so many leaves.
  static int32_t RowOf(Place place, int32_t leaves) {
    return place.row + (place.tile < 0 ? 0 : leaves);
  }

  const GraphArrays& graphs_;
  const GraphLevels& levels_;
  const int64_t width_, slots_, groups_;
  ListScheduler scheduler_;

  ScriptForm used_;
  std::vector<GraphOfBatch> batch_, by_group_;
  std::vector<uint64_t> order_;       // of dealing graphs to groups
  std::vector<int64_t> loads_;        // of groups: rows
  std::vector<int32_t> group_;        // of each graph of the batch
  std::vector<int64_t> group_ends_;   // of each group, among by_group_
  std::vector<int64_t> group_tiles_;  // groups + 1
  std::vector<Place> places_;         // of all rows of the batch, and of one more
  std::vector<uint32_t> waits_;       // of leaves, and of each tile
};

}  // namespace jaxsparse
