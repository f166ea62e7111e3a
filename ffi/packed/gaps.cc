#include "packed/gaps.h"

#include <algorithm>
#include <array>
#include <limits>

#include "packed/problem.h"

namespace jaxsparse {
namespace {

// What a lane has of one piece: gaps, and the entries behind them.
class LaneOfGaps {
  int64_t at_ = -1;  // the place of the last number
  std::vector<int32_t> gaps_, entries_;

 public:
  // An entry at a place behind all others.
  void Append(int64_t place, int32_t entry) {
    for (; place - at_ > kMostGap; at_ += kMostGap) {
      gaps_.push_back(kMostGap);
      entries_.push_back(kNoEntry);
    }
    gaps_.push_back(static_cast<int32_t>(place - at_));
    entries_.push_back(entry);
    at_ = place;
  }
  size_t size() const { return gaps_.size(); }
  int32_t GapOf(size_t number) const { return number < size() ? gaps_[number] : 0; }
  int32_t EntryOf(size_t number) const { return number < size() ? entries_[number] : kNoEntry; }
};

using Lanes = std::array<LaneOfGaps, kWarp>;

// Takes the entries of a strip's rows from their cursors on that lie in front of a column.
Lanes LanesOf(const PackedPattern& pattern, const std::vector<Entries>& rows,
              std::vector<size_t>& cursors, int64_t first_column, int64_t end_column) {
  Lanes lanes;
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t& at = cursors[r]; at < rows[r].size(); ++at) {
      const int64_t column = pattern.column_indices[rows[r][at]];
      if (column >= end_column) break;
      const int64_t place = column - first_column;
      lanes[r * kGapLanes + place % kGapLanes].Append(place / kGapLanes, rows[r][at]);
    }
  }
  return lanes;
}

// How many numbers the longest lanes of a row take, of all parts.
int64_t NumbersOfRow(const PackedPattern& pattern, const Entries& entries, int parts) {
  const int64_t width = GapRangeColumns(pattern.columns, parts);
  int64_t numbers = 0, end = 0, longest = 0;
  std::array<int64_t, kGapLanes> at, of_lane;
  for (const int32_t entry : entries) {
    const int64_t column = pattern.column_indices[entry];
    if (column >= end) {
      numbers += longest;
      end = (column / width + 1) * width;
      longest = 0;
      at.fill(-1);
      of_lane.fill(0);
    }
    const int64_t within = column - (end - width);
    const int64_t lane = within % kGapLanes, place = within / kGapLanes;
    of_lane[lane] += CeilDivide(place - at[lane], kMostGap);
    at[lane] = place;
    longest = std::max(longest, of_lane[lane]);
  }
  return numbers + longest;
}

}  // namespace

std::string OrderForGaps(const PackedPattern& pattern, int parts, std::vector<int32_t>* order) {
  if (std::string damage = DamageOf(pattern); !damage.empty()) return damage;
  std::vector<int64_t> numbers(pattern.rows);
  std::string error;
  for (int64_t row = 0; row < pattern.rows; ++row) {
    const Entries entries = EntriesOf(pattern, static_cast<int32_t>(row), &error);
    if (!error.empty()) return error;
    numbers[row] = NumbersOfRow(pattern, entries, parts);
  }
  order->assign(pattern.row_order, pattern.row_order + pattern.rows);
  std::stable_sort(order->begin(), order->end(),
                   [&](int32_t a, int32_t b) { return numbers[a] > numbers[b]; });
  return "";
}

std::string PackGaps(const PackedPattern& pattern, int parts, GapArrays* packed) {
  if (std::string damage = DamageOf(pattern); !damage.empty()) return damage;
  *packed = {};
  packed->starts.push_back(0);
  const int64_t width = GapRangeColumns(pattern.columns, parts);
  for (int64_t first = 0; first < pattern.rows; first += kGapStripRows) {
    std::string error;
    const std::vector<Entries> rows = EntriesOfRows(pattern, first, kGapStripRows, &error);
    if (!error.empty()) return error;
    std::vector<size_t> cursors(rows.size());
    for (int64_t part = 0; part < parts; ++part) {
      const Lanes lanes = LanesOf(pattern, rows, cursors, part * width, (part + 1) * width);
      size_t longest = 0;
      for (const LaneOfGaps& lane : lanes) longest = std::max(longest, lane.size());
      for (size_t step = 0; step < longest; step += kGapNumbers) {
        for (const LaneOfGaps& lane : lanes) {
          uint32_t gaps = 0;
          for (size_t e = 0; e < kGapNumbers; ++e) {
            gaps |= static_cast<uint32_t>(lane.GapOf(step + e)) << kGapBits * e;
            packed->sources.push_back(lane.EntryOf(step + e));
          }
          packed->gaps.push_back(gaps);
        }
      }
      if (packed->sources.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
        return "it would take more than 2**31 - 1 numbers";
      }
      packed->starts.push_back(static_cast<int32_t>(packed->gaps.size() / kWarp));
    }
  }
  return "";
}

}  // namespace jaxsparse
