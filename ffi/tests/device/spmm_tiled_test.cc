// The sparse-dense product tile by tile of an emulated GPU, against sums in float64.
#include "spmm/spmm_tiled.cu"

#include "device/spmm_operands.h"
#include "emulated/gpu.h"

namespace jaxsparse {

alignas(128) unsigned char spmm_parts[SpmmTiledBytes(8, 4)];

namespace {

template <typename T, typename Out, typename Index, int kVector, int kLanes, int kRows, int kAtOnce,
          bool kPermuted, SpmmTechnique kWithout = SpmmTechnique::kNone>
void Test(const SpmmSize& size, SpmmOptions options) {
  options.permuted = kPermuted;
  SpmmTest<T, Out, Index> test(size, options);
  SpmmProblem p = test.Problem();
  p.long_row = 100;
  const auto run = [&]<bool kBatched>() {
    SpmmTiled<T, Out, Index, kVector, kLanes, kRows, kAtOnce, kPermuted, kWithout, kBatched>(p);
  };
  emulated::Launch(3, kSpmmTiledThreads, [&] {
    if (size.batch > 1) {
      run.template operator()<true>();
    } else {
      run.template operator()<false>();
    }
  });
  test.Check();
}

// Of a tiling: rows fewer than a block takes, of one length and of very uneven ones, empty ones,
// and columns that are no multiple of a tile's.
template <typename T, typename Out, int kVector, int kLanes, int kRows, int kAtOnce>
void TestSizes() {
  const auto plain = [](const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, uint16_t, kVector, kLanes, kRows, kAtOnce, false>(size, options);
  };
  const auto permuted = [](const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, int32_t, kVector, kLanes, kRows, kAtOnce, true>(size, options);
  };
  constexpr int64_t kTile = kVector * kLanes;
  for (const SpmmSize& size :
       {SpmmSize{1, 1, kVector, 1.0}, SpmmSize{70, 130, kTile + kVector, 0.3},
        SpmmSize{37, 700, kTile, 0.02, 0.9}, SpmmSize{64, 360, kTile, 0.02, 0.9},
        SpmmSize{13, 0, kTile, 0.5}, SpmmSize{3, 300, kTile, 0.1, 0.97}}) {
    plain(size, {.preactivation = true});
    permuted(size, {.bias = true, .activation = Activation::kGelu});
  }
  const SpmmSize batch{18, 150, kTile + kVector, 0.1, 0.9, 3};
  plain(batch, {.bias = true, .preactivation = true, .lead = 1});
  plain(batch, {.shared_x = true, .own_patterns = true});
  permuted(batch, {.activation = Activation::kRelu, .shared_x = true, .lead = 2});
}

// Entries that are not in order, are no numbers, or are not of the matrix; and kernels without one
// of their techniques.
template <typename T, typename Out, int kVector, int kLanes, int kRows, int kAtOnce>
void TestDisorder() {
  const auto plain = [](const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, uint16_t, kVector, kLanes, kRows, kAtOnce, false>(size, options);
  };
  const auto permuted = [](const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, int32_t, kVector, kLanes, kRows, kAtOnce, true>(size, options);
  };
  constexpr int64_t kTile = kVector * kLanes;
  const SpmmSize batch{18, 150, kTile + kVector, 0.1, 0.9, 3};
  for (Disorder disorder : {Disorder::kShuffled, Disorder::kRepeated, Disorder::kNan,
                            Disorder::kInfinite, Disorder::kWrongIndices}) {
    plain({40, 150, kTile, 0.2}, {.disorder = disorder});
  }
  permuted({37, 200, kTile, 0.1, 0.9}, {.disorder = Disorder::kWrongIndices, .bias = true});
  permuted(batch, {.disorder = Disorder::kWrongIndices, .lead = 1});
  const auto without = [&]<SpmmTechnique kTechnique>() {
    Test<T, Out, uint16_t, kVector, kLanes, kRows, kAtOnce, false, kTechnique>(
        {37, 700, kTile, 0.02, 0.9}, {});
    Test<T, Out, int32_t, kVector, kLanes, kRows, kAtOnce, true, kTechnique>(batch, {.lead = 1});
    Test<T, Out, int32_t, kVector, kLanes, kRows, kAtOnce, false, kTechnique>(
        {40, 150, kTile, 0.2}, {.disorder = Disorder::kNan});
  };
  without.template operator()<SpmmTechnique::kOrder>();
  without.template operator()<SpmmTechnique::kUnrolledRest>();
  without.template operator()<SpmmTechnique::kLateScaling>();
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  // A row for each group, which may help another one; groups dealt to rows; all to one; more rows
  // than lanes of a warp.
  TestSizes<float, float, 4, 32, 8, 4>();
  TestSizes<float, float, 4, 32, 2, 8>();
  TestSizes<float, float, 4, 16, 1, 8>();
  TestSizes<float, float, 4, 1, 128, 4>();
  TestSizes<float, float, 1, 1, 8, 4>();
  TestSizes<float, float, 1, 4, 32, 8>();
  TestSizes<bfloat16, bfloat16, 8, 8, 16, 4>();
  TestSizes<float16, float, 2, 32, 2, 4>();
  TestSizes<float16, float16, 2, 8, 32, 8>();
  TestSizes<double, double, 2, 2, 32, 4>();
  TestDisorder<float, float, 4, 32, 8, 4>();
  TestDisorder<float, float, 4, 16, 1, 8>();
  TestDisorder<float16, float16, 2, 8, 32, 8>();
  std::puts("all results agree");
}
