// CPU kernels of the sparse-dense product. Every output is one sum over its row's entries, taken by
// one thread in an order that depends on the shape and the instruction set, never on the threads.
#include <cmath>

#include "common/parallel.h"
#include "spmm/rows_cpu.h"
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

// The end of every kernel: what is stored of sums that stand side by side in the result.
template <int kLanes, typename T, typename Acc>
JAXSPARSE_INLINE void Finish(const Matrices<T>& matrices, Vector<Acc, kLanes> z, int64_t at) {
  matrices.preactivation.template Write<kLanes>(z, at);
  matrices.out.template Write<kLanes>(Activate<kLanes, Acc>(matrices.activation, z), at);
}

template <typename Acc, typename T>
JAXSPARSE_INLINE Acc BiasOf(const Matrices<T>& matrices, int64_t row) {
  return matrices.bias == nullptr ? Acc(0) : Acc(ToFloat(matrices.bias[row]));
}

// kVectors * kLanes columns of a dense matrix, of which the last kLanes begin at `last`.
template <typename X>
struct Columns {
  const X* x;
  int64_t rows, stride, last;
};

// All bits of as many numbers as the widest step below has, and none of as many.
template <typename Int>
constexpr Int kMask[128 / sizeof(Int)] = {};
template <>
constexpr int32_t kMask<int32_t>[32] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                        -1, -1, -1, -1, -1, -1, -1, -1};
template <>
constexpr int64_t kMask<int64_t>[16] = {-1, -1, -1, -1, -1, -1, -1, -1};

template <typename Acc>
using IntOf = std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>;

// What it is, or 0 where no bit of the mask is set.
template <int kLanes, typename Acc>
JAXSPARSE_INLINE Vector<Acc, kLanes> Masked(Vector<Acc, kLanes> v,
                                            Vector<IntOf<Acc>, kLanes> mask) {
  return BitCast<Vector<Acc, kLanes>>(BitCast<Vector<IntOf<Acc>, kLanes>>(v) & mask);
}

// sums[v] += the product of an entry with the row of some columns that it meets, if there is such a
// row. With a mask: or nothing.
template <int kLanes, int kVectors, typename Acc, typename X, typename Index, typename... Mask>
JAXSPARSE_INLINE void MultiplyEntry(const Entries<Acc, Index>& entries, int64_t i,
                                    const Columns<X>& columns, Vector<Acc, kLanes>* sums,
                                    Mask... mask) {
  const int64_t index = entries.columns[i];
  if (!IsBelow(index, columns.rows)) return;
  const auto value = Broadcast<kLanes>(entries.values[i]);
  const X* from = columns.x + index * columns.stride;
  // Or GCC keeps an address for each vector, in more registers than there are.
  if constexpr (kVectors > 2) asm("" : "+r"(from));
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const auto factor = Load<kLanes>(from + (v + 1 < kVectors ? v * kLanes : columns.last));
    if constexpr (sizeof...(mask) == 0) sums[v] += value * factor;
    else sums[v] += Masked<kLanes, Acc>(value * factor, mask...);
  }
}

// sums[v] += the products of some entries with some columns. Narrow tiles interleave kChains
// partial sums in long rows, since one chain would wait for each multiply-add to finish. What is
// left at their end are some of the last kChains entries: a loop over it would end at another place
// in each row, which no predictor knows. In short rows the one loop is all that is not known.
template <int kLanes, int kVectors, typename Acc, typename X, typename Index>
JAXSPARSE_INLINE void MultiplyEntries(const Entries<Acc, Index>& entries, const Columns<X>& columns,
                                      Vector<Acc, kLanes>* sums) {
  constexpr int kChains = kVectors >= 8 ? 1 : kVectors >= 4 ? 2 : 4;
  constexpr int64_t kLong = 16;
  if (kChains == 1 || entries.count < kLong) {
#pragma GCC unroll 1
    for (int64_t i = 0; i < entries.count; ++i) {
      MultiplyEntry<kLanes, kVectors>(entries, i, columns, sums);
    }
    return;
  }
  Vector<Acc, kLanes> partial[kChains][kVectors] = {};
  int64_t i = 0;
  for (; i + kChains <= entries.count; i += kChains) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      MultiplyEntry<kLanes, kVectors>(entries, i + c, columns, partial[c]);
    }
  }
  const auto* left = kMask<IntOf<Acc>> + (64 / sizeof(Acc) - 1) - (entries.count - i);
