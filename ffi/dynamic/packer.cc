#include "dynamic/packer.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>

namespace jaxsparse {
namespace {

// Sizes below these are rounded up to them (LEAST in form.py).
constexpr int64_t kLeastLeaves = 8, kLeastInputs = 8;

// Rows are numbered in 32 bits.
constexpr int64_t kMostRows = std::numeric_limits<int32_t>::max();

int64_t Room(const ScriptForm& form, ChannelPlace place) {
  switch (place) {
    case ChannelPlace::kLeaf:
      return form.leaves;
    case ChannelPlace::kRow:
      return form.Rows();
    case ChannelPlace::kInput:
      return form.inputs;
    case ChannelPlace::kGraph:
      return form.graphs;
  }
  return 0;
}

// Asks for a part of an array ahead of its use: graphs of a batch may lie anywhere in the set.
void Prefetch(const int32_t* data, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64 / sizeof(int32_t);
  for (int64_t i = begin; i < end; i += kLine) __builtin_prefetch(data + i);
  if (begin < end) __builtin_prefetch(data + end - 1);
}

}  // namespace

int64_t Bucket(int64_t size, int64_t least) {
  size = std::max(size, least);
  const int64_t step =
      std::max<int64_t>(1, static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(size))) / 4);
  return (size + step - 1) / step * step;
}

ScriptForm RoundedUp(ScriptForm used, bool any_input) {
  used.leaves = Bucket(used.leaves, kLeastLeaves);
  used.tiles = Bucket(used.tiles, 1);
  used.graphs = Bucket(used.graphs, 1);
  used.inputs = any_input ? Bucket(used.inputs, kLeastInputs) : 0;
  return used;
}

ScriptForm Covering(const ScriptForm& a, const ScriptForm& b) {
  ScriptForm both = a;
  both.leaves = std::max(a.leaves, b.leaves);
  both.tiles = std::max(a.tiles, b.tiles);
  both.graphs = std::max(a.graphs, b.graphs);
  both.inputs = std::max(a.inputs, b.inputs);
  return both;
}

std::string Missing(const ScriptForm& used, const ScriptForm& form) {
  const struct {
    const char* name;
    int64_t used, room;
  } sizes[] = {{"leaves", used.leaves, form.leaves},
               {"tiles", used.tiles, form.tiles},
               {"graphs", used.graphs, form.graphs},
               {"inputs", used.inputs, form.inputs}};
  for (const auto& size : sizes) {
    if (size.used > size.room) {
      return std::to_string(size.used) + " " + size.name + ", the form has room for " +
             std::to_string(size.room);
    }
  }
  return "";
}

int64_t WordsOf(const ScriptForm& form, const std::vector<GraphChannel>& channels) {
  int64_t words = form.ChannelsAt();
  for (const GraphChannel& channel : channels) words += PaddedSection(Room(form, channel.place));
  return PaddedScript(words);
}

ScriptForm Packer::Plan(const int64_t* ids, int64_t count) {
  used_ = {};
  used_.graphs = count;
  used_.width = width_;
  used_.slots = slots_;
  used_.groups = groups_;
  used_.kinds = levels_.kinds;
  batch_.resize(count);
  int64_t rows = 0;
  for (int64_t b = 0; b < count; ++b) {
    batch_[b] = {ids[b], static_cast<int32_t>(rows)};
    const int64_t begin = graphs_.offsets[ids[b]], end = graphs_.offsets[ids[b] + 1];
    Prefetch(levels_.order.data(), begin, end);
    Prefetch(levels_.tail_counts.data(), begin, begin + levels_.depths[ids[b]]);
    Prefetch(graphs_.children, begin * graphs_.slots, end * graphs_.slots);
    rows += graphs_.Rows(ids[b]);
    used_.leaves += LeavesOf(ids[b]);
    if (levels_.any_input) {
      const uint8_t* has_input = graphs_.has_input + graphs_.offsets[ids[b]];
      used_.inputs += std::accumulate(has_input, has_input + graphs_.Rows(ids[b]), int64_t{0});
    }
  }
  const int64_t computed = rows - used_.leaves;
  if (rows > kMostRows) {  // no script has so many
    used_.tiles = (computed + width_ - 1) / width_;
    return used_;
  }
  places_.resize(rows + 1);
  PlaceLeaves();
  DealToGroups();
  scheduler_.Begin(computed, &places_);
  group_tiles_.assign(groups_ + 1, 0);
  const GraphOfBatch* graph = by_group_.data();
  for (int64_t g = 0; g < groups_; ++g) {
    const GraphOfBatch* end = by_group_.data() + group_ends_[g];
    scheduler_.AddGroup(graph, end);
    graph = end;
    group_tiles_[g + 1] = scheduler_.tiles();
  }
  used_.tiles = scheduler_.tiles();
  return used_;
}

