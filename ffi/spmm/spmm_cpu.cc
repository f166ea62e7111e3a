// CPU kernels of the sparse-dense product. Every output is one sum over its row's entries, taken by
// one thread in an order that depends on the shape and the instruction set, never on the threads.
#include "spmm/column_cpu.h"
#include "spmm/matrices_cpu.h"
#include "spmm/spmm.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// A stretch of one row's entries, values as accumulators, in their order in the row.
template <typename Acc, typename Index>
struct Entries {
  const Acc* values;
  const Index* columns;
  int64_t count;
};

// Hands out rows in stretches. Values that are permuted or of 16 bits are staged in a buffer, for
// several rows at once; so are 16-bit indices beside 16-bit values, so that fewer kernels are
// instantiated. `Index` is what the kernel then sees.
template <typename T, typename Index>
class RowReader {
  using Acc = typename Accumulator<T>::type;
  static constexpr bool kDirect = std::is_same_v<T, Acc>;

 public:
  JAXSPARSE_INLINE RowReader(const Matrices<T>& matrices, int64_t limit)
      : matrices_(matrices), window_{limit} {}

  // Entries [begin, end) or the first of them.
  JAXSPARSE_INLINE Entries<Acc, Index> Next(int64_t begin, int64_t end) {
    if constexpr (kDirect) {
      if (matrices_.permutation == nullptr) {
        return {matrices_.values + begin, Columns() + begin, end - begin};
      }
    }
    if (!window_.Holds(begin, end)) Stage(begin, end);
    const int64_t at = begin - window_.begin;
    const int64_t last = end < window_.end ? end : window_.end;
    return {values_ + at, Columns() == nullptr ? columns_ + at : Columns() + begin, last - begin};
  }

 private:
  JAXSPARSE_INLINE const Index* Columns() const {
    if constexpr (sizeof(Index) == 4) return matrices_.column_indices.wide;
    else return matrices_.column_indices.narrow;
  }

  [[gnu::noinline]] void Stage(int64_t begin, int64_t end) {
    window_.MoveTo(begin, end);
    matrices_.permutation != nullptr ? StageValues<true>() : StageValues<false>();
    if constexpr (!kDirect) {
      if (const uint16_t* narrow = matrices_.column_indices.narrow) {
        const int64_t count = window_.end - begin;
        for (int64_t i = 0; i < count; ++i) columns_[i] = narrow[begin + i];
      }
    }
  }

  template <bool kPermuted>
  JAXSPARSE_INLINE void StageValues() {
    constexpr int kLanes = kMaxLanes<Acc>;
    const Matrices<T> matrices = matrices_;  // which no store can change, as GCC knows of a copy
    const int64_t begin = window_.begin, count = window_.end - begin;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Store<kLanes, Acc>(matrices.template Values<kLanes, kPermuted>(begin + i), values_ + i);
    }
    for (; i < count; ++i) values_[i] = matrices.template Values<1, kPermuted>(begin + i)[0];
  }

  const Matrices<T>& matrices_;
  Window window_;
  Acc values_[Window::kSize];
  Index columns_[kDirect ? 1 : Window::kSize];
};

// Columns of a dense matrix, by vectors that follow one another, but for the last one: that begins
// at `last`, so that it may overlap the one before.
template <typename X>
struct Columns {
  const X* data;
  uint32_t rows;
  int64_t stride, last;
};

// sums[v] += the product of an entry with kVectors * kLanes columns of x.
template <int kLanes, int kVectors, typename Acc, typename X, typename Index>
JAXSPARSE_INLINE void MultiplyEntry(const Entries<Acc, Index>& entries, int64_t i,
                                    const Columns<X>& x, Vector<Acc, kLanes>* sums) {
  const X* from = x.data + Within(static_cast<uint32_t>(entries.columns[i]), x.rows) * x.stride;
  // Or GCC keeps an address for each vector, in more registers than there are.
  if constexpr (kVectors > 2) asm("" : "+r"(from));
  const auto value = Broadcast<kLanes>(entries.values[i]);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    sums[v] += value * Load<kLanes>(from + (v + 1 < kVectors ? v * kLanes : x.last));
  }
}