#pragma GCC unroll 4
  for (int c = 0; c < kChains; ++c) {
    const Vector<IntOf<Acc>, kLanes> mask = Broadcast<kLanes>(left[c + 1]);
    MultiplyEntry<kLanes, kVectors>(entries, entries.count - 1 - c, columns, partial[c], mask);
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) sums[v] += partial[c][v];
  }
}

// finish(row, sums) for each row of a group, with sums[v] its products with some columns.
template <int kLanes, int kVectors, typename Acc, typename X, typename T, typename Index,
          typename F>
JAXSPARSE_INLINE void MultiplyRows(RowReader<T, Index>& reader, const RowGroup& group,
                                   const int32_t* row_offsets, const Columns<X>& columns,
                                   F&& finish) {
  Entries<Acc, Index> entries = reader.Read(group, 0);
  if (entries.count < group.count) {  // one row, in parts
    Vector<Acc, kLanes> sums[kVectors] = {};
    for (int64_t place = 0; place < group.count; place += entries.count) {
      entries = reader.Read(group, place);
      MultiplyEntries<kLanes, kVectors>(entries, columns, sums);
    }
    return finish(group.row, sums);
  }
  int64_t begin = 0;
  for (int64_t row = group.row; row < group.last_row; ++row) {
    const int64_t end = group.Place(row_offsets[row + 1]);
    Vector<Acc, kLanes> sums[kVectors] = {};
    MultiplyEntries<kLanes, kVectors>(
        Entries<Acc, Index>{entries.values + begin, entries.columns + begin, end - begin}, columns,
        sums);
    finish(row, sums);
    begin = end;
  }
}

// Tiles of the output, of at least two columns, widest first. A last, partial vector is moved back
// over columns that are done already, so that it is full.
template <typename T, typename Index>
struct RowsKernel {
  using Acc = typename Accumulator<T>::type;

  const Matrices<T>& matrices;
  RowReader<T, Index>& reader;
  RowGroup group;

  template <int kLanes, int kVectors>
  JAXSPARSE_INLINE void Tile(int64_t column, int64_t last = (kVectors - 1) * kLanes) {
    const Columns<T> columns{matrices.x + column, matrices.columns, matrices.n, last};
    MultiplyRows<kLanes, kVectors, Acc>(
        reader, group, matrices.row_offsets, columns,
        [&](int64_t row, const Vector<Acc, kLanes>* sums) __attribute__((always_inline)) {
          const Acc bias = BiasOf<Acc>(matrices, row);
          for (int v = 0; v < kVectors; ++v) {
            const int64_t at = row * matrices.n + column + (v + 1 < kVectors ? v * kLanes : last);
            Finish<kLanes, T, Acc>(matrices, sums[v] + bias, at);
          }
        });
  }

  // All columns from `column` on, by tiles of kLanes * kVectors and then narrower ones.
  template <int kLanes, int kVectors>
  JAXSPARSE_INLINE void Tiles(int64_t column) {
    constexpr int kWidth = kLanes * kVectors;
    for (; column + kWidth <= matrices.n; column += kWidth) Tile<kLanes, kVectors>(column);
    const int64_t left = matrices.n - column;
    if (left == 0) return;
    if constexpr (kVectors > 2) {
      Tiles<kLanes, kVectors / 2>(column);
    } else if (left > kLanes) {
      Tile<kLanes, 2>(column, left - kLanes);
    } else if (matrices.n >= kLanes) {
      Tile<kLanes, 1>(matrices.n - kLanes);
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
    RowReader<T, Index> reader(matrices);
    const int64_t part = task % tasks.per_entry;
    const int64_t last = tasks.FirstRow(matrices.row_offsets, part + 1);
    for (int64_t row = tasks.FirstRow(matrices.row_offsets, part); row < last;) {
      RowsKernel<T, Index> kernel{matrices, reader, reader.Group(row, last)};
      kernel.template Tiles<kMax, 8>(0);
      row = kernel.group.last_row;
    }
  });
}

// A single column, where entries fill the lanes: the products of a group of rows, one behind the
// other however short rows are, and then the sum of each row.
template <typename T, typename Index>
struct ColumnKernel {
  using Acc = typename Accumulator<T>::type;
  using Reader = RowReader<T, Index>;
  static constexpr int kLanes = kMaxLanes<Acc>;
  static constexpr int kStep = 64 / sizeof(Acc);  // entries that are added without a branch
  static constexpr int kVectors = kStep / kLanes;

