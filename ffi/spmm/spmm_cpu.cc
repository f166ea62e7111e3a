// CPU kernels of the sparse-dense product. Every output is one sum over its row's entries, taken by
// one thread in an order that depends on the shape and the instruction set, never on the threads.
#include <cmath>

#include "common/parallel.h"
#include "common/pattern_cpu.h"
#include "spmm/spmm.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) / 2, written as x * sigmoid of twice the
// argument.
template <int kLanes, typename Acc>
JAXSPARSE_INLINE Vector<Acc, kLanes> Gelu(Vector<Acc, kLanes> x) {
  const auto u = x * (Acc(1.5957691216057308) + Acc(0.071354816272600245) * x * x);
  if constexpr (sizeof(Acc) == 4) {
    return x / (Exp<kLanes>(-u) + 1.0f);
  } else {
    Vector<Acc, kLanes> y;
    for (int l = 0; l < kLanes; ++l) y[l] = x[l] / (1 + std::exp(-u[l]));
    return y;
  }
}

template <int kLanes, typename Acc>
JAXSPARSE_INLINE Vector<Acc, kLanes> Activate(Activation activation, Vector<Acc, kLanes> x) {
  switch (activation) {
    case Activation::kRelu:
      return x < Acc(0) ? Vector<Acc, kLanes>{} : x;  // keeps NaN
    case Activation::kGelu:
      return Gelu<kLanes, Acc>(x);
    default:
      return x;
  }
}

// The arrays of one batch entry.
template <typename T>
struct Matrices {
  const T* values;
  const int32_t* row_offsets;
  IndexReader column_indices;
  const int32_t* permutation;
  const T* x;
  const T* bias;
  OutWriter<T> out;
  OutWriter<T> preactivation;

  JAXSPARSE_INLINE Matrices(const SpmmProblem& p, int64_t entry)
      : values(p.values.At<const T>(p.batch, entry)),
        row_offsets(p.pattern.row_offsets.At<const int32_t>(p.batch, entry)),
        column_indices(p.pattern, p.batch, entry),
        permutation(p.pattern.permutation.data == nullptr
                        ? nullptr
                        : p.pattern.permutation.At<const int32_t>(p.batch, entry)),
        x(p.x.At<const T>(p.batch, entry)),
        bias(p.bias.data == nullptr ? nullptr : p.bias.At<const T>(p.batch, entry)),
        out(p.out, p.out_dtype, p.batch, entry),
        preactivation(p.preactivation, p.out_dtype, p.batch, entry) {}
};

// A stretch of one row's entries, values as accumulators, in their order in the row.
template <typename Acc, typename Index>
struct Entries {
  const Acc* values;
  const Index* columns;
  int64_t count;
};

// Hands out a row in stretches. Values that are permuted or of 16 bits are staged in a small
// buffer, once for a row that fits it, however many column tiles then read it; so are 16-bit
// indices beside 16-bit values, so that fewer kernels are instantiated. `Index` is what the kernel
// then sees.
template <typename T, typename Index>
class RowReader {
  using Acc = typename Accumulator<T>::type;
  static constexpr int64_t kStage = 1024;
  static constexpr bool kDirect = std::is_same_v<T, Acc>;

 public:
  JAXSPARSE_INLINE explicit RowReader(const Matrices<T>& matrices) : matrices_(matrices) {}

  // Entries [begin, end) or the first of them.
  JAXSPARSE_INLINE Entries<Acc, Index> Next(int64_t begin, int64_t end) {
    if constexpr (kDirect) {
      if (matrices_.permutation == nullptr) {
        return {matrices_.values + begin, Columns() + begin, end - begin};
      }
    }
    const int64_t count = end - begin < kStage ? end - begin : kStage;
    if (begin != staged_begin_ || count != staged_count_) Stage(begin, count);
    return {values_, Columns() == nullptr ? columns_ : Columns() + begin, count};
  }

 private:
  JAXSPARSE_INLINE const Index* Columns() const {
    if constexpr (sizeof(Index) == 4) return matrices_.column_indices.wide;
    else return matrices_.column_indices.narrow;
  }

  JAXSPARSE_INLINE void Stage(int64_t begin, int64_t count) {
    if (matrices_.permutation == nullptr) {
      for (int64_t i = 0; i < count; ++i) values_[i] = ToFloat(matrices_.values[begin + i]);
    } else {
      const int32_t* permutation = matrices_.permutation + begin;
      for (int64_t i = 0; i < count; ++i) values_[i] = ToFloat(matrices_.values[permutation[i]]);
    }
    if constexpr (!kDirect) {
      if (const uint16_t* narrow = matrices_.column_indices.narrow) {
        for (int64_t i = 0; i < count; ++i) columns_[i] = narrow[begin + i];
      }
    }
    staged_begin_ = begin;
    staged_count_ = count;
  }

