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

// sums[i] += x . y[i] for kCount rows of `size` numbers: by vectors of kLanes, and what is left of
// them by shorter ones.
template <int kLanes, int kCount, typename T, typename Acc>
JAXSPARSE_INLINE void AddDotsOf(const Acc* x, const T* const (&y)[kCount], int64_t size,
                                Acc* sums) {
  if (size >= kLanes) {
    Vector<Acc, kLanes> products[kCount] = {};
    int64_t f = 0;
    for (; f + kLanes <= size; f += kLanes) {
      const auto left = Load<kLanes>(x + f);
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) products[i] += left * Load<kLanes>(y[i] + f);
    }
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) sums[i] += Sum<kLanes, Acc>(products[i]);
    if (f == size) return;
    if constexpr (kLanes > 1) {
      const T* rest[kCount];
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) rest[i] = y[i] + f;
      AddDotsOf<kLanes / 2>(x + f, rest, size - f, sums);
    }
  } else if constexpr (kLanes > 1) {
    AddDotsOf<kLanes / 2>(x, y, size, sums);
  }
}

// sums[i] = row . rows[columns[i]], of all features, with zeros behind them that fill the last
// vector.
template <typename T, typename Acc>
[[gnu::noinline]] void DotsOfEntries(const T* row, const HeadRows<const T>& rows,
                                     const int64_t* columns, int count, Acc* sums) {
  alignas(64) Acc staged[kMostFeatures<Acc>];
  for (int i = 0; i < CeilDivide(count, kMaxLanes<Acc>) * kMaxLanes<Acc>; ++i) sums[i] = 0;
  for (int64_t feature = 0; feature < rows.size; feature += kMostFeatures<Acc>) {
    const int64_t size = PartOf<Acc>(rows.size, feature);
    StageRow(row + feature, size, staged);
    const auto dots = [&]<int kCount>(int i) __attribute__((always_inline)) {
      const T* y[kCount];
#pragma GCC unroll 4
      for (int j = 0; j < kCount; ++j) y[j] = rows.Row(columns[i + j]) + feature;
      AddDotsOf<kMaxLanes<Acc>>(staged, y, size, sums + i);
    };
    int i = 0;
    for (; i + 4 <= count; i += 4) dots.template operator()<4>(i);
    for (; i < count; ++i) dots.template operator()<1>(i);
  }
}

template <int kLanes, int kVectors, typename T, typename Acc>
JAXSPARSE_INLINE void AddVectorsOf(const Acc* weights, const HeadRows<const T>& rows,
                                   int64_t feature, const int64_t* columns, int count, Acc* sums) {
  Vector<Acc, kLanes> v[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) v[j] = Load<kLanes>(sums + j * kLanes);
  for (int i = 0; i < count; ++i) {
    const auto weight = Broadcast<kLanes>(weights[i]);
    const T* from = rows.Row(columns[i]) + feature;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) v[j] += weight * Load<kLanes>(from + j * kLanes);
  }
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) Store<kLanes, Acc>(v[j], sums + j * kLanes);
}

// Of `size` features from `feature` on: what is left of vectors by shorter ones.
template <int kLanes, typename T, typename Acc>
JAXSPARSE_INLINE void AddFeaturesOf(const Acc* weights, const HeadRows<const T>& rows,
                                    int64_t feature, int64_t size, const int64_t* columns,
                                    int count, Acc* sums) {
  int64_t f = 0;
  if constexpr (kLanes == kMaxLanes<Acc>) {
    for (; f + 4 * kLanes <= size; f += 4 * kLanes) {
      AddVectorsOf<kLanes, 4>(weights, rows, feature + f, columns, count, sums + f);
    }
  }
  for (; f + kLanes <= size; f += kLanes) {
    AddVectorsOf<kLanes, 1>(weights, rows, feature + f, columns, count, sums + f);
  }
  if constexpr (kLanes > 1) {
    if (f < size) {
      AddFeaturesOf<kLanes / 2>(weights, rows, feature + f, size - f, columns, count, sums + f);
    }
  }
}

// sums += the weights[i] rows[columns[i]], of the features from `feature` on that have room.
template <typename T, typename Acc>
[[gnu::noinline]] void AddRowsOfEntries(const Acc* weights, const HeadRows<const T>& rows,
                                        int64_t feature, const int64_t* columns, int count,
                                        Acc* sums) {
  AddFeaturesOf<kMaxLanes<Acc>>(weights, rows, feature, PartOf<Acc>(rows.size, feature), columns,
                                count, sums);
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

// Calls run(entry, head, first row, last row) for all rows of all heads of all batch entries, some
// rows at a time, of one head after the other: what heads have of a row lies side by side. `work`:
// multiply-adds for an entry of all heads.
template <typename F>
JAXSPARSE_INLINE void ForEachRowsOfHead(const MaskPattern& pattern, const Batch& batch,
                                        int64_t heads, int64_t work, Workers& workers, F&& run) {
  constexpr int64_t kRowsAtOnce = 16;
  const RowTasks tasks(pattern, batch, work, workers);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const int64_t entry = tasks.BatchEntry(task), part = task % tasks.per_entry;
    // Heads with patterns of their own have the same tasks as the first one.
    const auto* offsets = pattern.row_offsets.At<const int32_t>(batch, entry);
    const int64_t last = tasks.FirstRow(offsets, part + 1);
    for (int64_t row = tasks.FirstRow(offsets, part); row < last; row += kRowsAtOnce) {
      const int64_t end = Between(row, row + kRowsAtOnce, last);
      for (int64_t head = 0; head < heads; ++head) run(entry, head, row, end);
    }
  });
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
