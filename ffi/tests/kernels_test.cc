// Every CPU kernel on random patterns, with arrays of exactly their size on the heap: built with
// AddressSanitizer and UBSanitizer by tests/test_sanitizers.py, so that a read or write one element
// too far ends the program. Results are compared with plain loops.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/attention.h"
#include "kernels/depthwise.h"
#include "kernels/operands.h"
#include "reduce_rows/reduce_rows.h"
#include "sddmm/sddmm.h"
#include "sparse_softmax/sparse_softmax.h"
#include "spmm/spmm.h"

namespace jaxsparse {
namespace {

struct TestPattern {
  int64_t rows, columns, nse;
  bool is_sound = true;
  std::unique_ptr<int32_t[]> row_offsets, wide, row_order, permutation;
  std::unique_ptr<uint16_t[]> narrow;

  TestPattern(Random& random, int64_t rows, int64_t columns, int64_t padding)
      : rows(rows), columns(columns) {
    std::vector<int32_t> offsets = {0}, indices;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t chance = random.Below(4);  // empty, sparse, half, full
      for (int64_t c = 0; c < columns; ++c) {
        if (chance == 3 || (chance > 0 && random.Below(chance == 1 ? 8 : 2) == 0)) {
          indices.push_back(static_cast<int32_t>(c));
        }
      }
      offsets.push_back(static_cast<int32_t>(indices.size()));
    }
    const auto stored = static_cast<int64_t>(indices.size());
    nse = stored + padding;
    row_offsets = Block<int32_t>(rows + 1);
    std::copy(offsets.begin(), offsets.end(), row_offsets.get());
    wide = Block<int32_t>(nse);
    narrow = Block<uint16_t>(nse);
    permutation = Block<int32_t>(nse);
    row_order = Block<int32_t>(rows);
    for (int64_t row = 0; row < rows; ++row) row_order[row] = static_cast<int32_t>(row);
    for (int64_t i = 0; i < nse; ++i) {
      // Padding is garbage that must not be followed.
      wide[i] = i < stored ? indices[i] : 1 << 30;
      narrow[i] = static_cast<uint16_t>(i < stored ? indices[i] : 65535);
      permutation[i] = static_cast<int32_t>(i);
    }
    std::shuffle(permutation.get(), permutation.get() + stored, random.engine);
    for (int64_t i = stored; i < nse; ++i) permutation[i] = 1 << 30;
  }

  // Some indices that lead anywhere at all: results are then of no use, but arrays are not left.
  void Spoil(Random& random) {
    const auto wild = [&]() -> int32_t {
      constexpr int32_t kEnds[] = {-1, 1 << 30, std::numeric_limits<int32_t>::min(),
                                   std::numeric_limits<int32_t>::max()};
      const int64_t place = random.Below(8);
      return place < 4 ? kEnds[place] : static_cast<int32_t>(random.Below(2 * nse + 8) - 4);
    };
    const auto spoil = [&](auto* indices, int64_t size) {
      for (int64_t i = 0; i < size; ++i) {
        if (random.Below(4) == 0) indices[i] = wild();
      }
    };
    if (random.Below(2) == 0) spoil(row_offsets.get(), rows + 1);
    spoil(wide.get(), nse);
    spoil(narrow.get(), nse);
    spoil(row_order.get(), rows);
    spoil(permutation.get(), nse);
    is_sound = false;
  }

