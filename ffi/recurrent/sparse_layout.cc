#include "recurrent/sparse_layout.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <utility>

#include "recurrent/bank_wavefront.h"

namespace jaxsparse {
namespace {

class Builder {
 public:
  Builder(const SparsePatternView& pattern, const SparseShape& shape, int fewest_threads,
          int piece_bytes, bool bank_aware)
      : pattern_(pattern),
        shape_(shape),
        fewest_threads_(fewest_threads),
        banks_(bank_aware ? kBankBytes / piece_bytes : 1) {
    layout_.form.piece_bytes = piece_bytes;
  }

  std::optional<SparseLayout> Build(std::string* error) {
    AssignUnits();
    CountPartialSums();
    if (most_sums_ > 0xffff) {
      *error = "more than 65535 partial sums in a block";
      return std::nullopt;
    }
    layout_.form.partial_sums = most_sums_;
    // No more threads than have work, as many lanes each as that takes.
    const int64_t work = std::max<int64_t>(1, most_groups_) * shape_.group;
    shape_.lanes = static_cast<int>(CeilDivide(work, shape_.threads));
    const int64_t threads = CeilDivide(work, shape_.lanes);
    shape_.threads =
        std::max(fewest_threads_, static_cast<int>(CeilDivide(threads, kWarp)) * kWarp);
    layout_.form.shape = shape_;
    layout_.words.assign(static_cast<size_t>(shape_.words()) * shape_.blocks, 0);
    for (int block = 0; block < shape_.blocks; ++block) Fill(block);
    const int64_t slots = static_cast<int64_t>(shape_.slots()) * shape_.blocks;
    const int64_t entries = pattern_.row_offsets[shape_.products * pattern_.hidden];
    layout_.filling = static_cast<double>(entries) / static_cast<double>(slots);
    layout_.wavefronts =
        static_cast<double>(wavefronts_) / static_cast<double>(std::max<int64_t>(1, ideal_));
    return std::move(layout_);
  }

 private:
  // Longest first, each to the block with the fewest entries that has a place left. Inside a block
  // units keep their order, so that neighbours' inputs and outputs share cache lines.
  void AssignUnits() {
    const int64_t h = pattern_.hidden;
    std::vector<int64_t> length(h);
    for (int64_t u = 0; u < h; ++u) {
      for (int g = 0; g < shape_.products; ++g) {
        length[u] += pattern_.row_offsets[g * h + u + 1] - pattern_.row_offsets[g * h + u];
      }
    }
    std::vector<int32_t> order(h);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return length[a] > length[b]; });
    using Load = std::pair<int64_t, int>;
    std::priority_queue<Load, std::vector<Load>, std::greater<>> blocks;
    for (int b = 0; b < shape_.blocks; ++b) blocks.push({0, b});
    std::vector<std::vector<int32_t>> units(shape_.blocks);
    for (int32_t u : order) {
      auto [load, block] = blocks.top();
      blocks.pop();
      units[block].push_back(u);
      if (static_cast<int>(units[block].size()) < shape_.units) {
        blocks.push({load + length[u], block});
      }
    }
    unit_at_.assign(shape_.places(), -1);
    place_of_.assign(h, 0);
    for (int b = 0; b < shape_.blocks; ++b) {
      std::sort(units[b].begin(), units[b].end());
      for (size_t i = 0; i < units[b].size(); ++i) {
        const int place = b * shape_.units + static_cast<int>(i);
        unit_at_[place] = units[b][i];
        place_of_[units[b][i]] = place;
      }
    }
  }

  int32_t ColumnOfEntry(int64_t entry) const {
    const int32_t column = pattern_.Column(entry);
    const int64_t h = pattern_.hidden;
    return static_cast<int32_t>(column / h) * shape_.places() + place_of_[column % h];
  }

  // Rows are numbered by block, product and place: the order of their partial sums.
  int64_t Row(int block, int product, int i) const {
    return (static_cast<int64_t>(block) * shape_.products + product) * shape_.units + i;
  }

  void CountPartialSums() {
    const int parts = shape_.cluster;
    const int part_columns = shape_.part_columns();
    const int rows = shape_.products * shape_.units;
    const int group_entries = shape_.group * shape_.entries;
    counts_.assign(static_cast<size_t>(rows) * shape_.blocks * parts, 0);
    first_sum_.assign(static_cast<size_t>(rows) * shape_.blocks * parts, 0);
    sums_.assign(shape_.blocks, 0);
    std::vector<int64_t> groups(shape_.blocks, 0);
    for (int block = 0; block < shape_.blocks; ++block) {
      for (int g = 0; g < shape_.products; ++g) {
        for (int i = 0; i < shape_.units; ++i) {
          const int32_t unit = unit_at_[block * shape_.units + i];
          const int64_t row = Row(block, g, i);
          if (unit >= 0) {
            const int32_t* offsets = pattern_.row_offsets + g * pattern_.hidden + unit;
            for (int64_t e = offsets[0]; e < offsets[1]; ++e) {
              ++counts_[row * parts + ColumnOfEntry(e) / part_columns];
            }
          }
          const int before = sums_[block];
          for (int r = 0; r < parts; ++r) {
            const int64_t needed = CeilDivide(counts_[row * parts + r], group_entries);
            first_sum_[row * parts + r] = sums_[block];
            sums_[block] += static_cast<int>(needed);
            groups[block / parts * parts + r] += needed;
          }
          layout_.form.row_sums = std::max(layout_.form.row_sums, sums_[block] - before);
        }
      }
    }
    most_sums_ = std::max(1, *std::max_element(sums_.begin(), sums_.end()));
    most_groups_ = *std::max_element(groups.begin(), groups.end());
  }

