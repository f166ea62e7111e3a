// CPU kernel of reductions of rows: a row is one thread's, some of its values at a time.
#include <cmath>

#include "cpu/parallel.h"
#include "cpu/pattern.h"
#include "reduce_rows/reduce_rows.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// The greater of two numbers, or a NaN, which then stays.
template <typename Number>
JAXSPARSE_INLINE Number Greater(Number most, Number x) {
  return (x > most) | (x != x) ? x : most;
}

// By halving.
template <int kLanes, typename Acc>
JAXSPARSE_INLINE Acc MaximumOfLanes(Vector<Acc, kLanes> v) {
  if constexpr (kLanes == 1) {
    return v[0];
  } else {
    Vector<Acc, kLanes / 2> halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return MaximumOfLanes<kLanes / 2, Acc>(Greater(halves[0], halves[1]));
  }
}

// Of so many values at a time, or as many as there are. The last vector may hold some of the one in
// front of it: they do not become more by that.
template <int kLanes, typename T>
JAXSPARSE_INLINE auto Maximum(const T* values, int64_t count) {
  using Acc = typename Accumulator<T>::type;
  if constexpr (kLanes == 1) {
    return count == 1 ? Acc(ToFloat(values[0])) : Acc(-INFINITY);
  } else {
    if (count < kLanes) return Maximum<kLanes / 2>(values, count);
    auto of_lanes = Load<kLanes>(values);
    int64_t i = kLanes;
    for (; i + kLanes <= count; i += kLanes) of_lanes = Greater(of_lanes, Load<kLanes>(values + i));
    if (i < count) of_lanes = Greater(of_lanes, Load<kLanes>(values + count - kLanes));
    return MaximumOfLanes<kLanes, Acc>(of_lanes);
  }
}

// The same of a sum. What the last vector holds of the one in front of it adds 0.
template <int kLanes, typename T, typename Acc>
JAXSPARSE_INLINE Acc SumOfExponentials(const T* values, int64_t count, Acc less) {
  using Lanes = Vector<Acc, kLanes>;
  if constexpr (kLanes > 1) {
    if (count < kLanes) return SumOfExponentials<kLanes / 2>(values, count, less);
  }
  Lanes sums = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += Exp<kLanes>(Load<kLanes>(values + i) - less);
  if (i < count) {
    Lanes places;
    for (int l = 0; l < kLanes; ++l) places[l] = static_cast<Acc>(l);
    const auto last = Exp<kLanes>(Load<kLanes>(values + count - kLanes) - less);
    sums += places >= static_cast<Acc>(i + kLanes - count) ? last : Lanes{};
  }
  return Sum<kLanes, Acc>(sums);
}

template <typename T>
JAXSPARSE_INLINE auto LogSumExp(const T* values, int64_t count) {
  using Acc = typename Accumulator<T>::type;
  constexpr int kLanes = kMaxLanes<Acc>;
  const Acc most = Maximum<kLanes>(values, count);
  if (!std::isfinite(most)) return most;  // as is then the sum
  return most + static_cast<Acc>(std::log(double(SumOfExponentials<kLanes>(values, count, most))));
}

template <typename T>
void Rows(const ReduceRowsProblem& problem, Workers& workers) {
  const bool is_maximum = problem.reduction == Reduction::kMaximum;
  const int64_t work = is_maximum ? 1 : 16;  // an exponential counts as so many multiply-adds
  const RowTasks tasks(problem.pattern, problem.batch, work, workers);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const int64_t entry = tasks.BatchEntry(task);
    const auto* row_offsets = problem.pattern.row_offsets.At<const int32_t>(problem.batch, entry);
    const T* values = problem.values.At<const T>(problem.batch, entry);
    T* out = problem.out.At<T>(problem.batch, entry);
    const TaskRows rows(tasks, row_offsets, task);
    for (int64_t row = rows.first; row < rows.last; ++row) {
      const RowBounds bounds(row_offsets, row, problem.pattern.nse);
      const T* of_row = values + bounds.begin;
      const int64_t count = bounds.end - bounds.begin;
      constexpr int kLanes = kMaxLanes<typename Accumulator<T>::type>;
      FromFloat(is_maximum ? Maximum<kLanes>(of_row, count) : LogSumExp(of_row, count), &out[row]);
    }
  });
}

void LaunchRows(const ReduceRowsProblem& problem, Workers& workers) {
  DispatchDType(problem.dtype, [&]<typename T>() { Rows<T>(problem, workers); });
}

constexpr CpuVariant<ReduceRowsProblem> kVariants[] = {
    {"rows", [](const ReduceRowsProblem&) { return true; },
     [](const ReduceRowsProblem&) { return 1.0; }, LaunchRows},
};

}  // namespace

extern constinit const Table<CpuVariant<ReduceRowsProblem>> kReduceRowsCpuVariants =
    MakeTable(kVariants);

}  // namespace jaxsparse::JAXSPARSE_ISA
