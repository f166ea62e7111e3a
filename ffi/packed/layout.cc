#include "packed/layout.h"

#include <algorithm>
#include <array>
#include <limits>

#include "packed/problem.h"

namespace jaxsparse {
namespace {

constexpr int kGroupsOfPanel = kPackedPanelColumns / 8;

// The entries at a strip's places of one panel.
class PanelPlaces {
  std::array<std::array<int32_t, kPackedPanelColumns>, kPackedStripRows> entries_;

 public:
  // Takes entries from each row's cursor on.
  PanelPlaces(const PackedPattern& pattern, const std::vector<Entries>& rows,
              std::vector<size_t>& cursors, int64_t first_column) {
    for (auto& row : entries_) row.fill(kNoEntry);
    for (size_t r = 0; r < rows.size(); ++r) {
      for (size_t& at = cursors[r]; at < rows[r].size(); ++at) {
        const int64_t column = pattern.column_indices[rows[r][at]] - first_column;
        if (column >= kPackedPanelColumns) break;
        entries_[r][column] = rows[r][at];
      }
    }
  }
  // The first number of a lane's pair; the second one is behind it.
  const int32_t* Pair(int lane, int group, int j) const {
    return &entries_[lane / 4 + 8 * j][8 * group + 2 * (lane % 4)];
  }
};

// Of one piece, the streams of its lanes.
class Piece {
  int cell_, streams_;            // streams of a lane; of pairs two go in step
  std::vector<int64_t> ends_;     // of all streams
  std::vector<int32_t> sources_;  // as PackedStreams

  void Append(int lane, int stream, int32_t entry) {
    const int number = streams_ * lane + stream;
    sources_[ends_[number]++ * NumbersOfRow() + number] = entry;
  }
  void AppendPair(int lane, const int32_t* pair) {
    for (int e = 0; e < 2; ++e) Append(lane, e, pair[e]);
  }

 public:
  Piece(const PackedForm& form, int64_t panels)
      : cell_(form.cell),
        streams_(form.numbers_of_word),
        ends_(NumbersOfRow()),
        sources_(panels * kPackedPanelPairs * NumbersOfRow(), kNoEntry) {}

  int64_t NumbersOfRow() const { return streams_ * kWarp; }
  int64_t Longest() const { return *std::max_element(ends_.begin(), ends_.end()); }
  int64_t Shortest() const { return *std::min_element(ends_.begin(), ends_.end()); }

  // Appends a panel's numbers and sets the bits of its masks, (steps, lanes).
  void AppendPanel(const PanelPlaces& places, uint32_t* masks) {
    const int groups = cell_ == 1 ? 8 : 16;  // of a step
    for (int lane = 0; lane < kWarp; ++lane) {
      for (int g = 0; g < kGroupsOfPanel; ++g) {
        uint32_t& mask = masks[g / groups * kWarp + lane];
        const int h = g % groups;
        for (int j = 0; j < 2; ++j) {
          const int32_t* pair = places.Pair(lane, g, j);
          if (cell_ == 2 && (pair[0] != kNoEntry || pair[1] != kNoEntry)) {
            mask |= uint32_t{1} << (8 * (2 * (h % 2) + j) + h / 2);
            AppendPair(lane, pair);
          }
          for (int e = 0; e < 2 && cell_ == 1; ++e) {
            if (pair[e] == kNoEntry) continue;
            mask |= uint32_t{1} << (8 * (2 * j + e) + h);
            Append(lane, streams_ == 4 ? 2 * j + e : e, pair[e]);
          }
        }
      }
    }
    const int64_t least = Longest() - kPackedDrift;
    for (int64_t& end : ends_) end = std::max(end, least);
  }
  std::vector<int32_t> Sources() const {
    return {sources_.begin(), sources_.begin() + Longest() * NumbersOfRow()};
  }
};

}  // namespace

std::string PackStreams(const PackedPattern& pattern, const PackedForm& form,
                        PackedStreams* streams) {
  if (std::string damage = DamageOf(pattern); !damage.empty()) return damage;
  const int64_t strips = CeilDivide(pattern.rows, kPackedStripRows);
  const int64_t panels = PackedPanels(pattern.columns, form.parts);
  const int64_t masks_of_panel = kPackedPanelMasks / form.cell * kWarp;
  *streams = {};
  streams->masks.resize(strips * form.parts * panels * masks_of_panel);
  streams->starts.push_back(0);
  uint32_t* masks = streams->masks.data();
  for (int64_t strip = 0; strip < strips; ++strip) {
    std::string error;
    const std::vector<Entries> rows =
        EntriesOfRows(pattern, strip * kPackedStripRows, kPackedStripRows, &error);
    if (!error.empty()) return error;
    std::vector<size_t> cursors(rows.size());
    for (int64_t part = 0; part < form.parts; ++part) {
      Piece piece(form, panels);
      for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t column = (part * panels + panel) * kPackedPanelColumns;
        streams->panels.push_back(static_cast<int32_t>(piece.Shortest()));
        piece.AppendPanel(PanelPlaces(pattern, rows, cursors, column), masks);
        streams->panels.push_back(static_cast<int32_t>(piece.Longest()));
        masks += masks_of_panel;
      }
      const std::vector<int32_t> sources = piece.Sources();
      streams->sources.insert(streams->sources.end(), sources.begin(), sources.end());
      const auto numbers = static_cast<int64_t>(streams->sources.size());
      if (numbers > std::numeric_limits<int32_t>::max()) {
        return "it would take more than 2**31 - 1 numbers";
      }
      streams->starts.push_back(static_cast<int32_t>(numbers / piece.NumbersOfRow()));
    }
  }
  return "";
}

}  // namespace jaxsparse