  void Fill(int block) {
    uint32_t* record = layout_.words.data() + static_cast<int64_t>(block) * shape_.words();
    const int parts = shape_.cluster, rank = block % parts, first_block = block - rank;
    const int part_columns = shape_.part_columns();
    const int group_entries = shape_.group * shape_.entries;
    for (int i = 0; i < shape_.units; ++i) {
      record[i] = static_cast<uint32_t>(unit_at_[block * shape_.units + i]);
    }
    uint32_t* rows = record + shape_.rows_at();
    for (int g = 0; g < shape_.products; ++g) {
      for (int i = 0; i < shape_.units; ++i) {
        *rows++ = static_cast<uint32_t>(first_sum_[Row(block, g, i) * parts]);
      }
    }
    *rows = static_cast<uint32_t>(sums_[block]);

    // The rows of the cluster, in this block's part of the columns.
    std::vector<EntryPool> pools;
    struct Group {
      int pool;
      uint32_t destination;
    };
    std::vector<Group> groups;
    std::vector<std::pair<int, int>> turns;  // (turn, group): rows take turns
    for (int owner = 0; owner < parts; ++owner) {
      for (int g = 0; g < shape_.products; ++g) {
        for (int i = 0; i < shape_.units; ++i) {
          const int64_t row = Row(first_block + owner, g, i) * parts + rank;
          const int64_t count = counts_[row];
          if (count == 0) continue;
          const int needed = static_cast<int>(CeilDivide(count, group_entries));
          for (int k = 0; k < needed; ++k) {
            turns.push_back({k, static_cast<int>(groups.size())});
            groups.push_back(
                {static_cast<int>(pools.size()),
                 static_cast<uint32_t>(owner) << 16 | static_cast<uint32_t>(first_sum_[row] + k)});
          }
          pools.push_back(MakePool(unit_at_[(first_block + owner) * shape_.units + i], g, rank));
          pools.back().padding = static_cast<int64_t>(needed) * group_entries - count;
        }
      }
    }
    // Neighbouring groups of different rows: one row's entries are seldom spread evenly over the
    // banks, those of several more so.
    std::stable_sort(turns.begin(), turns.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });

    const int threads = shape_.threads, slots = shape_.lanes * threads;
    uint32_t* destinations = record + shape_.groups_at();
    std::vector<int> pool_of(slots, -1);
    for (int j = 0; j < shape_.groups(); ++j) {
      const bool is_used = j < static_cast<int>(turns.size());
      destinations[j] = is_used ? groups[turns[j].second].destination : 0xffffffffu;
      for (int k = 0; is_used && k < shape_.group; ++k) {
        pool_of[j * shape_.group + k] = groups[turns[j].second].pool;
      }
    }
    uint32_t* columns = record + shape_.columns_at();
    uint32_t* values = record + shape_.values_at();
    BankWavefront wavefront(banks_);
    for (int lane = 0; lane < shape_.lanes; ++lane) {
      for (int n = 0; n < shape_.entries; ++n) {
        for (int first = 0; first < threads; first += banks_) {
          const int count = std::min(banks_, threads - first);
          const int at = (lane * shape_.entries + n) * threads + first;
          wavefront.Assign(&pools, &pool_of[lane * threads + first], count);
          for (int k = 0; k < count; ++k) {
            columns[at + k] = static_cast<uint32_t>(wavefront.taken()[k].column);
            values[at + k] = static_cast<uint32_t>(wavefront.taken()[k].value);
          }
          const std::vector<int>& served = wavefront.served();
          // Padding reads columns of zeros behind the part's own, one in each bank.
          int free_bank = 0;
          for (int b = 0; b < banks_; ++b) {
            if (served[b] == 0) free_bank = b;
          }
          const int zero = part_columns + ((free_bank - part_columns) % banks_ + banks_) % banks_;
          for (int k = 0; k < count; ++k) {
            if (columns[at + k] == 0xffffffffu) columns[at + k] = static_cast<uint32_t>(zero);
          }
          const int most = *std::max_element(served.begin(), served.end());
          wavefronts_ += most;
          ideal_ += most > 0;
        }
      }
    }
  }

  EntryPool MakePool(int32_t unit, int product, int part) const {
    const int part_columns = shape_.part_columns();
    const int32_t* offsets = pattern_.row_offsets + product * pattern_.hidden + unit;
    EntryPool pool;
    pool.begin.assign(banks_ + 1, 0);
    for (int64_t e = offsets[0]; e < offsets[1]; ++e) {
      const int32_t column = ColumnOfEntry(e);
      if (column / part_columns == part) ++pool.begin[column % part_columns % banks_ + 1];
    }
    for (int b = 0; b < banks_; ++b) pool.begin[b + 1] += pool.begin[b];
    pool.entries.resize(pool.begin[banks_]);
    pool.end = pool.begin;
    for (int64_t e = offsets[0]; e < offsets[1]; ++e) {
      const int32_t column = ColumnOfEntry(e);
      if (column / part_columns != part) continue;
      const int32_t within = column % part_columns;
      pool.entries[pool.end[within % banks_]++] = {within, pattern_.permutation == nullptr
                                                               ? static_cast<int32_t>(e)
                                                               : pattern_.permutation[e]};
    }
    return pool;
  }

  const SparsePatternView& pattern_;
  SparseShape shape_;
  const int fewest_threads_;
  const int banks_;
  SparseLayout layout_;
  std::vector<int32_t> unit_at_, place_of_;
  std::vector<int32_t> counts_, first_sum_;  // by row and part
  std::vector<int> sums_;                    // by block
  int most_sums_ = 0;                        // of a block
  int64_t most_groups_ = 0;
  int64_t wavefronts_ = 0, ideal_ = 0;
};

}  // namespace

