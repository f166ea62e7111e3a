// The packer of graphs and the parser of brackets on random and damaged input, in heap blocks of
// exactly their size: built with AddressSanitizer and UBSanitizer by tests/test_sanitizers.py. What
// scripts say is tested in Python, by tests/test_dynamic_packing.py.
#include "dynamic/packer.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "dynamic/brackets.h"
#include "kernels/operands.h"

namespace jaxsparse {
namespace {

struct TestGraphs {
  GraphArrays arrays;
  int64_t rows = 0;
  std::unique_ptr<int64_t[]> offsets;
  std::unique_ptr<int32_t[]> children, kinds, roots, of_rows, of_graphs;
  std::unique_ptr<uint8_t[]> has_input;

  TestGraphs(Random& random, int64_t graphs, int64_t slots) {
    offsets = Block<int64_t>(graphs + 1);
    roots = Block<int32_t>(graphs);
    of_graphs = Block<int32_t>(graphs);
    offsets[0] = 0;
    for (int64_t g = 0; g < graphs; ++g) {
      const int64_t size = random.Below(12);
      offsets[g + 1] = offsets[g] + size;
      roots[g] = static_cast<int32_t>(random.Below(size + 1) - 1);
      of_graphs[g] = static_cast<int32_t>(g);
    }
    rows = offsets[graphs];
    children = Block<int32_t>(rows * slots);
    kinds = Block<int32_t>(rows);
    of_rows = Block<int32_t>(rows);
    has_input = Block<uint8_t>(rows);
    for (int64_t g = 0; g < graphs; ++g) {
      const int64_t begin = offsets[g], size = offsets[g + 1] - begin;
      std::vector<int32_t> order(size);
      for (int64_t i = 0; i < size; ++i) order[i] = static_cast<int32_t>(i);
      std::shuffle(order.begin(), order.end(), random.engine);
      for (int64_t i = 0; i < size; ++i) {
        const int64_t row = begin + order[i];
        bool is_leaf = true;
        for (int64_t k = 0; k < slots; ++k) {
          const bool none = i == 0 || random.Below(3) == 0;
          children[row * slots + k] = none ? -1 : order[random.Below(i)];
          is_leaf = is_leaf && none;
        }
        kinds[row] = static_cast<int32_t>(random.Below(3));
        of_rows[row] = static_cast<int32_t>(row);
        has_input[row] = !is_leaf && random.Below(2) == 0;
      }
    }
    arrays.graphs = graphs;
    arrays.slots = slots;
    arrays.offsets = offsets.get();
    arrays.children = children.get();
    arrays.kinds = kinds.get();
    arrays.roots = roots.get();
    arrays.has_input = has_input.get();
    arrays.channels = {{ChannelPlace::kLeaf, false, of_rows.get()},
                       {ChannelPlace::kRow, true, of_rows.get()},
                       {ChannelPlace::kInput, false, of_rows.get()},
                       {ChannelPlace::kGraph, false, of_graphs.get()}};
  }

  // Numbers that lead anywhere at all.
  void Spoil(Random& random) {
    const int32_t wild[] = {-2, 1 << 30, -(1 << 30), 5, 0};
    const int64_t slots = arrays.slots;
    const auto any = [&] { return wild[random.Below(5)]; };
    switch (random.Below(4)) {
      case 0:
        if (rows > 0) children[random.Below(rows * slots)] = any();
        break;
      case 1:
        if (rows > 0) kinds[random.Below(rows)] = any();
        break;
      case 2:
        if (arrays.graphs > 0) roots[random.Below(arrays.graphs)] = any();
        break;
      default:
        offsets[random.Below(arrays.graphs + 1)] = any();
    }
  }
};

// Whether sources are leaves, or rows of tiles before their own.
bool IsInOrder(const ScriptForm& form, const int32_t* words) {
  for (int64_t t = 0; t < form.tiles; ++t) {
    const int32_t* sources = words + form.RecordsAt() + t * form.RecordWords() + kRecordSources;
    const bool in_order = std::all_of(
        sources, sources + form.width * form.slots,
        [&](int32_t source) { return source >= -1 && source < form.leaves + t * form.width; });
    if (!in_order) return false;
  }
  return true;
}

// Packs two batches; false where the graphs are refused.
bool Pack(Random& random, const TestGraphs& graphs) {
  std::string error;
  const auto levels = FindLevels(graphs.arrays, graphs.rows, &error);
  if (!levels) return false;
  const int64_t width = 1 + random.Below(9), groups = 1 + random.Below(4);
  Packer packer(graphs.arrays, *levels, width, graphs.arrays.slots + random.Below(2), groups);
  for (int batch = 0; batch < 2; ++batch) {
    const int64_t count = graphs.arrays.graphs == 0 ? 0 : random.Below(7);
    const auto ids = Block<int64_t>(count);
    for (int64_t b = 0; b < count; ++b) ids[b] = random.Below(graphs.arrays.graphs);
    const ScriptForm form = RoundedUp(packer.Plan(ids.get(), count), levels->any_input);
    const auto words = Block<int32_t>(WordsOf(form, graphs.arrays.channels));
    packer.Write(form, words.get());
    if (!IsInOrder(form, words.get())) {
      std::printf("a source is not ready\n");
      std::exit(1);
    }
  }
  return true;
}

// A tree in brackets, with one character of another kind if it is to be damaged.
std::string Text(Random& random, bool damaged) {
  std::string text;
  int64_t open = 0;
  do {
    if (open > 0 && random.Below(3) == 0) {
      text += " w" + std::to_string(random.Below(5)) + ")";
      for (--open; open > 0 && random.Below(2) == 0; --open) text += ")";
    } else {
      text += "(" + std::to_string(random.Below(5)) + " ";
      ++open;
    }
  } while (open > 0 && text.size() < 300);
  if (damaged && !text.empty()) text[random.Below(text.size())] = "()w 1\n"[random.Below(6)];
  return text;
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  Random random{std::mt19937(1)};
  int packed = 0, refused = 0, parsed = 0, not_parsed = 0;
  for (int i = 0; i < 600; ++i) {
    TestGraphs graphs(random, random.Below(6), 1 + random.Below(3));
    if (!Pack(random, graphs)) return 1;
    graphs.Spoil(random);
    ++(Pack(random, graphs) ? packed : refused);
    const std::string text = Text(random, i % 2 == 0);
    std::string error;
    const auto trees = ParseBrackets(text, 1 + random.Below(3), {"w1"}, i % 3 == 0, &error);
    ++(trees ? parsed : not_parsed);
    if (!trees && error.empty()) return 1;
  }
  std::printf("%d graphs were refused, %d were not, %d texts were refused, %d were not\n", refused,
              packed, not_parsed, parsed);
  return std::min({packed, refused, parsed, not_parsed}) > 0 ? 0 : 1;
}