  const Matrices<T>& matrices;
  Reader& reader;
  T* factors;     // kStage
  Acc* products;  // kStage + kStep
  Acc* sums;      // kStage + 1

  JAXSPARSE_INLINE void Multiply(const Entries<Acc, Index>& entries) {
    const T* x = matrices.x;
    const auto factor = [&](int64_t i) {
      const int64_t column = entries.columns[i];
      return IsBelow(column, matrices.columns) ? x[column] : T{};
    };
    int64_t i = 0;
    if constexpr (std::is_same_v<T, Acc>) {
      for (; i + kLanes <= entries.count; i += kLanes) {
        Acc lanes[kLanes];
#pragma GCC unroll 16
        for (int l = 0; l < kLanes; ++l) lanes[l] = factor(i + l);
        Vector<Acc, kLanes> gathered;
#pragma GCC unroll 16
        for (int l = 0; l < kLanes; ++l) gathered[l] = lanes[l];
        Store<kLanes, Acc>(Load<kLanes>(entries.values + i) * gathered, products + i);
      }
    } else {
      for (int64_t j = 0; j < entries.count; ++j) factors[j] = factor(j);
      for (; i + kLanes <= entries.count; i += kLanes) {
        const auto gathered = Load<kLanes>(factors + i);
        Store<kLanes, Acc>(Load<kLanes>(entries.values + i) * gathered, products + i);
      }
    }
    for (; i < entries.count; ++i) products[i] = entries.values[i] * ToFloat(factor(i));
  }

  // What lies behind the products is read, but not added.
  JAXSPARSE_INLINE Acc SumOf(const Acc* from, int64_t count) const {
    Vector<Acc, kLanes> lanes[kVectors] = {};
    for (; count > kStep; count -= kStep, from += kStep) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) lanes[v] += Load<kLanes>(from + v * kLanes);
    }
    const auto* mask = kMask<IntOf<Acc>> + kStep - count;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const auto left = LoadRaw<kLanes>(mask + v * kLanes);
      lanes[v] += Masked<kLanes, Acc>(Load<kLanes>(from + v * kLanes), left);
      if (v > 0) lanes[0] += lanes[v];
    }
    return Sum<kLanes, Acc>(lanes[0]);
  }

  // Many rows without entries are left out together: there is no telling where they are.
  JAXSPARSE_INLINE void SumRows(const RowGroup& group) {
    const int32_t* offsets = matrices.row_offsets + group.row;
    const int64_t rows = group.last_row - group.row;
    int64_t begin = 0;
    if (group.count > 4 * rows) {
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t end = group.Place(offsets[r + 1]);
        sums[r] = SumOf(products + begin, end - begin);
        begin = end;
      }
      return;
    }
    int32_t filled[Reader::kStage + 1];
    int64_t count = 0;
    for (int64_t r = 0; r < rows; ++r) {
      sums[r] = 0;
      filled[count] = static_cast<int32_t>(r);
      count += offsets[r + 1] != offsets[r];
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t end = group.Place(offsets[filled[i] + 1]);
      sums[filled[i]] = SumOf(products + begin, end - begin);
      begin = end;
    }
  }

  JAXSPARSE_INLINE void Rows(int64_t row, int64_t last_row) {
    while (row < last_row) {
      const RowGroup group = reader.Group(row, last_row);
      auto entries = reader.Read(group, 0);
      if (group.count > Reader::kStage) {
        Acc sum = 0;
        for (int64_t place = 0; place < group.count; place += entries.count) {
          entries = reader.Read(group, place);
          if (entries.count > Reader::kStage) entries.count = Reader::kStage;
          Multiply(entries);
          sum += SumOf(products, entries.count);
        }
        sums[0] = sum;
      } else {
        Multiply(entries);
        SumRows(group);
      }
      const int64_t rows = group.last_row - row;
      int64_t r = 0;
      for (; r + kLanes <= rows; r += kLanes) Write<kLanes>(row, r);
      for (; r < rows; ++r) Write<1>(row, r);
      row = group.last_row;
    }
  }

  template <int kCount>
  JAXSPARSE_INLINE void Write(int64_t row, int64_t r) {
    auto z = Load<kCount>(sums + r);
    if (matrices.bias != nullptr) z += Load<kCount>(matrices.bias + row + r);
    Finish<kCount, T, Acc>(matrices, z, row + r);
  }
};

