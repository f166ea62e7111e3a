#include "packed/gaps.h"

#include <algorithm>
#include <array>
#include <limits>

#include "packed/problem.h"

namespace jaxsparse {
namespace {

// What a stream has of one piece: gaps, and the entries behind them.
class GapStream {
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

// Those of each row, by residues of columns.
using Streams = std::array<std::array<GapStream, kGapLanes>, kGapStripRows>;

// Takes the entries of a strip's rows from their cursors on that lie in front of a column.
Streams StreamsOf(const PackedPattern& pattern, const std::vector<Entries>& rows,
                  std::vector<size_t>& cursors, int64_t first_column, int64_t end_column) {
  Streams streams;
  for (size_t r = 0; r < rows.size(); ++r) {
    for (size_t& at = cursors[r]; at < rows[r].size(); ++at) {
      const int64_t column = pattern.column_indices[rows[r][at]];
      if (column >= end_column) break;
      const int64_t within = column - first_column;
      streams[r][within % kGapLanes].Append(within / kGapLanes, rows[r][at]);
    }
  }
  return streams;
}

size_t Longest(const Streams& streams) {
  size_t longest = 0;
  for (const auto& row : streams) {
    for (const GapStream& stream : row) longest = std::max(longest, stream.size());
  }
  return longest;
}

// How many numbers the longest streams of a row take, of all parts.
int64_t NumbersOfRow(const PackedPattern& pattern, const Entries& entries, int parts) {
  const int64_t width = GapRangeColumns(pattern.columns, parts);
  int64_t numbers = 0, end = 0, longest = 0;
  std::array<int64_t, kGapLanes> at, of_stream;
  for (const int32_t entry : entries) {
    const int64_t column = pattern.column_indices[entry];
    if (column >= end) {
      numbers += longest;
      end = (column / width + 1) * width;
      longest = 0;
      at.fill(-1);
      of_stream.fill(0);
    }
    const int64_t within = column - (end - width);
    const int64_t residue = within % kGapLanes, place = within / kGapLanes;
    of_stream[residue] += CeilDivide(place - at[residue], kMostGap);
    at[residue] = place;
    longest = std::max(longest, of_stream[residue]);
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
      const Streams streams = StreamsOf(pattern, rows, cursors, part * width, (part + 1) * width);
      const size_t longest = Longest(streams);
      for (size_t first_of_step = 0; first_of_step < longest; first_of_step += kGapStreamNumbers) {
        for (int lane = 0; lane < kWarp; ++lane) {
          uint32_t gaps = 0;
          for (int e = 0; e < kGapNumbers; ++e) {
            const int residue = GapResidue(lane, e % kGapStreams);
            const GapStream& stream = streams[lane / kGapRowLanes][residue];
            const size_t number = first_of_step + e / kGapStreams;
            gaps |= static_cast<uint32_t>(stream.GapOf(number)) << kGapBits * e;
            packed->sources.push_back(stream.EntryOf(number));
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
