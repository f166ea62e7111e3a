// The sparse-dense product tile by tile of an emulated GPU, against sums in float64.
#include "device/spmm_operands.h"
#include "emulated/gpu.h"
#include "spmm/kernels/tiled.cu"

namespace jaxsparse {

alignas(128) unsigned char spmm_parts[kSpmmTiledThreads * 8 * 4];  // eight columns of float32

namespace {

template <typename T, typename Out, typename Index, int kVector, int kLanes, int kRows, int kAtOnce,
          bool kPermuted, SpmmTechnique kWithout = SpmmTechnique::kNone>
void Test(const SpmmSize& size, SpmmOptions options) {
  options.permuted = kPermuted;
  SpmmTest<T, Out, Index> test(size, options);
  const SpmmTiledProblem p{test.Problem(), 100};
  const auto run = [&]<bool kBatched>() {
    constexpr SpmmTiledConfig kConfig{.vector = kVector,
                                      .lanes = kLanes,
                                      .rows = kRows,
                                      .at_once = kAtOnce,
                                      .permuted = kPermuted,
                                      .without = kWithout,
                                      .batched = kBatched};
    static_assert(kConfig.SharedBytes(sizeof(T)) <= sizeof(spmm_parts));
    SpmmTiled<T, Out, Index, kConfig>(p);
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

template <typename T, typename Out, int kVector, int kLanes, int kRows, int kAtOnce>
struct Tests {
  static constexpr int64_t kTile = kVector * kLanes;

  static void Plain(const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, uint16_t, kVector, kLanes, kRows, kAtOnce, false>(size, options);
  }

  static void Permuted(const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, int32_t, kVector, kLanes, kRows, kAtOnce, true>(size, options);
  }

  // Of a tiling: rows fewer than a block takes, of one length and of very uneven ones, empty ones,
  // and columns that are no multiple of a tile's.
  static void Sizes() {
    for (const SpmmSize& size :
         {SpmmSize{1, 1, kVector, 1.0}, SpmmSize{70, 130, kTile + kVector, 0.3},
          SpmmSize{37, 700, kTile, 0.02, 0.9}, SpmmSize{64, 360, kTile, 0.02, 0.9},
          SpmmSize{13, 0, kTile, 0.5}, SpmmSize{3, 300, kTile, 0.1, 0.97}}) {
      Plain(size, {.preactivation = true});
      Permuted(size, {.bias = true, .activation = Activation::kGelu});
    }
    const SpmmSize batch{18, 150, kTile + kVector, 0.1, 0.9, 3};
    Plain(batch, {.bias = true, .preactivation = true, .lead = 1});
    Plain(batch, {.shared_x = true, .own_patterns = true});
    Permuted(batch, {.activation = Activation::kRelu, .shared_x = true, .lead = 2});
  }

  // Entries that are not in order, are no numbers, or are not of the matrix; and kernels without
  // one of their techniques.
  static void Disordered() {
    const SpmmSize batch{18, 150, kTile + kVector, 0.1, 0.9, 3};
    for (Disorder disorder : {Disorder::kShuffled, Disorder::kRepeated, Disorder::kNan,
                              Disorder::kInfinite, Disorder::kWrongIndices}) {
      Plain({40, 150, kTile, 0.2}, {.disorder = disorder});
    }
    Permuted({37, 200, kTile, 0.1, 0.9}, {.disorder = Disorder::kWrongIndices, .bias = true});
    Permuted(batch, {.disorder = Disorder::kWrongIndices, .lead = 1});
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
};

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  // A row for each group, which may help another one; groups shared out to rows; all to one; more
  // rows than lanes of a warp.
  Tests<float, float, 4, 32, 8, 4>::Sizes();
  Tests<float, float, 4, 32, 2, 8>::Sizes();
  Tests<float, float, 4, 16, 1, 8>::Sizes();
  Tests<float, float, 4, 1, 128, 4>::Sizes();
  Tests<float, float, 1, 1, 8, 4>::Sizes();
  Tests<float, float, 1, 4, 32, 8>::Sizes();
  Tests<bfloat16, bfloat16, 8, 8, 16, 4>::Sizes();
  Tests<float16, float, 2, 32, 2, 4>::Sizes();
  Tests<float16, float16, 2, 8, 32, 8>::Sizes();
  Tests<double, double, 2, 2, 32, 4>::Sizes();
  Tests<float, float, 4, 32, 8, 4>::Disordered();
  Tests<float, float, 4, 16, 1, 8>::Disordered();
  Tests<float16, float16, 2, 8, 32, 8>::Disordered();
  std::puts("all results agree");
}
