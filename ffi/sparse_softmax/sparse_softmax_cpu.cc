// CPU kernels of the softmax over stored entries and of its derivative: a row is one thread's.
#include <cmath>

#include "cpu/parallel.h"
#include "cpu/pattern.h"
#include "sparse_softmax/sparse_softmax.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

template <typename T>
struct Matrices {
  const int32_t* row_offsets;
  const T* values;
  const T* tangent;
  T* out;

  JAXSPARSE_INLINE Matrices(const SparseSoftmaxProblem& p, int64_t entry)
      : row_offsets(p.pattern.row_offsets.At<const int32_t>(p.batch, entry)),
        values(p.values.At<const T>(p.batch, entry)),
        tangent(p.backward ? p.tangent.At<const T>(p.batch, entry) : nullptr),
        out(p.out.At<T>(p.batch, entry)) {}
};

// kLanes exponentials at a time; the last, partial group is padded with -inf, which adds 0.
template <int kLanes, typename T, typename Acc>
JAXSPARSE_INLINE Vector<Acc, kLanes> LoadScaled(const T* from, int64_t count, Acc scale) {
  if (count >= kLanes) return Load<kLanes>(from) * scale;
  Vector<Acc, kLanes> v = Broadcast<kLanes>(static_cast<Acc>(-INFINITY));
  for (int l = 0; l < count; ++l) v[l] = Acc(ToFloat(from[l])) * scale;
  return v;
}

template <int kLanes, typename Acc>
JAXSPARSE_INLINE Vector<Acc, kLanes> Exponential(Vector<Acc, kLanes> x) {
  if constexpr (sizeof(Acc) == 4) {
    return Exp<kLanes>(x);
  } else {
    for (int l = 0; l < kLanes; ++l) x[l] = std::exp(x[l]);
    return x;
  }
}

template <int kLanes, typename Acc, typename T>
JAXSPARSE_INLINE void StoreSome(Vector<Acc, kLanes> v, int64_t count, T* to) {
  if (count >= kLanes) return Store<kLanes, Acc>(v, to);
  for (int l = 0; l < count; ++l) FromFloat(v[l], &to[l]);
}

template <typename T>
void ForwardRow(const T* values, int64_t count, typename Accumulator<T>::type scale, T* out) {
  using Acc = typename Accumulator<T>::type;
  constexpr int kLanes = kMaxLanes<Acc>;
  Vector<Acc, kLanes> lane_max = Broadcast<kLanes>(static_cast<Acc>(-INFINITY));
  for (int64_t i = 0; i < count; i += kLanes) {
    const auto v = LoadScaled<kLanes>(values + i, count - i, scale);
    lane_max = v > lane_max ? v : lane_max;  // a NaN is skipped here and reaches the sum below
  }
  Acc max = lane_max[0];
  for (int l = 1; l < kLanes; ++l) max = lane_max[l] > max ? lane_max[l] : max;

  Vector<Acc, kLanes> lane_sum = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    auto e = Exponential<kLanes, Acc>(LoadScaled<kLanes>(values + i, count - i, scale) - max);
    if (count - i < kLanes) {
      // With max = -inf the padding is NaN too: take it out of the sum.
      for (int l = static_cast<int>(count - i); l < kLanes; ++l) e[l] = 0;
    }
    lane_sum += e;
    if constexpr (std::is_same_v<T, Acc>) StoreSome<kLanes, Acc>(e, count - i, out + i);
  }
  const Acc inverse = 1 / Sum<kLanes, Acc>(lane_sum);
  for (int64_t i = 0; i < count; i += kLanes) {
    // Values of 16 bits would lose digits if they were kept between the passes.
    const auto e =
        std::is_same_v<T, Acc>
            ? LoadScaled<kLanes>(out + i, count - i, Acc(1))
            : Exponential<kLanes, Acc>(LoadScaled<kLanes>(values + i, count - i, scale) - max);
    StoreSome<kLanes, Acc>(e * inverse, count - i, out + i);
  }
}

template <typename T>
void BackwardRow(const T* y, const T* tangent, int64_t count, typename Accumulator<T>::type scale,
                 T* out) {
  using Acc = typename Accumulator<T>::type;
  constexpr int kLanes = kMaxLanes<Acc>;
  Vector<Acc, kLanes> lane_sum = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    lane_sum += Load<kLanes>(y + i) * Load<kLanes>(tangent + i);
  Acc sum = Sum<kLanes, Acc>(lane_sum);
  for (; i < count; ++i) sum += Acc(ToFloat(y[i])) * Acc(ToFloat(tangent[i]));
  for (i = 0; i + kLanes <= count; i += kLanes) {
    Store<kLanes, Acc>(Load<kLanes>(y + i) * scale * (Load<kLanes>(tangent + i) - sum), out + i);
  }
  for (; i < count; ++i) {
    FromFloat(Acc(ToFloat(y[i])) * scale * (Acc(ToFloat(tangent[i])) - sum), &out[i]);
  }
}

template <typename T>
void Rows(const SparseSoftmaxProblem& problem, Workers& workers) {
  using Acc = typename Accumulator<T>::type;
  constexpr int64_t kWork = 16;  // an exponential costs about as much as so many multiply-adds
  const Acc scale = static_cast<Acc>(problem.scale);
  const RowTasks tasks(problem.pattern, problem.batch, kWork, workers);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const Matrices<T> m(problem, tasks.BatchEntry(task));
    const int64_t part = task % tasks.per_entry;
    const int64_t last = tasks.FirstRow(m.row_offsets, part + 1);
    for (int64_t row = tasks.FirstRow(m.row_offsets, part); row < last; ++row) {
      const RowBounds bounds(m.row_offsets, row, problem.pattern.nse);
      const int64_t begin = bounds.begin, count = bounds.end - bounds.begin;
      if (problem.backward) {
        BackwardRow<T>(m.values + begin, m.tangent + begin, count, scale, m.out + begin);
      } else {
        ForwardRow<T>(m.values + begin, count, scale, m.out + begin);
      }
    }
    if (part + 1 == tasks.per_entry) {
      for (int64_t i = StoredEnd(m.row_offsets, problem.pattern); i < problem.pattern.nse; ++i) {
        FromFloat(Acc(0), &m.out[i]);
      }
    }
  });
}

void LaunchRows(const SparseSoftmaxProblem& problem, Workers& workers) {
  DispatchDType(problem.dtype, [&]<typename T>() { Rows<T>(problem, workers); });
}

constexpr CpuVariant<SparseSoftmaxProblem> kVariants[] = {
    {"rows", [](const SparseSoftmaxProblem&) { return true; },
     [](const SparseSoftmaxProblem&) { return 1.0; }, LaunchRows},
};

}  // namespace

extern constinit const Table<CpuVariant<SparseSoftmaxProblem>> kSparseSoftmaxCpuVariants =
    MakeTable(kVariants);

}  // namespace jaxsparse::JAXSPARSE_ISA