// Leaves in the order of the batch; and the place of what is not there.
void Packer::PlaceLeaves() {
  int32_t leaves = 0;
  for (const auto [graph, first] : batch_) {
    const int32_t* order = levels_.order.data() + graphs_.offsets[graph];
    const int64_t count = LeavesOf(graph);
    for (int64_t i = 0; i < count; ++i) places_[first + order[i]] = {leaves++, -1};
  }
  places_.back() = {-1, -1};
}

// The longest graph first, each to the group with the fewest rows. Graphs of a group are in the
// order of the batch.
void Packer::DealToGroups() {
  const int64_t count = used_.graphs;
  group_.assign(count, 0);
  group_ends_.assign(groups_, 0);
  if (groups_ > 1) {
    // Graphs with many rows have small numbers.
    constexpr uint64_t kMost = std::numeric_limits<int32_t>::max();
    order_.resize(count);
    for (int64_t b = 0; b < count; ++b) {
      const auto rows = static_cast<uint64_t>(levels_.computed[batch_[b].graph]);
      order_[b] = (kMost - rows) << 32 | static_cast<uint64_t>(b);
    }
    std::sort(order_.begin(), order_.end());
    loads_.assign(groups_, 0);
    for (const uint64_t number : order_) {
      const auto least = std::min_element(loads_.begin(), loads_.end());
      const auto b = static_cast<uint32_t>(number);
      *least += levels_.computed[batch_[b].graph];
      group_[b] = static_cast<int32_t>(least - loads_.begin());
    }
  }
  for (const int32_t g : group_) ++group_ends_[g];
  std::exclusive_scan(group_ends_.begin(), group_ends_.end(), group_ends_.begin(), int64_t{0});
  by_group_.resize(count);
  for (int64_t b = 0; b < count; ++b) by_group_[group_ends_[group_[b]]++] = batch_[b];
}

void Packer::Write(const ScriptForm& form, int32_t* words) {
  for (const GraphChannel& channel : graphs_.channels) {
    if (channel.place == ChannelPlace::kGraph) continue;
    for (const auto [graph, first] : batch_) {
      Prefetch(channel.data, graphs_.offsets[graph], graphs_.offsets[graph + 1]);
    }
  }
  std::fill_n(words, WordsOf(form, graphs_.channels), -1);
  WriteHeader(form, words);
  std::copy(group_tiles_.begin(), group_tiles_.end(), words + form.GroupTilesAt());
  WriteTiles(form, words + form.RecordsAt());
  if (used_.inputs > 0) WriteInputs(form, words + form.RecordsAt());
  WriteRoots(form, words + form.RootsAt());
  int32_t* entries = words + form.ChannelsAt();
  for (const GraphChannel& channel : graphs_.channels) {
    const int64_t room = Room(form, channel.place);
    if (channel.is_float) std::fill_n(entries, room, 0);
    WriteChannel(form, channel, entries);
    entries += PaddedSection(room);
  }
}

