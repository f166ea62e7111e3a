#include "dynamic/graphs.h"

#include <algorithm>
#include <limits>

namespace jaxsparse {
namespace {

// So that a bit for each tile and kind takes little memory.
constexpr int32_t kMostKinds = 256;
constexpr int32_t kUnknown = -1, kOnPath = -2;

std::string At(int64_t graph, int64_t row) {
  return "graph " + std::to_string(graph) + ", row " + std::to_string(row) + ": ";
}

// One graph: its rows, and the levels that are being found.
struct Finder {
  int64_t rows, slots;
  const int32_t* children;
  int32_t* levels;

  // The level of a row whose children have one; kUnknown if one of them has none yet, which is then
  // *open.
  int32_t LevelOf(int64_t row, int64_t* open) const {
    int32_t level = 0;
    for (int64_t k = 0; k < slots; ++k) {
      const int32_t child = children[row * slots + k];
      if (child < 0) continue;
      if (levels[child] < 0) {
        *open = child;
        return kUnknown;
      }
      level = std::max(level, levels[child] + 1);
    }
    return level;
  }

  // Depth first, with a path of its own instead of recursion: graphs may be deep. False, and *open
  // a row of it, where there is a cycle.
  bool FindFrom(int64_t start, std::vector<int64_t>* path, int64_t* open) const {
    path->assign(1, start);
    while (!path->empty()) {
      const int64_t row = path->back();
      levels[row] = kOnPath;
      const int32_t level = LevelOf(row, open);
      if (level != kUnknown) {
        levels[row] = level;
        path->pop_back();
      } else if (levels[*open] == kOnPath) {
        return false;
      } else {
        path->push_back(*open);
      }
    }
    return true;
  }
};

// Rows by falling keys, which are in [0, most], and rows of one key in their order.
void SortFalling(const std::vector<int32_t>& keys, int32_t most, std::vector<int32_t>* next,
                 int32_t* rows) {
  next->assign(int64_t{most} + 2, 0);  // of each key from most on: where its next row goes
  for (const int32_t key : keys) ++(*next)[most - key + 1];
  for (int32_t i = 0; i < most; ++i) (*next)[i + 1] += (*next)[i];
  for (size_t row = 0; row < keys.size(); ++row) {
    rows[(*next)[most - keys[row]]++] = static_cast<int32_t>(row);
  }
}

// Finds the tails of one graph after another.
class TailFinder {
 public:
  explicit TailFinder(int64_t slots) : slots_(slots) {}

  // Of the rows of a graph, of which the highest level is `depth`; and their order.
  void Find(const int32_t* children, const int32_t* levels, int64_t rows, int32_t depth,
            int32_t* tails, int32_t* order) {
    keys_.assign(levels, levels + rows);
    SortFalling(keys_, depth, &next_, order);  // every row before its children
    std::fill_n(tails, rows, 0);
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t row = order[i];
      for (int64_t k = 0; k < slots_; ++k) {
        const int32_t child = children[row * slots_ + k];
        if (child >= 0) tails[child] = std::max(tails[child], tails[row] + 1);
      }
    }
    // The tail of a row that is no leaf is less than the depth.
    for (int64_t row = 0; row < rows; ++row) keys_[row] = levels[row] == 0 ? depth : tails[row];
    SortFalling(keys_, depth, &next_, order);
  }

 private:
  const int64_t slots_;
  std::vector<int32_t> keys_, next_;
};

// What is wrong with a row, or "".
std::string Fault(const GraphArrays& graphs, int64_t graph, int64_t row) {
  const int64_t rows = graphs.Rows(graph), at = graphs.offsets[graph] + row;
  bool is_leaf = true;
  for (int64_t k = 0; k < graphs.slots; ++k) {
    const int32_t child = graphs.children[at * graphs.slots + k];
    if (child < -1 || child >= rows) {
      return At(graph, row) + "child " + std::to_string(child) +
             " is out of range, the graph has " + std::to_string(rows) + " rows";
    }
    is_leaf = is_leaf && child < 0;
  }
  if (graphs.kinds[at] < 0 || graphs.kinds[at] >= kMostKinds) {
    return At(graph, row) + "the kind must be in [0, " + std::to_string(kMostKinds) + "), got " +
           std::to_string(graphs.kinds[at]);
  }
  if (is_leaf && graphs.has_input[at]) {
    return At(graph, row) + "a row without children is a leaf, and has no inputs";
  }
  return "";
}

}  // namespace

std::optional<GraphLevels> FindLevels(const GraphArrays& graphs, int64_t rows, std::string* error) {
  GraphLevels found;
  found.levels.assign(rows, kUnknown);
  found.tails.resize(rows);
  found.order.resize(rows);
  found.tail_counts.assign(rows, 0);
  found.depths.assign(graphs.graphs, 0);
  found.computed.assign(graphs.graphs, 0);
  if (graphs.offsets[0] != 0 || graphs.offsets[graphs.graphs] != rows) {
    *error = "offsets must rise from 0 to the number of rows, " + std::to_string(rows);
    return std::nullopt;
  }
  std::vector<int64_t> path;
  TailFinder tails(graphs.slots);
  for (int64_t g = 0; g < graphs.graphs; ++g) {
    const int64_t begin = graphs.offsets[g], size = graphs.Rows(g), root = graphs.roots[g];
    if (size < 0 || size > std::numeric_limits<int32_t>::max() || graphs.offsets[g + 1] > rows) {
      *error = "offsets must rise: graph " + std::to_string(g) + " has " + std::to_string(size) +
               " rows";
      return std::nullopt;
    }
    if (root < -1 || root >= size) {
      *error = "graph " + std::to_string(g) + ": root " + std::to_string(root) +
               " is out of range, the graph has " + std::to_string(size) + " rows";
      return std::nullopt;
    }
    for (int64_t row = 0; row < size; ++row) {
      *error = Fault(graphs, g, row);
      if (!error->empty()) return std::nullopt;
    }
    const Finder finder = {size, graphs.slots, graphs.children + begin * graphs.slots,
                           found.levels.data() + begin};
    for (int64_t row = 0; row < size; ++row) {
      int64_t open = row;
      if (finder.levels[row] == kUnknown && !finder.FindFrom(row, &path, &open)) {
        *error = At(g, open) + "the row is its own descendant, the graph has a cycle";
        return std::nullopt;
      }
      const int32_t level = finder.levels[row];
      if (level == 0) continue;
      ++found.computed[g];
      found.depths[g] = std::max(found.depths[g], level);
      found.kinds = std::max(found.kinds, graphs.kinds[begin + row] + 1);
      found.any_input = found.any_input || graphs.has_input[begin + row];
    }
    tails.Find(finder.children, finder.levels, size, found.depths[g], found.tails.data() + begin,
               found.order.data() + begin);
    for (int64_t row = begin; row < begin + size; ++row) {
      if (found.levels[row] > 0)
        ++found.tail_counts[begin + found.depths[g] - 1 - found.tails[row]];
    }
  }
  return found;
}

}  // namespace jaxsparse