  Pattern View(bool compact, bool permuted) const {
    Pattern view;
    view.rows = rows;
    view.columns = columns;
    view.nse = nse;
    view.index_type = compact ? IndexType::kUint16 : IndexType::kInt32;
    view.row_offsets.data = row_offsets.get();
    view.column_indices.data = compact ? static_cast<void*>(narrow.get()) : wide.get();
    view.row_order.data = row_order.get();
    if (permuted) view.permutation.data = permutation.get();
    return view;
  }
};

template <typename T>
void TestSpmm(Random& random, const TestPattern& pattern, int64_t n, Workers& workers,
              Table<CpuVariant<SpmmProblem>> table) {
  for (const bool left : {false, true}) {
    for (const bool compact : {false, true}) {
      for (const bool permuted : {false, true}) {
        const auto values = Values<T>(random, pattern.nse),
                   x = Values<T>(random, pattern.columns * n),
                   bias = Values<T>(random, pattern.rows);
        SpmmProblem p;
        p.pattern = pattern.View(compact, permuted);
        if (pattern.columns == 0) p.pattern.nse = 0;  // as the handler says
        p.n = n;
        p.dense_on_left = left;
        p.dtype = p.out_dtype = kDType<T>;
        p.activation = Activation::kRelu;
        p.values.data = values.get();
        p.x.data = x.get();
        p.bias.data = bias.get();
        for (const auto& variant : table) {
          if (!variant.fits(p)) continue;
          const auto out = Block<T>(pattern.rows * n), z = Block<T>(pattern.rows * n);
          p.out.data = out.get();
          p.preactivation.data = z.get();
          variant.launch(p, workers);
          if (!pattern.is_sound) continue;
          for (int64_t row = 0; row < pattern.rows; ++row) {
            for (int64_t column = 0; column < n; ++column) {
              double sum = ToFloat(bias[row]);
              for (int32_t i = pattern.row_offsets[row]; i < pattern.row_offsets[row + 1]; ++i) {
                const int64_t inner = pattern.wide[i];
                sum += double(ToFloat(values[permuted ? pattern.permutation[i] : i])) *
                       double(ToFloat(
                           x[left ? column * pattern.columns + inner : inner * n + column]));
              }
              const int64_t at = left ? column * pattern.rows + row : row * n + column;
              Expect(ToFloat(z[at]), sum, kTolerance<T>, variant.name);
              Expect(ToFloat(out[at]), std::max(sum, 0.0), kTolerance<T>, variant.name);
            }
          }
        }
      }
    }
  }
}

template <typename T>
void TestSddmm(Random& random, const TestPattern& pattern, int64_t d, Workers& workers,
               Table<CpuVariant<SddmmProblem>> table) {
  for (const bool compact : {false, true}) {
    const auto x = Values<T>(random, pattern.rows * d), y = Values<T>(random, pattern.columns * d),
               scale_by = Values<T>(random, pattern.nse);
    const auto out = Block<T>(pattern.nse);
    SddmmProblem p;
    p.pattern = pattern.View(compact, false);
    if (pattern.columns == 0) p.pattern.rows = 0;  // as the handler says
    p.d = d;
    p.dtype = p.out_dtype = kDType<T>;
    p.x.data = x.get();
    p.y.data = y.get();
    p.scale_by.data = scale_by.get();
    p.out.data = out.get();
    for (const auto& variant : table) {
      variant.launch(p, workers);
      if (!pattern.is_sound) continue;
      for (int64_t row = 0; row < pattern.rows; ++row) {
        for (int32_t i = pattern.row_offsets[row]; i < pattern.row_offsets[row + 1]; ++i) {
          double sum = 0;
          for (int64_t j = 0; j < d; ++j) {
            sum += double(ToFloat(x[row * d + j])) * double(ToFloat(y[pattern.wide[i] * d + j]));
          }
          Expect(ToFloat(out[i]), sum * double(ToFloat(scale_by[i])), kTolerance<T>, "sddmm");
        }
      }
      for (int64_t i = pattern.row_offsets[pattern.rows]; i < pattern.nse; ++i) {
        Expect(ToFloat(out[i]), 0, 0, "sddmm padding");
      }
    }
  }
}

template <typename T>
void TestSoftmax(Random& random, const TestPattern& pattern, Workers& workers,
                 Table<CpuVariant<SparseSoftmaxProblem>> table) {
  const auto values = Values<T>(random, pattern.nse), tangent = Values<T>(random, pattern.nse);
  const auto out = Block<T>(pattern.nse), slope = Block<T>(pattern.nse);
  SparseSoftmaxProblem p;
  p.pattern = pattern.View(false, false);
  p.scale = 0.7;
  p.dtype = kDType<T>;
  p.values.data = values.get();
  p.out.data = out.get();
  SparseSoftmaxProblem backward = p;
  backward.backward = true;
  backward.values.data = out.get();
  backward.tangent.data = tangent.get();
  backward.out.data = slope.get();
  for (const auto& variant : table) {
    variant.launch(p, workers);
    variant.launch(backward, workers);
    if (!pattern.is_sound) continue;
    for (int64_t row = 0; row < pattern.rows; ++row) {
      const int32_t begin = pattern.row_offsets[row], end = pattern.row_offsets[row + 1];
      double total = 0, product = 0;
      for (int32_t i = begin; i < end; ++i) total += std::exp(0.7 * double(ToFloat(values[i])));
      for (int32_t i = begin; i < end; ++i) {
        product += double(ToFloat(out[i])) * double(ToFloat(tangent[i]));
      }
      for (int32_t i = begin; i < end; ++i) {
        Expect(ToFloat(out[i]), std::exp(0.7 * double(ToFloat(values[i]))) / total, kTolerance<T>,
               "softmax");
        Expect(ToFloat(slope[i]),
               0.7 * double(ToFloat(out[i])) * (double(ToFloat(tangent[i])) - product),
               kTolerance<T>, "softmax derivative");
      }
    }
    for (int64_t i = pattern.row_offsets[pattern.rows]; i < pattern.nse; ++i) {
      Expect(ToFloat(out[i]), 0, 0, "softmax padding");
      Expect(ToFloat(slope[i]), 0, 0, "softmax derivative padding");
    }
  }
}

template <typename T>
void TestReduceRows(Random& random, const TestPattern& pattern, Workers& workers,
                    Table<CpuVariant<ReduceRowsProblem>> table) {
  const auto values = Values<T>(random, pattern.nse);
  const auto out = Block<T>(pattern.rows);
  ReduceRowsProblem p;
  p.pattern = pattern.View(false, false);
  p.dtype = kDType<T>;
  p.values.data = values.get();
  p.out.data = out.get();
  for (const Reduction reduction : {Reduction::kMaximum, Reduction::kLogSumExp}) {
    p.reduction = reduction;
    for (const auto& variant : table) {
      variant.launch(p, workers);
      if (!pattern.is_sound) continue;
      for (int64_t row = 0; row < pattern.rows; ++row) {
        double most = -INFINITY, sum = 0;
        for (int32_t i = pattern.row_offsets[row]; i < pattern.row_offsets[row + 1]; ++i) {
          most = std::max(most, double(ToFloat(values[i])));
          sum += std::exp(double(ToFloat(values[i])));
        }
        if (reduction == Reduction::kMaximum) {
          Expect(double(ToFloat(out[row])), most, 0, "maximum");
        } else {
          Expect(double(ToFloat(out[row])), std::log(sum), kTolerance<T>, "logsumexp");
        }
      }
    }
  }
}

template <typename T>
void TestAll(Random& random, const TestPattern& pattern, int64_t n, Workers& workers) {
  TestSpmm<T>(random, pattern, n, workers, JAXSPARSE_ISA::kSpmmCpuVariants);
  TestSddmm<T>(random, pattern, n, workers, JAXSPARSE_ISA::kSddmmCpuVariants);
  TestSoftmax<T>(random, pattern, workers, JAXSPARSE_ISA::kSparseSoftmaxCpuVariants);
  TestReduceRows<T>(random, pattern, workers, JAXSPARSE_ISA::kReduceRowsCpuVariants);
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  Random random{std::mt19937(1)};
  ThreadWorkers workers;
  int patterns = 0;
  for (const int64_t rows : {0, 1, 7, 33}) {
    for (const int64_t columns : {0, 1, 19, 260}) {
      for (const int64_t n : {0, 1, 2, 3, 5, 8, 17, 131}) {
        TestPattern pattern(random, rows, columns, n % 3);
        DispatchDType(static_cast<DType>(patterns++ % 4),
                      [&]<typename T>() { TestAll<T>(random, pattern, n, workers); });
        TestAll<float>(random, pattern, n, workers);
        pattern.Spoil(random);
        DispatchDType(static_cast<DType>(patterns % 4),
                      [&]<typename T>() { TestAll<T>(random, pattern, n, workers); });
      }
    }
  }
  // More entries in a row than the staging buffer holds.
  const TestPattern wide(random, 5, 3000, 1);
  TestAll<float>(random, wide, 1, workers);
  TestAll<float>(random, wide, 6, workers);
  TestAll<float16>(random, wide, 1, workers);
  TestAll<bfloat16>(random, wide, 6, workers);
  TestAttention(random);
  TestDepthwise(random);
  std::printf("%d patterns passed\n", patterns);
  return 0;
}
