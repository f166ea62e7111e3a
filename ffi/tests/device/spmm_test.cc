// The sparse-dense product on tensor cores of an emulated GPU, against sums in float64.
#include "device/operands.h"
#include "emulated/gpu.h"
#include "spmm/spmm_tensor_cores.cu"

namespace jaxsparse {

alignas(128) unsigned char spmm_stages[kSpmmStages * SpmmStageBytes(3, 128)];

namespace {

struct Size {
  int64_t rows, inner, n;
  double density;
};

template <typename T, typename Out, typename Index, int kColumns, bool kPermuted, bool kLeft>
void Test(const Size& size, Disorder disorder, bool bias) {
  std::bernoulli_distribution stored(size.density);
  std::vector<int32_t> offsets{0};
  std::vector<Index> columns;
  for (int64_t r = 0; r < size.rows; ++r) {
    const auto first = static_cast<std::ptrdiff_t>(columns.size());
    for (int64_t k = 0; k < size.inner; ++k) {
      if (r != size.rows / 2 && stored(generator)) {
        columns.push_back(static_cast<Index>(k));
        if (disorder == Disorder::kRepeated && k % 7 == 0) columns.push_back(static_cast<Index>(k));
      }
    }
    if (disorder == Disorder::kReversed) std::reverse(columns.begin() + first, columns.end());
    offsets.push_back(static_cast<int32_t>(columns.size()));
  }
  const auto nnz = static_cast<int64_t>(columns.size());
  columns.resize(columns.size() + 2);  // padding
  std::vector<int32_t> permutation(columns.size());
  for (size_t i = 0; i < permutation.size(); ++i) permutation[i] = static_cast<int32_t>(i);
  if (kPermuted) std::shuffle(permutation.begin(), permutation.end(), generator);
  std::vector<T> values = Normal<T>(nnz + 2), x = Normal<T>(size.inner * size.n);
  std::vector<T> offset = Normal<T>(size.rows);
  const float infinity = std::numeric_limits<float>::infinity();
  if (disorder == Disorder::kNan && !x.empty()) x[x.size() / 3] = FromFloat<T>(NAN);
  if (disorder == Disorder::kInfinite && !x.empty()) x[x.size() / 3] = FromFloat<T>(infinity);
  if (disorder == Disorder::kInfinite && nnz > 3) values[3] = FromFloat<T>(-infinity);
  // Their product is infinite, though planes of it are of both signs.
  if (disorder == Disorder::kHuge) {
    values[3] = FromFloat<T>(0x1.ffcp80f);
    x[kLeft ? 3 : 3 * size.n] = FromFloat<T>(0x1p80f);
  }
  std::vector<Out> out(static_cast<size_t>(size.rows * size.n));

  SpmmProblem p;
  p.pattern.rows = size.rows;
  p.pattern.columns = size.inner;
  p.pattern.nse = nnz + 2;
  p.pattern.row_offsets = Of(offsets);
  p.pattern.column_indices = Of(columns);
  if (kPermuted) p.pattern.permutation = Of(permutation);
  p.n = size.n;
  p.dense_on_left = kLeft;
  p.activation = bias ? Activation::kRelu : Activation::kNone;
  p.batch.count = 1;
  p.values = Of(values);
  p.x = Of(x);
  if (bias) p.bias = Of(offset);
  p.out = Of(out);
  emulated::Launch(2, kSpmmTensorThreads,
                   [&] { SpmmTensorCores<T, Out, Index, kColumns, kLeft>(p); });

  for (int64_t r = 0; r < size.rows; ++r) {
    for (int64_t c = 0; c < size.n; ++c) {
      double sum = 0, most = 0;
      for (int32_t i = offsets[r]; i < offsets[r + 1]; ++i) {
        const auto k = static_cast<int64_t>(columns[i]);
        const double product = double(ToAccumulator(values[kPermuted ? permutation[i] : i])) *
                               ToAccumulator(x[kLeft ? c * size.inner + k : k * size.n + c]);
        sum += product;
        most += std::fabs(product);
      }
      if (std::fabs(sum) > std::numeric_limits<float>::max()) sum = std::copysign(infinity, sum);
      if (bias) sum += ToAccumulator(offset[r]);
      if (bias && sum < 0) sum = 0;
      const double got = ToAccumulator(out[kLeft ? c * size.rows + r : r * size.n + c]);
      if (!IsClose<Out>(got, sum, most)) Fail("spmm", r, c, got, sum);
    }
  }
}

template <typename T, typename Out, int kColumns, bool kLeft>
void TestSizes() {
  for (const Size& size :
       {Size{1, 1, 1, 1.0}, Size{70, 130, 5, 0.6}, Size{37, 300, kColumns + 3, 0.1},
        Size{130, 0, 4, 0.5}, Size{65, 200, kColumns - 8, 0.95}}) {
    Test<T, Out, uint16_t, kColumns, false, kLeft>(size, Disorder::kNone, false);
    Test<T, Out, int32_t, kColumns, true, kLeft>(size, Disorder::kNone, true);
  }
  if (sizeof(T) == 4) {
    Test<T, Out, uint16_t, kColumns, false, kLeft>({3, 30, 20, 1.0}, Disorder::kHuge, true);
  }
  for (Disorder disorder :
       {Disorder::kReversed, Disorder::kRepeated, Disorder::kNan, Disorder::kInfinite}) {
    Test<T, Out, uint16_t, kColumns, false, kLeft>({40, 150, 20, 0.3}, disorder, false);
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  TestSizes<float, float, 32, false>();
  TestSizes<float, float, 128, false>();
  TestSizes<float, float, 64, true>();
  TestSizes<bfloat16, bfloat16, 64, false>();
  TestSizes<float16, float, 32, true>();
  std::puts("all results agree");
}