template <typename T, typename Index>
void Column(const SpmmProblem& problem, Workers& workers) {
  const RowTasks tasks(problem.pattern, problem.batch, /*work=*/1, workers);
  ParallelFor(workers, tasks.count(), [&](int64_t task) {
    const Matrices<T> matrices(problem, tasks.BatchEntry(task));
    const int64_t part = task % tasks.per_entry;
    using Kernel = ColumnKernel<T, Index>;
    constexpr int64_t kStage = Kernel::Reader::kStage;
    typename Kernel::Reader reader(matrices);
    T factors[kStage];
    typename Kernel::Acc products[kStage + Kernel::kStep], sums[kStage + 1];
    Kernel kernel{matrices, reader, factors, products, sums};
    kernel.Rows(tasks.FirstRow(matrices.row_offsets, part),
                tasks.FirstRow(matrices.row_offsets, part + 1));
  });
}

// Dense matrix on the left: kPanel of its rows at a time are turned into a (k, kPanel) panel that
// stays in cache, and each row of the pattern makes one column of kPanel outputs.
template <typename T, typename Index>
struct PanelKernel {
  using Acc = typename Accumulator<T>::type;

  const Matrices<T>& matrices;
  int64_t rows;
  Acc* panel;

  template <int kWidth>
  JAXSPARSE_INLINE void Panel(int64_t first_n, int64_t first_row, int64_t last_row) {
    const int64_t k = matrices.columns;
    const T* x = matrices.x + first_n * k;
    for (int64_t column = 0; column < k; ++column) {
      for (int w = 0; w < kWidth; ++w) panel[column * kWidth + w] = ToFloat(x[w * k + column]);
    }
    constexpr int kLanes = kWidth < kMaxLanes<Acc> ? kWidth : kMaxLanes<Acc>;
    constexpr int kVectors = kWidth / kLanes;
    const Columns<Acc> columns{panel, k, kWidth, (kVectors - 1) * kLanes};
    RowReader<T, Index> reader(matrices);
    for (int64_t row = first_row; row < last_row;) {
      const RowGroup group = reader.Group(row, last_row);
      MultiplyRows<kLanes, kVectors, Acc>(
          reader, group, matrices.row_offsets, columns,
          [&](int64_t row, const Vector<Acc, kLanes>* sums) __attribute__((always_inline)) {
            const Acc bias = BiasOf<Acc>(matrices, row);
            for (int v = 0; v < kVectors; ++v) {
              const auto z = sums[v] + bias;
              const auto y = Activate<kLanes, Acc>(matrices.activation, z);
              const int64_t at = (first_n + v * kLanes) * rows + row;
              matrices.preactivation.template WriteApart<kLanes>(z, at, rows);
              matrices.out.template WriteApart<kLanes>(y, at, rows);
            }
          });
      row = group.last_row;
    }
  }

  // Columns [n, last_n) of the result, at most kWidth and of at least two: one panel, or narrower
  // and narrower ones. A last column that is alone is done with the one before it.
  template <int kWidth>
  JAXSPARSE_INLINE void AllPanels(int64_t n, int64_t last_n, int64_t first_row, int64_t last_row) {
    if (last_n - n >= kWidth) {
      Panel<kWidth>(n, first_row, last_row);
      n += kWidth;
    }
    if constexpr (kWidth > 2) AllPanels<kWidth / 2>(n, last_n, first_row, last_row);
    else if (n < last_n) Panel<2>(last_n - 2, first_row, last_row);
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
    PanelKernel<T, Index> kernel{matrices, problem.pattern.rows, memory};
    kernel.template AllPanels<kPanel>(panel * kPanel, last_n, first_row, last_row);
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
          if (!IsBelow(inner, matrices.columns) || !IsBelow(value, matrices.nse)) continue;
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

// With one column a dense matrix is the same on either side.
void LaunchRows(const SpmmProblem& problem, Workers& workers) {
  DispatchTypes(problem, [&]<typename T, typename Index>() {
    problem.n == 1 ? Column<T, Index>(problem, workers) : Rows<T, Index>(problem, workers);
  });
}

void LaunchPanels(const SpmmProblem& problem, Workers& workers) {
  if (problem.n == 1) return LaunchRows(problem, workers);
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