  const Matrices<T>& matrices_;
  int64_t staged_begin_ = -1;
  int64_t staged_count_ = 0;
  Acc values_[kStage];
  Index columns_[kDirect ? 1 : kStage];
};

// sums[v] = the products of one row with kVectors * kLanes neighbouring columns of x. Narrow tiles
// interleave kChains partial sums, since one chain would wait for each multiply-add to finish.
template <int kLanes, int kVectors, typename Acc, typename X, typename T, typename Index>
JAXSPARSE_INLINE void MultiplyRow(RowReader<T, Index>& row, int64_t begin, int64_t end, const X* x,
                                  int64_t stride, Vector<Acc, kLanes>* sums) {
  constexpr int kChains = kVectors >= 8 ? 1 : kVectors >= 4 ? 2 : 4;
  Vector<Acc, kLanes> partial[kChains][kVectors] = {};
  while (begin < end) {
    const Entries<Acc, Index> entries = row.Next(begin, end);
    int64_t i = 0;
    for (; i + kChains <= entries.count; i += kChains) {
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        const X* from = x + static_cast<int64_t>(entries.columns[i + c]) * stride;
        const auto value = Broadcast<kLanes>(entries.values[i + c]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) {
          partial[c][v] += value * Load<kLanes>(from + v * kLanes);
        }
      }
    }
    for (; i < entries.count; ++i) {
      const X* from = x + static_cast<int64_t>(entries.columns[i]) * stride;
      const auto value = Broadcast<kLanes>(entries.values[i]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) partial[0][v] += value * Load<kLanes>(from + v * kLanes);
    }
    begin += entries.count;
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    sums[v] = partial[0][v];
#pragma GCC unroll 4
    for (int c = 1; c < kChains; ++c) sums[v] += partial[c][v];
  }
}

// The product of one row with one column of x: the entries fill the lanes.
template <typename Acc, typename X, typename T, typename Index>
JAXSPARSE_INLINE Acc DotRow(RowReader<T, Index>& row, int64_t begin, int64_t end, const X* x,
                            int64_t stride) {
  constexpr int kLanes = kMaxLanes<Acc>;
  Vector<Acc, kLanes> lanes = {};
  Acc sum = 0;
  while (begin < end) {
    const Entries<Acc, Index> entries = row.Next(begin, end);
    int64_t i = 0;
    for (; i + kLanes <= entries.count; i += kLanes) {
      Acc gathered[kLanes];
      for (int l = 0; l < kLanes; ++l) {
        gathered[l] = ToFloat(x[static_cast<int64_t>(entries.columns[i + l]) * stride]);
      }
      lanes += Load<kLanes>(entries.values + i) * Load<kLanes>(gathered);
    }
    for (; i < entries.count; ++i) {
      sum += entries.values[i] * ToFloat(x[static_cast<int64_t>(entries.columns[i]) * stride]);
    }
    begin += entries.count;
  }
  return sum + Sum<kLanes, Acc>(lanes);
}

// MultiplyRow, or DotRow for a single column.
template <int kLanes, int kVectors, typename Acc, typename X, typename T, typename Index>
JAXSPARSE_INLINE void Multiply(RowReader<T, Index>& row, int64_t begin, int64_t end, const X* x,
                               int64_t stride, Vector<Acc, kLanes>* sums) {
  if constexpr (kLanes == 1) {
    sums[0] = Broadcast<1>(DotRow<Acc>(row, begin, end, x, stride));
  } else {
    MultiplyRow<kLanes, kVectors, Acc>(row, begin, end, x, stride, sums);
  }
}

// Tiles of one row of the output, widest first. A last, partial tile is moved back over columns
// that are done already, so that it is full; they are computed again, perhaps in another order.
template <typename T, typename Index>
struct RowsKernel {
  using Acc = typename Accumulator<T>::type;
  static constexpr int kMax = kMaxLanes<Acc>;

  const SpmmProblem& problem;
  const Matrices<T>& matrices;
  RowReader<T, Index>& reader;
  int64_t row, begin, end;

  template <int kLanes, int kVectors>
  JAXSPARSE_INLINE void Tile(int64_t column) {
    Vector<Acc, kLanes> sums[kVectors];
    Multiply<kLanes, kVectors, Acc>(reader, begin, end, matrices.x + column, problem.n, sums);
    const Acc bias = matrices.bias == nullptr ? Acc(0) : Acc(ToFloat(matrices.bias[row]));
    const int64_t at = row * problem.n + column;
    for (int v = 0; v < kVectors; ++v) {
      const auto z = sums[v] + bias;
      const auto y = Activate<kLanes, Acc>(problem.activation, z);
      matrices.preactivation.template Write<kLanes>(z, at + v * kLanes);
      matrices.out.template Write<kLanes>(y, at + v * kLanes);
    }
  }

