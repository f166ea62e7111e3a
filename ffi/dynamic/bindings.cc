#include "dynamic/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "dynamic/brackets.h"
#include "dynamic/graphs.h"
#include "dynamic/packer.h"
#include "dynamic/script.h"
#include "host/numpy.h"

namespace nb = nanobind;

namespace jaxsparse {
namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Batches = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// The arrays of a set of graphs, which live as long as this, and their levels.
struct PackableGraphs {
  static constexpr char kName[] = "jaxsparse.PackableGraphs";  // of their capsules

  Vector<int64_t> offsets;
  Matrix children;
  Vector<int32_t> kinds, roots;
  Vector<uint8_t> has_input;
  std::vector<Vector<int32_t>> numbers;  // of channels
  GraphArrays arrays;                    // all of these
  GraphLevels levels;
};

using ChannelArray = std::tuple<int, bool, Vector<int32_t>>;  // (place, is float, numbers)

// (a capsule for pack_graphs, the levels and the tails of rows), or a ValueError that names graph
// and row. A capsule, and not a class of its own: these may live until the interpreter ends.
nb::tuple MakeGraphs(Vector<int64_t> offsets, Matrix children, Vector<int32_t> kinds,
                     Vector<int32_t> roots, Vector<uint8_t> has_input,
                     const std::vector<ChannelArray>& channels) {
  const size_t rows = children.shape(0);
  if (offsets.size() < 1 || roots.size() != offsets.size() - 1 || kinds.size() != rows ||
      has_input.size() != rows) {
    throw nb::value_error("the arrays of graphs differ in size");
  }
  auto graphs = std::make_unique<PackableGraphs>(
      PackableGraphs{offsets, children, kinds, roots, has_input, {}, {}, {}});
  GraphArrays& arrays = graphs->arrays;
  arrays.graphs = static_cast<int64_t>(roots.size());
  arrays.slots = static_cast<int64_t>(children.shape(1));
  arrays.offsets = offsets.data();
  arrays.children = children.data();
  arrays.kinds = kinds.data();
  arrays.roots = roots.data();
  arrays.has_input = has_input.data();
  for (const auto& [place, is_float, numbers] : channels) {
    const auto of = static_cast<ChannelPlace>(place);
    if (of < ChannelPlace::kLeaf || of > ChannelPlace::kGraph ||
        numbers.size() != (of == ChannelPlace::kGraph ? roots.size() : rows)) {
      throw nb::value_error("a channel has not as many numbers as its place");
    }
    arrays.channels.push_back({of, is_float, numbers.data()});
    graphs->numbers.push_back(numbers);
  }
  std::string error;
  std::optional<GraphLevels> levels;
  {
    const nb::gil_scoped_release released;
    levels = FindLevels(arrays, static_cast<int64_t>(rows), &error);
  }
  if (!levels) throw nb::value_error(error.c_str());
  graphs->levels = *std::move(levels);
  nb::object row_levels = ToNumpy(graphs->levels.levels);
  nb::object row_tails = ToNumpy(graphs->levels.tails);
  nb::capsule capsule(graphs.release(), PackableGraphs::kName,
                      [](void* p) noexcept { delete static_cast<PackableGraphs*>(p); });
  return nb::make_tuple(capsule, row_levels, row_tails);
}

// The numbers that tell forms of one set of graphs and one layout apart.
using Room = std::tuple<int64_t, int64_t, int64_t, int64_t>;  // leaves, tiles, graphs, inputs

struct AlignedDelete {
  void operator()(int32_t* words) const { ::operator delete[](words, kAlignment); }
  static constexpr std::align_val_t kAlignment{64};  // with which XLA takes memory as it is
};
using Words = std::unique_ptr<int32_t[], AlignedDelete>;

Words AllocateWords(int64_t count) {
  return Words(
      static_cast<int32_t*>(::operator new[](count * sizeof(int32_t), AlignedDelete::kAlignment)));
}

// Calls f(i) for batches 0 to count - 1, by several threads if they have rows enough.
template <typename F>
void ForEachBatch(size_t count, int64_t rows, const F& f) {
  constexpr int64_t kRowsOfThread = 4096;  // which take as long as some ten starts of a thread
  constexpr int64_t kMostThreads = 8;
  const int64_t cores = std::max<int64_t>(1, std::thread::hardware_concurrency());
  const auto threads = static_cast<size_t>(
      std::min({cores, kMostThreads, static_cast<int64_t>(count), 1 + rows / kRowsOfThread}));
  std::atomic<size_t> next = 0;
  std::vector<std::exception_ptr> failures(threads);  // of memory that there is none of
  const auto work = [&](size_t thread) {
    try {
      for (size_t i = next++; i < count; i = next++) f(i);
    } catch (...) {
      failures[thread] = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> others;
    for (size_t i = 1; i < threads; ++i) others.emplace_back(work, i);
    work(0);
  }
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

// Packs batches, all of one size, in one form: the given one, or one with room for each of them.
// False, and an error, where one does not fit.
bool PackAll(const PackableGraphs& graphs, const Batches& batches, int64_t width, int64_t slots,
             int64_t groups, int64_t kinds, bool form_is_given, ScriptForm* form, Words* words,
             std::string* error) {
  const auto size = static_cast<int64_t>(batches.shape(1));
  const size_t count = batches.shape(0);
  std::vector<Packer> packers(count, Packer(graphs.arrays, graphs.levels, width, slots, groups));
  int64_t rows = 0;
  for (size_t i = 0; i < batches.size(); ++i) rows += graphs.arrays.Rows(batches.data()[i]);
  std::vector<ScriptForm> used(count);
  ForEachBatch(count, rows,
               [&](size_t i) { used[i] = packers[i].Plan(batches.data() + i * size, size); });
  for (size_t i = 0; i < count; ++i) {
    if (form_is_given) {
      const std::string missing = Missing(used[i], *form);
      if (missing.empty()) continue;
      *error = (count > 1 ? "batch " + std::to_string(i) : "the batch") + " has " + missing;
      return false;
    }
    const ScriptForm rounded = RoundedUp(used[i], graphs.levels.any_input);
    *form = i == 0 ? rounded : Covering(*form, rounded);
    form->kinds = kinds;
  }
  // Rows first: words are counted in 64 bits, of which so many tiles would take more.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (form->Rows() > kMost || WordsOf(*form, graphs.arrays.channels) > kMost) {
    *error = "a script would have more than 2**31 - 1 words or rows";
    return false;
  }
  const int64_t script_words = WordsOf(*form, graphs.arrays.channels);
  *words = AllocateWords(script_words * static_cast<int64_t>(count));
  ForEachBatch(count, rows,
               [&](size_t i) { packers[i].Write(*form, words->get() + i * script_words); });
  return true;
}

// ((leaves, tiles, graphs, inputs) of the form, int32 (batches, words)), or a ValueError.
nb::tuple PackGraphs(nb::capsule capsule, Batches batches, int64_t width, int64_t slots,
                     int64_t groups, int64_t kinds, const std::optional<Room>& room) {
  const auto& graphs = *static_cast<const PackableGraphs*>(capsule.data(PackableGraphs::kName));
  constexpr int64_t kMost = 1 << 20;  // so that no product of sizes overflows
  if (std::min({width, slots, groups, kinds}) < 1 || std::max({width, slots, groups}) > kMost ||
      slots < graphs.arrays.slots || kinds < graphs.levels.kinds || batches.shape(0) < 1) {
    throw nb::value_error("the sizes of a layout are out of range");
  }
  const size_t count = batches.size();
  const auto outside = std::find_if(batches.data(), batches.data() + count, [&](int64_t id) {
    return id < 0 || id >= graphs.arrays.graphs;
  });
  if (outside != batches.data() + count) {
    throw nb::value_error(("graph " + std::to_string(*outside) + " is out of range, there are " +
                           std::to_string(graphs.arrays.graphs))
                              .c_str());
  }
  ScriptForm form;
  if (room) {
    std::tie(form.leaves, form.tiles, form.graphs, form.inputs) = *room;
    const auto [least, most] = std::minmax({form.leaves, form.tiles, form.graphs, form.inputs});
    if (least < 0 || most > std::numeric_limits<int32_t>::max()) {
      throw nb::value_error("the sizes of a form are out of range");
    }
    form.width = width;
    form.slots = slots;
    form.groups = groups;
    form.kinds = kinds;
  }
  Words words;
  std::string error;
  bool fits = false;
  {
    const nb::gil_scoped_release released;
    fits = PackAll(graphs, batches, width, slots, groups, kinds, room.has_value(), &form, &words,
                   &error);
  }
  if (!fits) throw nb::value_error(error.c_str());
  const auto script_words = static_cast<size_t>(WordsOf(form, graphs.arrays.channels));
  int32_t* data = words.get();
  nb::capsule owner(words.release(),
                    [](void* p) noexcept { AlignedDelete()(static_cast<int32_t*>(p)); });
  return nb::make_tuple(
      nb::make_tuple(form.leaves, form.tiles, form.graphs, form.inputs),
      nb::ndarray<nb::numpy, int32_t, nb::ndim<2>>(data, {batches.shape(0), script_words}, owner));
}

// (offsets, children, labels, words, new words), or a ValueError that names tree and line.
nb::tuple ParseText(std::string_view text, int64_t slots,
                    const std::vector<std::string>& vocabulary, bool closed) {
  if (slots < 1) throw nb::value_error("slots must be >= 1");
  std::string error;
  std::optional<BracketTrees> trees;
  {
    const nb::gil_scoped_release released;
    trees = ParseBrackets(text, slots, vocabulary, closed, &error);
  }
  if (!trees) throw nb::value_error(error.c_str());
  return nb::make_tuple(ToNumpy(std::move(trees->offsets)), ToNumpy(std::move(trees->children)),
                        ToNumpy(std::move(trees->labels)), ToNumpy(std::move(trees->words)),
                        std::move(trees->new_words));
}

}  // namespace

void BindDynamic(nb::module_& m) {
  m.def("make_graphs", MakeGraphs, nb::arg("offsets"), nb::arg("children"), nb::arg("kinds"),
        nb::arg("roots"), nb::arg("has_input"), nb::arg("channels"));
  m.def("pack_graphs", PackGraphs, nb::arg("graphs"), nb::arg("batches"), nb::kw_only(),
        nb::arg("width"), nb::arg("slots"), nb::arg("groups"), nb::arg("kinds"),
        nb::arg("room").none());
  m.def("parse_brackets", ParseText, nb::arg("text"), nb::kw_only(), nb::arg("slots"),
        nb::arg("vocabulary"), nb::arg("closed"));
}

}  // namespace jaxsparse
