// The sampled dense-dense product on tensor cores of an emulated GPU, against sums in float64.
#include "device/operands.h"
#include "emulated/gpu.h"
#include "sddmm/sddmm_tensor_cores.cu"

namespace jaxsparse {

alignas(128) unsigned char sddmm_shared[SddmmSharedBytes(3)];

namespace {

struct Size {
  int64_t rows, columns, d;
  double density;
};

// Two batch entries; arrays begin `lead` elements behind an aligned place.
template <typename T, typename Out, typename Index, bool kKept>
void Test(const Size& size, Disorder disorder, bool scaled, int64_t lead) {
  constexpr int64_t kEntries = 2, kPadding = 5;
  std::bernoulli_distribution stored(size.density);
  std::vector<int32_t> offsets{0};
  std::vector<Index> columns(static_cast<size_t>(lead));
  for (int64_t r = 0; r < size.rows; ++r) {
    const auto first = static_cast<std::ptrdiff_t>(columns.size());
    for (int64_t c = 0; c < size.columns; ++c) {
      if (r != size.rows / 2 && stored(generator)) {
        columns.push_back(static_cast<Index>(c));
        if (disorder == Disorder::kRepeated && c % 7 == 0) columns.push_back(static_cast<Index>(c));
      }
    }
    if (disorder == Disorder::kReversed && r % 3 == 0)
      std::reverse(columns.begin() + first, columns.end());
    if (disorder == Disorder::kReversed && r % 3 == 1)
      std::shuffle(columns.begin() + first, columns.end(), generator);
    offsets.push_back(static_cast<int32_t>(columns.size()) - static_cast<int32_t>(lead));
  }
  const auto nnz = static_cast<int64_t>(columns.size()) - lead, nse = nnz + kPadding;
  for (int64_t i = 0; i < kPadding; ++i)
    columns.push_back(static_cast<Index>(-1));  // not to be read
  std::vector<T> x = Normal<T>(lead + kEntries * size.rows * size.d);
  std::vector<T> y = Normal<T>(lead + kEntries * size.columns * size.d);
  std::vector<T> scale = Normal<T>(lead + kEntries * nse);
  const float infinity = std::numeric_limits<float>::infinity();
  if (disorder == Disorder::kNan) x[x.size() / 3] = y[y.size() / 2] = FromFloat<T>(NAN);
  if (disorder == Disorder::kInfinite) {
    x[x.size() / 3] = FromFloat<T>(infinity);
    y[y.size() / 2] = FromFloat<T>(-infinity);
    // Finite, but no sum of planes; and with a product that is infinite.
    if (sizeof(T) == 4) x[x.size() / 4] = y[y.size() / 5] = FromFloat<T>(3.4e38f);
  }
  if (disorder == Disorder::kWrongOffsets) {
    offsets[size.rows / 3] = -7;
    offsets[size.rows / 2] = offsets[size.rows] = 1 << 30;
  }
  const float untouched = 77;
  std::vector<Out> out(static_cast<size_t>(lead + kEntries * nse), FromFloat<Out>(untouched));

  SddmmProblem p;
  p.pattern.rows = size.rows;
  p.pattern.columns = size.columns;
  p.pattern.nse = nse;
  p.pattern.row_offsets = Of(offsets);
  p.pattern.column_indices = Of(columns, lead, 0);
  p.d = size.d;
  p.batch.rank = 1;
  p.batch.count = p.batch.sizes[0] = kEntries;
  p.x = Of(x, lead, size.rows * size.d);
  p.y = Of(y, lead, size.columns * size.d);
  if (scaled) p.scale_by = Of(scale, lead, nse);
  p.out = Of(out, lead, nse);
  emulated::Launch(3, kSddmmTensorThreads, [&] { SddmmTensorCores<T, Out, Index, kKept>(p); });

  const float before = ToAccumulator(out[lead - 1]);
  if (before != untouched) Fail("sddmm", -1, -1, before, untouched);
  if (disorder == Disorder::kWrongOffsets) return;  // nothing was read or written out of bounds
  for (int64_t entry = 0; entry < kEntries; ++entry) {
    const T* of_x = x.data() + lead + entry * size.rows * size.d;
    const T* of_y = y.data() + lead + entry * size.columns * size.d;
    const auto check = [&](int64_t row, int64_t i, double sum, double most) {
      const int64_t at = lead + entry * nse + i;
      const double got = ToAccumulator(out[at]);
      if (!IsClose<Out>(got, sum, most)) Fail("sddmm", row, i, got, sum);
    };
    for (int64_t r = 0; r < size.rows; ++r) {
      for (int64_t i = offsets[r]; i < offsets[r + 1]; ++i) {
        const T* of_row = of_x + r * size.d;
        const T* of_column = of_y + static_cast<int64_t>(columns[lead + i]) * size.d;
        const double factor = scaled ? ToAccumulator(scale[lead + entry * nse + i]) : 1;
        float in_float = 0;
        double sum = 0, most = 0;
        for (int64_t d = 0; d < size.d; ++d) {
          const float a = ToAccumulator(of_row[d]), b = ToAccumulator(of_column[d]);
          in_float += a * b;
          sum += double(a) * b;
          most += std::fabs(double(a) * b);
        }
        // What overflows in float32 is infinite there.
        sum = (std::isfinite(in_float) ? sum : in_float) * factor;
        if (std::fabs(sum) > std::numeric_limits<float>::max()) sum = std::copysign(infinity, sum);
        check(r, i, sum, most * std::fabs(factor));
      }
    }
    for (int64_t i = nnz; i < nse; ++i) check(size.rows, i, 0, 0);
  }
}

template <typename T, typename Out, bool kKept>
void TestSizes() {
  const int64_t d = kKept ? 128 : 136;
  for (const Size& size :
       {Size{1, 1, 1, 1.0}, Size{70, 130, 5, 0.6}, Size{65, 131, d, 0.3}, Size{37, 513, 3, 0.02},
        Size{9, 128, 64, 1.0}, Size{12, 30, 0, 0.5}, Size{0, 20, 3, 0.5}, Size{20, 0, 3, 0.5}}) {
    Test<T, Out, uint16_t, kKept>(size, Disorder::kNone, false, 1);
    Test<T, Out, int32_t, kKept>(size, Disorder::kNone, true, 8);
  }
  Test<T, Out, int32_t, kKept>({70, 140, 7, 0.2}, Disorder::kWrongOffsets, true, 8);
  Test<T, Out, uint16_t, kKept>({3, 65536, 2, 0.0001}, Disorder::kNone, false, 1);
  for (Disorder disorder :
       {Disorder::kReversed, Disorder::kRepeated, Disorder::kNan, Disorder::kInfinite}) {
    Test<T, Out, uint16_t, kKept>({40, 200, 20, 0.3}, disorder, false, 8);
    Test<T, Out, int32_t, kKept>({66, 110, 34, 0.1}, disorder, true, 1);
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  TestSizes<float, float, true>();
  TestSizes<float, float, false>();
  TestSizes<bfloat16, bfloat16, true>();
  TestSizes<float16, float, false>();
  std::puts("all results agree");
}