// sums[v] = the products of one row. Narrow tiles interleave kChains partial sums, since one chain
// would wait for each multiply-add to finish; short rows do not gain by that.
template <int kLanes, int kVectors, typename Acc, typename X, typename T, typename Index>
JAXSPARSE_INLINE void MultiplyRow(RowReader<T, Index>& row, int64_t begin, int64_t end,
                                  const Columns<X>& x, Vector<Acc, kLanes>* sums) {
  constexpr int kChains = kVectors >= 8 ? 1 : kVectors >= 4 ? 2 : 4;
  constexpr int kStep = kVectors == 1 ? 2 * kChains : kChains;
  constexpr int64_t kLong = 16;
  Vector<Acc, kLanes> partial[kChains][kVectors] = {};
  while (begin < end) {
    const Entries<Acc, Index> entries = row.Next(begin, end);
    int64_t i = 0;
    if (entries.count >= kLong) {
      for (; i + kStep <= entries.count; i += kStep) {
#pragma GCC unroll 8
        for (int c = 0; c < kStep; ++c) {
          MultiplyEntry<kLanes, kVectors>(entries, i + c, x, partial[c % kChains]);
        }
      }
    }
#pragma GCC unroll 1
    for (; i < entries.count; ++i) {
      MultiplyEntry<kLanes, kVectors>(entries, i, x, partial[0]);
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

// Tiles of one row of the output, of at least two columns, widest first. A last, partial vector is
// moved back over columns that are done already, so that it is full.
template <typename T, typename Index>
struct RowsKernel {
  using Acc = typename Accumulator<T>::type;

  const SpmmProblem& problem;
  const Matrices<T>& matrices;
  RowReader<T, Index>& reader;
  int64_t row, begin, end;

  template <int kLanes, int kVectors>
  JAXSPARSE_INLINE void Tile(int64_t column, int64_t last = (kVectors - 1) * kLanes) {
    const Columns<T> x{matrices.x + column, matrices.columns, problem.n, last};
    Vector<Acc, kLanes> sums[kVectors];
    MultiplyRow<kLanes, kVectors, Acc>(reader, begin, end, x, sums);
    const Acc bias = matrices.bias == nullptr ? Acc(0) : Acc(ToFloat(matrices.bias[row]));
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = row * problem.n + column + (v + 1 < kVectors ? v * kLanes : last);
      Finish<kLanes, T, Acc>(problem, matrices, sums[v] + bias, at);
    }
  }

  // All columns from `column` on, by tiles of kLanes * kVectors and then narrower ones.
  template <int kLanes, int kVectors>
  JAXSPARSE_INLINE void Tiles(int64_t column) {
    constexpr int kWidth = kLanes * kVectors;
    for (; column + kWidth <= problem.n; column += kWidth) Tile<kLanes, kVectors>(column);
    const int64_t left = problem.n - column;
    if (left == 0) return;
    if constexpr (kVectors > 2) {
      Tiles<kLanes, kVectors / 2>(column);
    } else if (left > kLanes) {
      Tile<kLanes, 2>(column, left - kLanes);
    } else if (problem.n >= kLanes) {
      Tile<kLanes, 1>(problem.n - kLanes);
    } else if constexpr (kLanes > 2) {
      Tiles<kLanes / 2, 2>(column);
    }
  }
};

template <typename T, typename Index>
void Rows(const SpmmProblem& problem, Workers& workers) {
  constexpr int kMax = kMaxLanes<typename Accumulator<T>::type>;
  const RowTasks tasks(problem.pattern, problem.batch, problem.n, workers);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const Matrices<T> matrices(problem, tasks.BatchEntry(task));
    const TaskRows rows(tasks, matrices.row_offsets, task);
    RowReader<T, Index> reader(matrices, rows.end);
    for (int64_t row = rows.first; row < rows.last; ++row) {
      const RowBounds bounds(matrices.row_offsets, row, problem.pattern.nse);
      RowsKernel<T, Index> kernel{problem, matrices, reader, row, bounds.begin, bounds.end};
      kernel.template Tiles<kMax, 8>(0);
    }
  });
}

