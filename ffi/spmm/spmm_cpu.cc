// CPU kernels of the sparse-dense product. Every output is one sum over its row's entries, taken by
// one thread in an order that depends on the shape and the instruction set, never on the threads.
#include <new>

#include "spmm/column_cpu.h"
#include "spmm/matrices_cpu.h"
#include "spmm/row_cpu.h"
#include "spmm/spmm.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

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

// f.operator()<kVectors>() for as many vectors of kLanes as cover so many columns.
template <int kLanes, int kVectors, typename F>
JAXSPARSE_INLINE void DispatchVectors(int64_t width, F&& f) {
  if constexpr (kVectors > 1) {
    if (width <= (kVectors - 1) * kLanes) return DispatchVectors<kLanes, kVectors - 1>(width, f);
  }
  f.template operator()<kVectors>();
}

// Rows of the output in one tile of its columns, which is kVectors wide. The tile's columns of x
// are copied first, vector behind vector, in the type of the sums: close together, each vector
// within a line of the cache. The last vector is moved back over columns of the one before it, so
// that it is full.
template <int kVectors, typename T, typename Index>
struct TileKernel {
  using Acc = typename Accumulator<T>::type;
  static constexpr int kLanes = kMaxLanes<Acc>;
  static constexpr int64_t kStride = kVectors * kLanes;

  const SpmmProblem& problem;
  const Matrices<T>& matrices;
  int64_t column, width;

  JAXSPARSE_INLINE int64_t Place(int v) const {
    return column + (v + 1 < kVectors ? v * kLanes : width - kLanes);
  }

  JAXSPARSE_INLINE void Copy(Acc* to) const {
    const T* from = matrices.x;
    for (uint32_t k = 0; k < matrices.columns; ++k, from += problem.n, to += kStride) {
      for (int v = 0; v < kVectors; ++v) {
        Store<kLanes, Acc>(Load<kLanes>(from + Place(v)), to + v * kLanes);
      }
    }
  }

  JAXSPARSE_INLINE void Multiply(const TaskRows& rows, const Acc* copy) const {
    const Columns<Acc> x{copy, matrices.columns, kStride, kStride - kLanes};
    RowReader<T, Index> reader(matrices, rows.end);
    for (int64_t row = rows.first; row < rows.last; ++row) {
      const RowBounds bounds(matrices.row_offsets, row, problem.pattern.nse);
      Vector<Acc, kLanes> sums[kVectors];
      MultiplyRow<kLanes, kVectors, Acc>(reader, bounds.begin, bounds.end, x, sums);
      const Acc bias = matrices.bias == nullptr ? Acc(0) : Acc(ToFloat(matrices.bias[row]));
      for (int v = 0; v < kVectors; ++v) {
        Finish<kLanes, T, Acc>(problem, matrices, sums[v] + bias, row * problem.n + Place(v));
      }
    }
  }
};

// Multiply-adds with a number of x that pay for copying it: from 16 on it is faster, and a task of
// fewer rows than have 4 of them would copy for longer than it multiplies.
constexpr int64_t kReuse = 16, kReuseInTask = 4;

// Tile by tile. A copy of k rows shall fit the first cache, but be no narrower than 192 bytes, of
// which each entry's index and value are read for three lines: then it fits half of the second one
// up to k = 2,700.
template <typename T, typename Index>
void Tiles(const SpmmProblem& problem, Workers& workers) {
  using Acc = typename Accumulator<T>::type;
  constexpr int kLanes = kMaxLanes<Acc>, kMost = 8;
  constexpr int64_t kFirstCache = 32 << 10, kNarrowest = 192;
  const int64_t k = problem.pattern.columns, nse = problem.pattern.nse;
  const int64_t vectors = CeilDivide(problem.n, kLanes);
  const int64_t wanted = Between(kNarrowest, kFirstCache / (k > 0 ? k : 1), kMost * kVectorBytes);
  const int64_t tiles = CeilDivide(vectors, Between(1, wanted / kVectorBytes, kMost));
  Batch batch_of_tiles = problem.batch;
  batch_of_tiles.count *= tiles;
  RowTasks tasks(problem.pattern, batch_of_tiles, CeilDivide(problem.n, tiles), workers,
                 /*per_thread=*/2);
  tasks.per_entry = Between(1, nse / (kReuseInTask * (k > 0 ? k : 1)), tasks.per_entry);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const int64_t tile = tasks.BatchEntry(task) % tiles;
    const Matrices<T> matrices(problem, tasks.BatchEntry(task) / tiles);
    const TaskRows rows(tasks, matrices.row_offsets, task);
    // Of about equal numbers of vectors, so that only the last tile's last one may be partial.
    const int64_t begin = vectors * tile / tiles * kLanes;
    const int64_t end = tile + 1 < tiles ? vectors * (tile + 1) / tiles * kLanes : problem.n;
    DispatchVectors<kLanes, kMost>(end - begin, [&]<int kVectors>() {
      using Kernel = TileKernel<kVectors, T, Index>;
      const Kernel kernel{problem, matrices, begin, end - begin};
      constexpr auto kAligned = std::align_val_t(kVectorBytes);
      void* memory = ::operator new(sizeof(Acc) * Kernel::kStride * k, kAligned);
      kernel.Copy(static_cast<Acc*>(memory));
      kernel.Multiply(rows, static_cast<const Acc*>(memory));
      ::operator delete(memory, kAligned);
    });
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

// Of fewer columns than a vector has, rows lie as close together as copies would.
void LaunchTiles(const SpmmProblem& problem, Workers& workers) {
  DispatchTypes(problem, [&]<typename T, typename Index>() {
    const bool narrow = problem.n < kMaxLanes<typename Accumulator<T>::type>;
    narrow ? LaunchRows(problem, workers) : Tiles<T, Index>(problem, workers);
  });
}

void LaunchScalar(const SpmmProblem& problem, Workers& workers) {
  DispatchDType(problem.dtype, [&]<typename T>() { Scalar<T>(problem, workers); });
}

// The dense operand's layout decides, and how often its numbers are used; the plain kernel takes
// what none of the others does.
constexpr CpuVariant<SpmmProblem> kVariants[] = {
    {"tiles", [](const SpmmProblem& p) { return !p.dense_on_left; },
     [](const SpmmProblem& p) {
       const bool reused = p.pattern.nse >= kReuse * p.pattern.columns;
       return reused && p.n >= kMaxLanes<float> ? 0.5 : 2.0;
     },
     LaunchTiles},
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
