// CPU kernels of the sampled dense-dense product. Every output is one dot product taken by one
// thread in an order that depends on d alone.
#include "cpu/parallel.h"
#include "cpu/pattern.h"
#include "sddmm/sddmm.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

template <typename T>
struct Matrices {
  const int32_t* row_offsets;
  IndexReader column_indices;
  const T* x;
  const T* y;
  const T* scale_by;
  OutWriter<T> out;
  uint32_t columns;

  JAXSPARSE_INLINE Matrices(const SddmmProblem& p, int64_t entry)
      : row_offsets(p.pattern.row_offsets.At<const int32_t>(p.batch, entry)),
        column_indices(p.pattern, p.batch, entry),
        x(p.x.At<const T>(p.batch, entry)),
        y(p.y.At<const T>(p.batch, entry)),
        scale_by(p.scale_by.data == nullptr ? nullptr : p.scale_by.At<const T>(p.batch, entry)),
        out(p.out, p.out_dtype, p.batch, entry),
        columns(static_cast<uint32_t>(p.pattern.columns)) {}

  template <typename Acc>
  JAXSPARSE_INLINE void Write(Acc sum, int64_t entry) const {
    out.Write(scale_by == nullptr ? sum : sum * ToFloat(scale_by[entry]), entry);
  }
};

// sums[j] += x[d..] . y[j][d..] by vectors of kLanes, then by narrower ones for the rest.
template <int kLanes, int kEntries, typename T, typename Acc>
JAXSPARSE_INLINE void Dot(const T* x, const T* const* y, int64_t d, int64_t size, Acc* sums) {
  Vector<Acc, kLanes> partial[kEntries] = {};
  const bool any = d + kLanes <= size;
  for (; d + kLanes <= size; d += kLanes) {
    const auto left = Load<kLanes>(x + d);
#pragma GCC unroll 4
    for (int j = 0; j < kEntries; ++j) partial[j] += left * Load<kLanes>(y[j] + d);
  }
  if (any) {
#pragma GCC unroll 4
    for (int j = 0; j < kEntries; ++j) sums[j] += Sum<kLanes, Acc>(partial[j]);
  }
  if constexpr (kLanes > 1) {
    if (d < size) Dot<(kLanes > 4 ? kLanes / 2 : 1), kEntries>(x, y, d, size, sums);
  }
}

// Entries of a row in groups of kEntries: they share the loads of x and keep as many chains busy.
template <int kLanes, int kEntries, typename T, typename Index>
JAXSPARSE_INLINE int64_t Groups(const Matrices<T>& matrices, const Index* columns, const T* x,
                                int64_t size, int64_t i, int64_t end) {
  using Acc = typename Accumulator<T>::type;
  for (; i + kEntries <= end; i += kEntries) {
    const T* y[kEntries];
    Acc sums[kEntries] = {};
    for (int j = 0; j < kEntries; ++j) {
      y[j] = matrices.y + Within(static_cast<uint32_t>(columns[i + j]), matrices.columns) * size;
    }
    Dot<kLanes, kEntries>(x, y, 0, size, sums);
    for (int j = 0; j < kEntries; ++j) matrices.Write(sums[j], i + j);
  }
  return i;
}

template <int kLanes, typename T, typename Index>
JAXSPARSE_INLINE void RowsOf(const SddmmProblem& problem, const Matrices<T>& matrices,
                             const Index* columns, const TaskRows& rows) {
  for (int64_t row = rows.first; row < rows.last; ++row) {
    const RowBounds bounds(matrices.row_offsets, row, problem.pattern.nse);
    const T* x = matrices.x + row * problem.d;
    int64_t i = bounds.begin;
    i = Groups<kLanes, 4>(matrices, columns, x, problem.d, i, bounds.end);
    Groups<kLanes, 1>(matrices, columns, x, problem.d, i, bounds.end);
  }
}

template <typename T>
void Rows(const SddmmProblem& problem, Workers& workers) {
  using Acc = typename Accumulator<T>::type;
  const Pattern& pattern = problem.pattern;
  const RowTasks tasks(pattern, problem.batch, problem.d, workers);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const Matrices<T> matrices(problem, tasks.BatchEntry(task));
    const int64_t part = task % tasks.per_entry;
    const TaskRows rows(tasks, matrices.row_offsets, task);
    const auto rows_of = [&](const auto* columns) {
      constexpr int kMost = kMaxLanes<Acc>, kSome = kMost < 4 ? kMost : 4;
      // Narrow rows leave out the loops over wider vectors.
      if (problem.d >= kMost) RowsOf<kMost>(problem, matrices, columns, rows);
      else if (problem.d >= kSome) RowsOf<kSome>(problem, matrices, columns, rows);
      else RowsOf<1>(problem, matrices, columns, rows);
    };
    if (matrices.column_indices.wide != nullptr) rows_of(matrices.column_indices.wide);
    else rows_of(matrices.column_indices.narrow);
    if (part + 1 == tasks.per_entry) {
      for (int64_t i = StoredEnd(matrices.row_offsets, pattern); i < pattern.nse; ++i) {
        matrices.out.Write(Acc(0), i);
      }
    }
  });
}

void LaunchRows(const SddmmProblem& problem, Workers& workers) {
  DispatchDType(problem.dtype, [&]<typename T>() { Rows<T>(problem, workers); });
}

constexpr CpuVariant<SddmmProblem> kVariants[] = {
    {"rows", [](const SddmmProblem&) { return true; }, [](const SddmmProblem&) { return 1.0; },
     LaunchRows},
};

}  // namespace

extern constinit const Table<CpuVariant<SddmmProblem>> kSddmmCpuVariants = MakeTable(kVariants);

}  // namespace jaxsparse::JAXSPARSE_ISA
