// Makes scripts of graphs: rows by group, level and kind, each cut into tiles. The same words as
// jaxsparse/dynamic/packing.py makes with NumPy.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dynamic/graphs.h"
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
      : graphs_(graphs), levels_(levels), width_(width), slots_(slots), groups_(groups) {}

  // What a batch of graphs uses; ids are in range. The batch that Write is for.
  ScriptForm Plan(const int64_t* ids, int64_t count);

  // The planned batch in a form that has room for it: WordsOf(form) words.
  void Write(const ScriptForm& form, int32_t* words);

 private:
  // Where a row of the batch lies.
  struct Place {
    int32_t row;
    int32_t tile;  // -1 of leaves
    int32_t lane;
  };

  void DealToGroups();
  void CountRows();
  void PlaceTiles();
  void WriteHeader(const ScriptForm& form, int32_t* words) const;
  void WriteGroups(const ScriptForm& form, int32_t* words) const;
  void WriteGraph(const ScriptForm& form, int64_t b, int32_t* words);
  void PlaceRows(const ScriptForm& form, int64_t b);
  void WriteSources(const ScriptForm& form, int64_t b, int32_t* records);
  void WriteChannels(const ScriptForm& form, int64_t b, int32_t* words) const;

  const GraphArrays& graphs_;
  const GraphLevels& levels_;
  const int64_t width_, slots_, groups_;

  const int64_t* ids_ = nullptr;
  ScriptForm used_;
  std::vector<int64_t> order_, load_;  // of dealing graphs to groups
  std::vector<int32_t> group_;         // of each graph of the batch
  std::vector<int64_t> first_list_;    // of each group, and of one more
  std::vector<int64_t> counts_;        // of each list: its rows
  std::vector<Place> next_;            // of each list: its next row, counted from the leaves on
  std::vector<int64_t> group_tiles_;   // groups + 1
  std::vector<Place> places_;          // of the rows of one graph
  int32_t leaves_placed_ = 0, inputs_placed_ = 0, first_input_ = 0;
};

}  // namespace jaxsparse