  // All columns from `column` on, by tiles of kLanes * kVectors and then narrower ones.
  template <int kLanes, int kVectors>
  JAXSPARSE_INLINE void Tiles(int64_t column) {
    constexpr int kWidth = kLanes * kVectors;
    for (; column + kWidth <= problem.n; column += kWidth) Tile<kLanes, kVectors>(column);
    if (column == problem.n) return;
    if constexpr (kVectors > 1) {
      Tiles<kLanes, kVectors / 2>(column);
    } else if constexpr (kLanes > 1) {
      constexpr int kHalf = kLanes / 2;
      const int64_t left = problem.n - column;
      if (problem.n >= kLanes && left > kHalf) {
        Tile<kLanes, 1>(problem.n - kLanes);
      } else {
        Tiles<kHalf, 1>(column);
      }
    }
  }
};

template <typename T, typename Index>
void Rows(const SpmmProblem& problem, Workers& workers) {
  constexpr int kMax = kMaxLanes<typename Accumulator<T>::type>;
  const RowTasks tasks(problem.pattern, problem.batch, problem.n, workers);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const Matrices<T> matrices(problem, tasks.BatchEntry(task));
    RowReader<T, Index> reader(matrices);
    const int64_t part = task % tasks.per_entry;
    const int64_t last = tasks.FirstRow(matrices.row_offsets, part + 1);
    for (int64_t row = tasks.FirstRow(matrices.row_offsets, part); row < last; ++row) {
      const RowBounds bounds(matrices.row_offsets, row, problem.pattern.nse);
      RowsKernel<T, Index> kernel{problem, matrices, reader, row, bounds.begin, bounds.end};
      kernel.template Tiles<kMax, 8>(0);
    }
  });
}

// Dense matrix on the left: kPanel of its rows at a time are turned into a (k, kPanel) panel that
// stays in cache, and each row of the pattern makes one column of kPanel outputs.
template <typename T, typename Index>
struct PanelKernel {
  using Acc = typename Accumulator<T>::type;

  const SpmmProblem& problem;
  const Matrices<T>& matrices;
  Acc* panel;

  template <int kWidth>
  JAXSPARSE_INLINE void Panel(int64_t first_n, int64_t first_row, int64_t last_row) {
    const int64_t k = problem.pattern.columns, m = problem.pattern.rows;
    const T* x = matrices.x + first_n * k;
    for (int64_t column = 0; column < k; ++column) {
      for (int w = 0; w < kWidth; ++w) panel[column * kWidth + w] = ToFloat(x[w * k + column]);
    }
    constexpr int kLanes = kWidth < kMaxLanes<Acc> ? kWidth : kMaxLanes<Acc>;
    constexpr int kVectors = kWidth / kLanes;
    RowReader<T, Index> reader(matrices);
    for (int64_t row = first_row; row < last_row; ++row) {
      const RowBounds bounds(matrices.row_offsets, row, problem.pattern.nse);
      Vector<Acc, kLanes> sums[kVectors];
      Multiply<kLanes, kVectors, Acc>(reader, bounds.begin, bounds.end, panel, kWidth, sums);
      const Acc bias = matrices.bias == nullptr ? Acc(0) : Acc(ToFloat(matrices.bias[row]));
      for (int v = 0; v < kVectors; ++v) {
        const auto z = sums[v] + bias;
        const auto y = Activate<kLanes, Acc>(problem.activation, z);
        for (int l = 0; l < kLanes; ++l) {
          const int64_t at = (first_n + v * kLanes + l) * m + row;
          matrices.preactivation.Write(z[l], at);
          matrices.out.Write(y[l], at);
        }
      }
    }
  }

  // Columns [n, last_n) of the result, at most kWidth: one panel, or narrower and narrower ones.
  template <int kWidth>
  JAXSPARSE_INLINE void Columns(int64_t n, int64_t last_n, int64_t first_row, int64_t last_row) {
    if (last_n - n >= kWidth) {
      Panel<kWidth>(n, first_row, last_row);
      n += kWidth;
    }
    if constexpr (kWidth > 1) Columns<kWidth / 2>(n, last_n, first_row, last_row);
  }
};

constexpr int64_t kPanel = 16;

