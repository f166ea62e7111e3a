#include "dynamic/packer.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace jaxsparse {
namespace {

// Sizes below these are rounded up to them (LEAST in form.py).
constexpr int64_t kLeastLeaves = 8, kLeastInputs = 8;

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
  return words;
}

ScriptForm Packer::Plan(const int64_t* ids, int64_t count) {
  ids_ = ids;
  used_ = {};
  used_.graphs = count;
  used_.width = width_;
  used_.slots = slots_;
  used_.groups = groups_;
  used_.kinds = levels_.kinds;
  DealToGroups();
  CountRows();
  PlaceTiles();
  return used_;
}

// The longest graph first, each to the group with the fewest rows.
void Packer::DealToGroups() {
  group_.assign(used_.graphs, 0);
  if (groups_ == 1) return;
  order_.resize(used_.graphs);
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int64_t a, int64_t b) {
    return levels_.computed[ids_[a]] > levels_.computed[ids_[b]];
  });
  load_.assign(groups_, 0);
  for (const int64_t b : order_) {
    const auto least = std::min_element(load_.begin(), load_.end());
    *least += levels_.computed[ids_[b]];
    group_[b] = static_cast<int32_t>(least - load_.begin());
  }
}

void Packer::CountRows() {
  first_list_.assign(groups_ + 1, 0);
  for (int64_t b = 0; b < used_.graphs; ++b) {
    int64_t& lists = first_list_[group_[b] + 1];
    lists = std::max(lists, levels_.depths[ids_[b]] * int64_t{levels_.kinds});
  }
  std::partial_sum(first_list_.begin(), first_list_.end(), first_list_.begin());
  counts_.assign(first_list_.back(), 0);
  for (int64_t b = 0; b < used_.graphs; ++b) {
    const int64_t begin = graphs_.offsets[ids_[b]], end = graphs_.offsets[ids_[b] + 1];
    used_.leaves += end - begin - levels_.computed[ids_[b]];
    int64_t* counts = counts_.data() + first_list_[group_[b]];
    for (int64_t at = begin; at < end; ++at) {
      const int32_t list = levels_.lists[at];
      if (list >= 0) ++counts[list];
    }
    if (levels_.any_input) {
      used_.inputs +=
          std::accumulate(graphs_.has_input + begin, graphs_.has_input + end, int64_t{0});
    }
  }
}

// Every list begins a tile.
void Packer::PlaceTiles() {
  next_.resize(counts_.size());
  group_tiles_.assign(groups_ + 1, 0);
  for (int64_t g = 0; g < groups_; ++g) {
    for (int64_t list = first_list_[g]; list < first_list_[g + 1]; ++list) {
      next_[list] = {static_cast<int32_t>(used_.tiles * width_), static_cast<int32_t>(used_.tiles),
                     0};
      used_.tiles += (counts_[list] + width_ - 1) / width_;
    }
    group_tiles_[g + 1] = used_.tiles;
  }
}