void Packer::WriteHeader(const ScriptForm& form, int32_t* words) const {
  const auto set = [&](ScriptHeader word, int64_t value) {
    words[word] = static_cast<int32_t>(value);
  };
  set(kHeaderVersion, kScriptVersion);
  set(kHeaderUsedLeaves, used_.leaves);
  set(kHeaderUsedTiles, used_.tiles);
  set(kHeaderUsedGraphs, used_.graphs);
  set(kHeaderUsedInputs, used_.inputs);
  set(kHeaderLeaves, form.leaves);
  set(kHeaderTiles, form.tiles);
  set(kHeaderGraphs, form.graphs);
  set(kHeaderInputs, form.inputs);
  set(kHeaderWidth, form.width);
  set(kHeaderSlots, form.slots);
  set(kHeaderGroups, form.groups);
  set(kHeaderKinds, form.kinds);
  set(kHeaderWords, WordsOf(form, graphs_.channels));
}

// Sources of all rows; and of each tile the kind, which is 0 of padding, and for which tile it
// waits on the way back.
void Packer::WriteTiles(const ScriptForm& form, int32_t* records) {
  const int64_t record_words = form.RecordWords(), slots = graphs_.slots;
  const auto leaves = static_cast<int32_t>(form.leaves);
  const Place* const places = places_.data();
  waits_.assign(used_.tiles + 1, std::numeric_limits<uint32_t>::max());
  uint32_t* const waits = waits_.data() + 1;
  const int32_t* children = scheduler_.children().data();
  for (const int32_t row : scheduler_.rows()) {
    const Place place = places[row];
    const int64_t lane = place.row - place.tile * width_;
    int32_t* sources = records + place.tile * record_words + kRecordSources + lane * slots_;
    for (int64_t k = 0; k < slots; ++k) {
      const Place child = places[*children++];
      sources[k] = RowOf(child, leaves);
      waits[child.tile] = std::min(waits[child.tile], static_cast<uint32_t>(place.tile));
    }
  }
  for (int64_t t = 0; t < form.tiles; ++t) {
    const bool is_used = t < used_.tiles;
    records[t * record_words + kRecordKind] = is_used ? scheduler_.tile_kinds()[t] : 0;
    if (is_used) records[t * record_words + kRecordWait] = static_cast<int32_t>(waits[t]);
  }
}

// Where each row's inputs are: in the order of the batch.
void Packer::WriteInputs(const ScriptForm& form, int32_t* records) const {
  int32_t inputs = 0;
  for (const auto [graph, first] : batch_) {
    const uint8_t* has_input = graphs_.has_input + graphs_.offsets[graph];
    for (int64_t i = 0; i < graphs_.Rows(graph); ++i) {
      if (!has_input[i]) continue;
      const Place place = places_[first + i];
      const int64_t lane = place.row - place.tile * width_;
      int32_t* record = records + place.tile * form.RecordWords();
      record[kRecordSources + width_ * slots_ + lane] = inputs++;
    }
  }
}

void Packer::WriteRoots(const ScriptForm& form, int32_t* roots) const {
  for (size_t b = 0; b < batch_.size(); ++b) {
    const int32_t root = graphs_.roots[batch_[b].graph];
    if (root >= 0)
      roots[b] = RowOf(places_[batch_[b].first + root], static_cast<int32_t>(form.leaves));
  }
}

void Packer::WriteChannel(const ScriptForm& form, const GraphChannel& channel,
                          int32_t* entries) const {
  const auto leaves = static_cast<int32_t>(form.leaves);
  for (const auto [graph, first] : batch_) {
    if (channel.place == ChannelPlace::kGraph) {
      *entries++ = channel.data[graph];
      continue;
    }
    const int64_t begin = graphs_.offsets[graph], rows = graphs_.Rows(graph);
    const int32_t* data = channel.data + begin;
    const Place* places = places_.data() + first;
    switch (channel.place) {
      case ChannelPlace::kLeaf:
        for (int64_t i = begin; i < begin + LeavesOf(graph); ++i) {
          *entries++ = data[levels_.order[i]];
        }
        break;
      case ChannelPlace::kRow:
        for (int64_t i = 0; i < rows; ++i) entries[RowOf(places[i], leaves)] = data[i];
        break;
      case ChannelPlace::kInput:
        for (int64_t i = 0; i < rows; ++i) {
          if (graphs_.has_input[begin + i]) *entries++ = data[i];
        }
        break;
      case ChannelPlace::kGraph:
        break;
    }
  }
}

}  // namespace jaxsparse