// The panel lies on the heap, since threads' stacks may be small. As everywhere in XLA's runtime, a
// host that has no memory left ends the program.
template <typename T, typename Index>
void Panels(const SpmmProblem& problem, Workers& workers) {
  using Acc = typename Accumulator<T>::type;
  const int64_t panels = CeilDivide(problem.n, kPanel);
  Batch batch_of_panels = problem.batch;
  batch_of_panels.count *= panels;
  // With few panels each is shared out by rows of the pattern; every task then makes the panel
  // anew.
  const RowTasks tasks(problem.pattern, batch_of_panels, kPanel, workers, /*per_thread=*/2);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const int64_t panel = tasks.BatchEntry(task) % panels;
    const Matrices<T> matrices(problem, tasks.BatchEntry(task) / panels);
    const int64_t part = task % tasks.per_entry;
    const int64_t first_row = tasks.FirstRow(matrices.row_offsets, part);
    const int64_t last_row = tasks.FirstRow(matrices.row_offsets, part + 1);
    const int64_t last_n = problem.n < (panel + 1) * kPanel ? problem.n : (panel + 1) * kPanel;
    Acc* memory = new Acc[kPanel * problem.pattern.columns];
    PanelKernel<T, Index> kernel{problem, matrices, memory};
    kernel.template Columns<kPanel>(panel * kPanel, last_n, first_row, last_row);
    delete[] memory;
  });
}

// One output at a time in its plainest form: what the faster variants are tested against on the
// spot.
template <typename T>
void Scalar(const SpmmProblem& problem, Workers& workers) {
  using Acc = typename Accumulator<T>::type;
  const int64_t m = problem.pattern.rows, k = problem.pattern.columns, n = problem.n;
  const bool left = problem.dense_on_left;
  ParallelFor(workers, problem.batch.count, [&](int64_t entry) {
    const Matrices<T> matrices(problem, entry);
    for (int64_t row = 0; row < m; ++row) {
      const RowBounds bounds(matrices.row_offsets, row, problem.pattern.nse);
      for (int64_t column = 0; column < n; ++column) {
        Acc sum = 0;
        for (int64_t i = bounds.begin; i < bounds.end; ++i) {
          const int64_t inner = matrices.column_indices[i];
          const int64_t value = matrices.permutation == nullptr ? i : matrices.permutation[i];
          sum += ToFloat(matrices.values[value]) *
                 ToFloat(matrices.x[left ? column * k + inner : inner * n + column]);
        }
        if (matrices.bias != nullptr) sum += ToFloat(matrices.bias[row]);
        const int64_t at = left ? column * m + row : row * n + column;
        matrices.preactivation.Write(sum, at);
        matrices.out.Write(Activate<1, Acc>(problem.activation, Broadcast<1>(sum))[0], at);
      }
    }
  });
}

// f.operator()<T, Index>(): a kernel of its own for 16-bit indices only beside values that need no
// staging.
template <typename F>
JAXSPARSE_INLINE void DispatchTypes(const SpmmProblem& problem, F&& f) {
  DispatchDType(problem.dtype, [&]<typename T>() {
    if constexpr (sizeof(T) > 2) {
      if (problem.pattern.index_type == IndexType::kUint16)
        return f.template operator()<T, uint16_t>();
    }
    f.template operator()<T, int32_t>();
  });
}

void LaunchRows(const SpmmProblem& problem, Workers& workers) {
  DispatchTypes(problem, [&]<typename T, typename Index>() { Rows<T, Index>(problem, workers); });
}

void LaunchPanels(const SpmmProblem& problem, Workers& workers) {
  DispatchTypes(problem, [&]<typename T, typename Index>() { Panels<T, Index>(problem, workers); });
}

void LaunchScalar(const SpmmProblem& problem, Workers& workers) {
  DispatchDType(problem.dtype, [&]<typename T>() { Scalar<T>(problem, workers); });
}

// The dense operand's layout decides; the plain kernel takes what neither of the others does.
constexpr CpuVariant<SpmmProblem> kVariants[] = {
    {"rows", [](const SpmmProblem& p) { return !p.dense_on_left; },
     [](const SpmmProblem&) { return 1.0; }, LaunchRows},
    {"panels", [](const SpmmProblem& p) { return p.dense_on_left; },
     [](const SpmmProblem&) { return 1.0; }, LaunchPanels},
    {"scalar", [](const SpmmProblem&) { return true; }, [](const SpmmProblem&) { return 8.0; },
     LaunchScalar},
};

}  // namespace

extern constinit const Table<CpuVariant<SpmmProblem>> kSpmmCpuVariants = MakeTable(kVariants);

}  // namespace jaxsparse::JAXSPARSE_ISA