void Packer::Write(const ScriptForm& form, int32_t* words) {
  std::fill_n(words, WordsOf(form, graphs_.channels), -1);
  WriteHeader(form, words);
  WriteGroups(form, words);
  int64_t channel_at = form.ChannelsAt();
  for (const GraphChannel& channel : graphs_.channels) {
    const int64_t room = Room(form, channel.place);
    if (channel.is_float) std::fill_n(words + channel_at, room, 0);
    channel_at += PaddedSection(room);
  }
  leaves_placed_ = inputs_placed_ = 0;
  for (int64_t b = 0; b < used_.graphs; ++b) WriteGraph(form, b, words);
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

// Where groups begin, and the kind of every tile; that of padding is 0.
void Packer::WriteGroups(const ScriptForm& form, int32_t* words) const {
  std::copy(group_tiles_.begin(), group_tiles_.end(), words + form.GroupTilesAt());
  int32_t* record = words + form.RecordsAt();
  const int64_t record_words = form.RecordWords();
  for (int64_t g = 0; g < groups_; ++g) {
    for (int64_t list = first_list_[g]; list < first_list_[g + 1]; ++list) {
      for (int64_t row = 0; row < counts_[list]; row += width_, record += record_words) {
        record[kRecordKind] = static_cast<int32_t>((list - first_list_[g]) % levels_.kinds);
      }
    }
  }
  for (int64_t t = used_.tiles; t < form.tiles; ++t, record += record_words) {
    record[kRecordKind] = 0;
  }
}

void Packer::WriteGraph(const ScriptForm& form, int64_t b, int32_t* words) {
  first_input_ = inputs_placed_;
  PlaceRows(form, b);
  WriteSources(form, b, words + form.RecordsAt());
  const int32_t root = graphs_.roots[ids_[b]];
  if (root >= 0) words[form.RootsAt() + b] = places_[root].row;
  WriteChannels(form, b, words);
}

void Packer::PlaceRows(const ScriptForm& form, int64_t b) {
  const int64_t rows = graphs_.Rows(ids_[b]);
  const int32_t* lists = levels_.lists.data() + graphs_.offsets[ids_[b]];
  const auto leaves = static_cast<int32_t>(form.leaves), width = static_cast<int32_t>(width_);
  Place* const next_of_list = next_.data() + first_list_[group_[b]];
  places_.resize(rows);
  for (int64_t i = 0; i < rows; ++i) {
    if (lists[i] < 0) {
      places_[i] = {leaves_placed_++, -1, 0};
      continue;
    }
    Place& next = next_of_list[lists[i]];
    places_[i] = {leaves + next.row++, next.tile, next.lane++};
    if (next.lane == width) {
      next.lane = 0;
      ++next.tile;
    }
  }
}

// Sources of the rows of a graph, where their inputs are, and for which tile each tile waits on the
// way back.
void Packer::WriteSources(const ScriptForm& form, int64_t b, int32_t* records) {
  const int64_t begin = graphs_.offsets[ids_[b]], record_words = form.RecordWords();
  for (size_t i = 0; i < places_.size(); ++i) {
    const auto [row, tile, lane] = places_[i];
    if (tile < 0) continue;
    const int64_t at = begin + static_cast<int64_t>(i);
    int32_t* record = records + tile * record_words;
    int32_t* sources = record + kRecordSources + lane * slots_;
    for (int64_t k = 0; k < graphs_.slots; ++k) {
      const int32_t child = graphs_.children[at * graphs_.slots + k];
      if (child < 0) continue;
      sources[k] = places_[child].row;
      if (places_[child].tile < 0) continue;
      int32_t& wait = records[places_[child].tile * record_words + kRecordWait];
      if (wait < 0 || tile < wait) wait = tile;
    }
    if (graphs_.has_input[at]) {
      record[kRecordSources + width_ * slots_ + lane] = inputs_placed_++;
    }
  }
}

void Packer::WriteChannels(const ScriptForm& form, int64_t b, int32_t* words) const {
  const int64_t begin = graphs_.offsets[ids_[b]], rows = graphs_.Rows(ids_[b]);
  int32_t* entries = words + form.ChannelsAt();
  for (const GraphChannel& channel : graphs_.channels) {
    const int32_t* data = channel.data + begin;
    switch (channel.place) {
      case ChannelPlace::kLeaf:
        for (int64_t i = 0; i < rows; ++i) {
          if (places_[i].tile < 0) entries[places_[i].row] = data[i];
        }
        break;
      case ChannelPlace::kRow:
        for (int64_t i = 0; i < rows; ++i) entries[places_[i].row] = data[i];
        break;
      case ChannelPlace::kInput:
        for (int64_t i = 0, input = first_input_; i < rows; ++i) {
          if (graphs_.has_input[begin + i]) entries[input++] = data[i];
        }
        break;
      case ChannelPlace::kGraph:
        entries[b] = channel.data[ids_[b]];
        break;
    }
    entries += PaddedSection(Room(form, channel.place));
  }
}

}  // namespace jaxsparse
