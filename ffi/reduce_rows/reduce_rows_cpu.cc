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

// Of at least kLanes values. The last vector may hold some of the one in front of it: they do not
// become more by that.
template <int kLanes, typename T>
JAXSPARSE_INLINE auto MaximumOfMany(const T* values, int64_t count) {
  auto of_lanes = Load<kLanes>(values);
  for (int64_t i = kLanes; i < count; i += kLanes) {
    of_lanes = Greater(of_lanes, Load<kLanes>(values + (i + kLanes < count ? i : count - kLanes)));
  }
  auto most = of_lanes[0];
  for (int l = 1; l < kLanes; ++l) most = Greater(most, of_lanes[l] + 0);
  return most;
}

template <typename T>
JAXSPARSE_INLINE auto Maximum(const T* values, int64_t count) {
  using Acc = typename Accumulator<T>::type;
  constexpr int kLanes = kMaxLanes<Acc>, kFew = 4;
  if (count >= kLanes) return MaximumOfMany<kLanes>(values, count);
  if (kFew < kLanes && count >= kFew) return MaximumOfMany<kFew>(values, count);
  Acc most = -INFINITY;
  for (int64_t i = 0; i < count; ++i) most = Greater(most, Acc(ToFloat(values[i])));
  return most;
}

// kLanes exponentials at a time, of which those that are counted already add 0.
template <typename T, typename Acc>
JAXSPARSE_INLINE Acc SumOfExponentials(const T* values, int64_t count, Acc less) {
  constexpr int kLanes = kMaxLanes<Acc>;
  using Lanes = Vector<Acc, kLanes>;
  const Lanes nothing = Broadcast<kLanes>(static_cast<Acc>(-INFINITY));
  Lanes sums = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sums += Exp<kLanes>(Load<kLanes>(values + i) - less);
  if (i < count) {
    Lanes last = nothing;
    for (int l = 0; i + l < count; ++l) last[l] = Acc(ToFloat(values[i + l]));
    sums += Exp<kLanes>(last - less);
  }
  return Sum<kLanes, Acc>(sums);
}

template <typename T>
JAXSPARSE_INLINE auto LogSumExp(const T* values, int64_t count) {
  using Acc = typename Accumulator<T>::type;
  const Acc most = Maximum(values, count);
  if (!std::isfinite(most)) return most;  // as is then the sum
  return most + static_cast<Acc>(std::log(double(SumOfExponentials<T, Acc>(values, count, most))));
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
      FromFloat(is_maximum ? Maximum(of_row, count) : LogSumExp(of_row, count), &out[row]);
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
