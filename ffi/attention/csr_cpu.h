// Reading rows of a matrix of one head that a pattern's entries name, for the CPU kernels of
// attention by the rows of a pattern. Compiled once for each instruction set, as the kernels are.
#pragma once

#include "attention/staged_cpu.h"
#include "cpu/pattern.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// Entries whose scores are kept at once: of longer rows some after others.
constexpr int kCsrEntries = 256;

// The pattern of one head.
class CsrRows {
 public:
  JAXSPARSE_INLINE CsrRows(const MaskPattern& pattern, const Batch& batch, int64_t entry,
                           int64_t own)
      : offsets_(pattern.row_offsets.At<const int32_t>(batch, entry) + own * (pattern.rows + 1)),
        columns_(pattern, batch, entry),
        first_(own * pattern.nse),
        nse_(pattern.nse),
        column_count_(static_cast<uint32_t>(pattern.columns)) {}

  JAXSPARSE_INLINE const int32_t* offsets() const { return offsets_; }
  JAXSPARSE_INLINE RowBounds Bounds(int64_t row) const { return {offsets_, row, nse_}; }
  JAXSPARSE_INLINE int64_t Column(int64_t i) const {
    return Within(columns_[first_ + i], column_count_);
  }

 private:
  const int32_t* offsets_;
  IndexReader columns_;
  int64_t first_, nse_;
  uint32_t column_count_;
};

// Calls take(columns, their number) for all entries of a row, so many at once.
template <typename F>
JAXSPARSE_INLINE void ForEachChunk(const CsrRows& rows, int64_t row, F&& take) {
  const RowBounds bounds = rows.Bounds(row);
  int64_t columns[kCsrEntries];
  for (int64_t begin = bounds.begin; begin < bounds.end; begin += kCsrEntries) {
    const int count = static_cast<int>(Between(0, bounds.end - begin, kCsrEntries));
    for (int i = 0; i < count; ++i) columns[i] = rows.Column(begin + i);
    take(columns, count);
  }
}

// Some features of a row as accumulators, with zeros behind them that fill the last vector.
template <typename T, typename Acc>
JAXSPARSE_INLINE void StageRow(const T* from, int64_t size, Acc* to) {
  constexpr int kLanes = kMaxLanes<Acc>;
  for (int64_t f = 0; f < size; f += kLanes) {
    Store<kLanes, Acc>(LoadSome<kLanes>(from + f, size - f), to + f);
  }
}

// sums[i] += x . rows[columns[i]] for kCount entries and `size` features from `feature` on.
template <int kCount, typename T, typename Acc>
JAXSPARSE_INLINE void AddDotsOf(const Acc* x, const HeadRows<const T>& rows, int64_t feature,
                                const int64_t* columns, int64_t size, Acc* sums) {
  constexpr int kLanes = kMaxLanes<Acc>;
  const T* y[kCount];
  Vector<Acc, kLanes> products[kCount] = {};
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) y[i] = rows.Row(columns[i]) + feature;
  for (int64_t f = 0; f < size; f += kLanes) {
    const auto left = Load<kLanes>(x + f);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) products[i] += left * LoadSome<kLanes>(y[i] + f, size - f);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) sums[i] += Sum<kLanes, Acc>(products[i]);
}

// sums[i] = row . rows[columns[i]], of all features.
template <typename T, typename Acc>
[[gnu::noinline]] void DotsOfEntries(const T* row, const HeadRows<const T>& rows,
                                     const int64_t* columns, int count, Acc* sums) {
  alignas(64) Acc staged[kMostFeatures<Acc>];
  for (int i = 0; i < count; ++i) sums[i] = 0;
  for (int64_t feature = 0; feature < rows.size; feature += kMostFeatures<Acc>) {
    const int64_t size = PartOf<Acc>(rows.size, feature);
    StageRow(row + feature, size, staged);
    int i = 0;
    for (; i + 4 <= count; i += 4) {
      AddDotsOf<4>(staged, rows, feature, columns + i, size, sums + i);
    }
    for (; i < count; ++i) AddDotsOf<1>(staged, rows, feature, columns + i, size, sums + i);
  }
}

template <int kVectors, typename T, typename Acc>
JAXSPARSE_INLINE void AddVectorsOf(const Acc* weights, const HeadRows<const T>& rows,
                                   int64_t feature, const int64_t* columns, int count, int64_t left,
                                   Acc* sums) {
  constexpr int kLanes = kMaxLanes<Acc>;
  Vector<Acc, kLanes> v[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) v[j] = Load<kLanes>(sums + j * kLanes);
  for (int i = 0; i < count; ++i) {
    const auto weight = Broadcast<kLanes>(weights[i]);
    const T* from = rows.Row(columns[i]) + feature;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      v[j] += weight * LoadSome<kLanes>(from + j * kLanes, left - j * kLanes);
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) Store<kLanes, Acc>(v[j], sums + j * kLanes);
}

// sums += the weights[i] rows[columns[i]], of the features from `feature` on that have room.
template <typename T, typename Acc>
[[gnu::noinline]] void AddRowsOfEntries(const Acc* weights, const HeadRows<const T>& rows,
                                        int64_t feature, const int64_t* columns, int count,
                                        Acc* sums) {
  constexpr int kLanes = kMaxLanes<Acc>;
  const int64_t size = PartOf<Acc>(rows.size, feature);
  int64_t f = 0;
  for (; f + 4 * kLanes <= size; f += 4 * kLanes) {
    AddVectorsOf<4>(weights, rows, feature + f, columns, count, 4 * kLanes, sums + f);
  }
  for (; f < size; f += kLanes) {
    AddVectorsOf<1>(weights, rows, feature + f, columns, count, size - f, sums + f);
  }
}

// Rows that entries name are brought close: they lie anywhere.
template <typename T>
JAXSPARSE_INLINE void PrefetchRows(const HeadRows<const T>& rows, const int64_t* columns,
                                   int count) {
  constexpr int64_t kLine = 64;
  const int64_t bytes = rows.size * static_cast<int64_t>(sizeof(T));
  for (int i = 0; i < count; ++i) {
    const char* row = reinterpret_cast<const char*>(rows.Row(columns[i]));
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(row + at, 0, 2);
  }
}

// Calls run(entry, row) for every row of all batch entries, `work` multiply-adds for one of its
// entries each.
template <typename F>
JAXSPARSE_INLINE void ForEachRowOf(const MaskPattern& pattern, const Batch& batch, int64_t work,
                                   Workers& workers, F&& run) {
  const RowTasks tasks(pattern, batch, work, workers);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const int64_t entry = tasks.BatchEntry(task), part = task % tasks.per_entry;
    // Heads with patterns of their own have the same tasks as the first one.
    const auto* offsets = pattern.row_offsets.At<const int32_t>(batch, entry);
    const int64_t last = tasks.FirstRow(offsets, part + 1);
    for (int64_t row = tasks.FirstRow(offsets, part); row < last; ++row) run(entry, row);
  });
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