template <typename T, typename Index>
void Column(const SpmmProblem& problem, Workers& workers) {
  const RowTasks tasks(problem.pattern, problem.batch, /*work=*/1, workers);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const Matrices<T> matrices(problem, tasks.BatchEntry(task));
    const TaskRows rows(tasks, matrices.row_offsets, task);
    ColumnKernel<T>(problem, matrices, rows.end).Rows(rows.first, rows.last);
  });
}

// Dense matrix on the left: kPanel of its rows at a time are turned into a (k, kPanel) panel that
// stays in cache, and each row of the pattern makes one column of kPanel outputs.
template <typename T, typename Index>
struct PanelKernel {
  using Acc = typename Accumulator<T>::type;

  const SpmmProblem& problem;
  const Matrices<T>& matrices;
  const TaskRows& rows;
  Acc* panel;

  template <int kWidth>
  JAXSPARSE_INLINE void Panel(int64_t first_n) {
    const int64_t k = problem.pattern.columns, m = problem.pattern.rows;
    const T* x = matrices.x + first_n * k;
    for (int64_t column = 0; column < k; ++column) {
      for (int w = 0; w < kWidth; ++w) panel[column * kWidth + w] = ToFloat(x[w * k + column]);
    }
    constexpr int kLanes = kWidth < kMaxLanes<Acc> ? kWidth : kMaxLanes<Acc>;
    constexpr int kVectors = kWidth / kLanes;
    const Columns<Acc> columns{panel, matrices.columns, kWidth, (kVectors - 1) * kLanes};
    RowReader<T, Index> reader(matrices, rows.end);
    for (int64_t row = rows.first; row < rows.last; ++row) {
      const RowBounds bounds(matrices.row_offsets, row, problem.pattern.nse);
      Vector<Acc, kLanes> sums[kVectors];
      MultiplyRow<kLanes, kVectors, Acc>(reader, bounds.begin, bounds.end, columns, sums);
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

  // Columns [n, last_n) of the result, at most kWidth: one panel, or narrower and narrower ones. A
  // last column that is alone is done with the one before it.
  template <int kWidth>
  JAXSPARSE_INLINE void Panels(int64_t n, int64_t last_n) {
    if (last_n - n >= kWidth) {
      Panel<kWidth>(n);
      n += kWidth;
    }
    if constexpr (kWidth > 2) Panels<kWidth / 2>(n, last_n);
    else if (n < last_n) Panel<2>(last_n - 2);
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
    const TaskRows rows(tasks, matrices.row_offsets, task);
    const int64_t last_n = problem.n < (panel + 1) * kPanel ? problem.n : (panel + 1) * kPanel;
    Acc* memory = new Acc[kPanel * problem.pattern.columns];
    PanelKernel<T, Index> kernel{problem, matrices, rows, memory};
    kernel.template Panels<kPanel>(panel * kPanel, last_n);
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
          const int64_t inner = Within(matrices.column_indices[i], matrices.columns);
          const T x = matrices.x[left ? column * k + inner : inner * n + column];
          sum += (matrices.permutation != nullptr ? matrices.template Values<1, true>(i)
                                                  : matrices.template Values<1, false>(i))[0] *
                 ToFloat(x);
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
  DispatchTypes(problem, [&]<typename T, typename Index>() {
    problem.n == 1 ? Column<T, Index>(problem, workers) : Rows<T, Index>(problem, workers);
  });
}

// With one column a dense matrix is the same on either side.
void LaunchPanels(const SpmmProblem& problem, Workers& workers) {
  DispatchTypes(problem, [&]<typename T, typename Index>() {
    problem.n == 1 ? Column<T, Index>(problem, workers) : Panels<T, Index>(problem, workers);
  });
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