// Its constants come from measurements on an H200 (docs/performance.md).
SparseLayoutPlan PlanSparseLayout(int products, int state_parts, int64_t hidden, int64_t nnz,
                                  int batch, int state_bytes, int multiprocessors) {
  constexpr int64_t kMostStateBytes = 64 << 10;  // that blocks receive by themselves
  constexpr int kCluster = 4;
  constexpr double kFewEntries = 0.02;  // density below which fewer, larger blocks do better
  constexpr int kUsualThreads = 576, kManyThreads = kMostSparseThreads * 9 / 10;
  constexpr double kBusyEntries = 6000;  // of a block, from which on more threads pay
  constexpr int kMostGroup = 4;          // neighbouring threads whose entries belong to one row
  constexpr int64_t kMostWaiting = 448;  // threads that wait for 16 bytes of the state each

  const int64_t rows = products * hidden, columns = state_parts * hidden;
  const int64_t state = columns * PaddedBatch(batch, state_bytes) * state_bytes;
  const auto all = static_cast<double>(nnz);
  const double density = all / (static_cast<double>(rows) * static_cast<double>(columns));
  SparseLayoutPlan plan;
  SparseShape& shape = plan.shape;
  shape.products = products;
  shape.state_parts = state_parts;
  shape.cluster = state > kMostStateBytes ? kCluster : 1;
  const double share = shape.cluster > 1 ? kClusterShare : density < kFewEntries ? 0.5 : 0.85;
  const auto blocks =
      static_cast<int>(std::min(static_cast<int64_t>(multiprocessors * share), hidden));
  shape.blocks = std::max(blocks / shape.cluster, 1) * shape.cluster;
  shape.threads = kMostSparseThreads;
  const double of_block = all / shape.blocks;
  const int threads = of_block > kBusyEntries ? kManyThreads : kUsualThreads;
  shape.entries =
      static_cast<int>(std::max<int64_t>(1, CeilDivide(static_cast<int64_t>(of_block), threads)));
  // Rows of few entries would leave most of a group's slots empty.
  const double of_row =
      std::max(1.0, std::nearbyint(all / static_cast<double>(rows * shape.cluster)));
  shape.group = kMostGroup;
  while (shape.group > 1 && of_row <= shape.entries * shape.group / 2) shape.group /= 2;
  plan.fewest_threads = static_cast<int>(
      std::clamp<int64_t>(CeilDivide(CeilDivide(state, 16), kWarp) * kWarp, kWarp, kMostWaiting));
  return plan;
}

int UnitsPerBlock(int64_t hidden, int blocks, int cluster, int state_parts, int piece_bytes) {
  int units = static_cast<int>(std::max<int64_t>(1, CeilDivide(hidden, blocks)));
  const auto fits = [&](int u) {
    const int64_t columns = static_cast<int64_t>(state_parts) * blocks * u;
    return columns % cluster == 0 && columns / cluster * piece_bytes % 16 == 0;
  };
  while (!fits(units)) ++units;
  return units;
}

std::optional<SparseLayout> MakeSparseLayout(const SparsePatternView& pattern,
                                             const SparseShape& shape, int fewest_threads,
                                             int piece_bytes, bool bank_aware, std::string* error) {
  if (shape.blocks % shape.cluster != 0 || shape.threads % kWarp != 0 ||
      static_cast<int64_t>(shape.places()) < pattern.hidden ||
      shape.columns() % shape.cluster != 0) {
    *error = "the shape of the layout does not suit the pattern";
    return std::nullopt;
  }
  return Builder(pattern, shape, fewest_threads, piece_bytes, bank_aware).Build(error);
}

}  // namespace jaxsparse
