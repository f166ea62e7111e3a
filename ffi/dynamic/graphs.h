// A set of graphs, as Python has it in arrays, and what is found out about it once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace jaxsparse {

// What has a number each in a channel (the places in jaxsparse/dynamic/form.py).
enum class ChannelPlace : int { kLeaf, kRow, kInput, kGraph };

// One number, an integer or a float32, for each row of the set; for each graph where that is the
// place.
struct GraphChannel {
  ChannelPlace place = ChannelPlace::kRow;
  bool is_float = false;
  const int32_t* data = nullptr;
};

// Graph g has rows offsets[g] to offsets[g + 1] - 1, in any order; children and roots count from
// its first row, -1 is none. Rows without children are leaves.
struct GraphArrays {
  int64_t graphs = 0;
  int64_t slots = 0;                   // children that a row can have
  const int64_t* offsets = nullptr;    // (graphs + 1)
  const int32_t* children = nullptr;   // (rows, slots)
  const int32_t* kinds = nullptr;      // (rows), of those that are no leaves
  const int32_t* roots = nullptr;      // (graphs)
  const uint8_t* has_input = nullptr;  // (rows), 0 or 1
  std::vector<GraphChannel> channels;

  int64_t Rows(int64_t graph) const { return offsets[graph + 1] - offsets[graph]; }
};

// How many rows come before each row, one after another, and how many behind it.
struct GraphLevels {
  std::vector<int32_t> levels;  // of each row: 0 of leaves, else 1 more than the highest child's
  std::vector<int32_t> tails;  // of each row: 0 without parents, else 1 more than the longest one's
  std::vector<int32_t> order;  // of each graph: its leaves, then its other rows by falling tail
  // How many of these have each tail, from the longest on: as many numbers as the graph is deep,
  // from where its rows begin.
  std::vector<int32_t> tail_counts;
  std::vector<int32_t> depths;    // of each graph: its highest level
  std::vector<int32_t> computed;  // of each graph: its rows that are no leaves
  int32_t kinds = 1;              // kinds that there are
  bool any_input = false;
};

// Checks the arrays, all of which have the sizes that they should, in linear time; or none and an
// error that names graph and row: of a child or root out of range, a cycle, a kind that there can't
// be, or a leaf that has inputs.
std::optional<GraphLevels> FindLevels(const GraphArrays& graphs, int64_t rows, std::string* error);

}  // namespace jaxsparse
