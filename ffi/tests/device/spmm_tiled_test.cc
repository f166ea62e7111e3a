// The sparse-dense product tile by tile of an emulated GPU, against sums in float64.
#include "device/spmm_operands.h"
#include "emulated/gpu.h"
#include "spmm/kernels/tiled.cu"

namespace jaxsparse {

alignas(128) unsigned char spmm_parts[kSpmmTiledThreads * 8 * 4];  // eight columns of float32

namespace {

template <typename T, typename Out, typename Index, SpmmTiledConfig kConfig>
void Test(const SpmmSize& size, SpmmOptions options) {
  static_assert(kConfig.SharedBytes(sizeof(T)) <= sizeof(spmm_parts));
  options.permuted = kConfig.permuted;
  SpmmTest<T, Out, Index> test(size, options);
  const SpmmTiledProblem p{test.Problem(), 100};
  emulated::Launch(3, kSpmmTiledThreads, [&] { SpmmTiled<T, Out, Index, kConfig>(p); });
  test.Check();
}

template <typename T, typename Out, int kVector, int kLanes, int kRows, int kAtOnce>
struct Tests {
  static constexpr int64_t kTile = kVector * kLanes;

  static constexpr SpmmTiledConfig Config(bool permuted, bool batched,
                                          SpmmTechnique without = SpmmTechnique::kNone) {
    return {.vector = kVector,
            .lanes = kLanes,
            .rows = kRows,
            .at_once = kAtOnce,
            .permuted = permuted,
            .without = without,
            .batched = batched};
  }

  // Where a batch entry is stands apart from the tiling: of each tiling one kernel is for batches.
  static void Plain(const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, uint16_t, Config(false, false)>(size, options);
  }
  static void Permuted(const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, int32_t, Config(true, true)>(size, options);
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
    Plain({18, 150, kTile + kVector, 0.1, 0.9}, {.bias = true, .preactivation = true, .lead = 1});
    const SpmmSize batch{18, 150, kTile + kVector, 0.1, 0.9, 3};
    Permuted(batch, {.bias = true, .own_patterns = true, .lead = 1});
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
    Test<T, Out, uint16_t, Config(false, true)>(batch, {.shared_x = true, .own_patterns = true});
    Permuted({37, 200, kTile, 0.1, 0.9}, {.disorder = Disorder::kWrongIndices, .bias = true});
    Permuted(batch, {.disorder = Disorder::kWrongIndices, .lead = 1});
    const auto without = [&]<SpmmTechnique kTechnique>() {
      Test<T, Out, uint16_t, Config(false, false, kTechnique)>({37, 700, kTile, 0.02, 0.9}, {});
      Test<T, Out, uint16_t, Config(false, false, kTechnique)>({40, 150, kTile, 0.2},
                                                               {.disorder = Disorder::kNan});
      Test<T, Out, int32_t, Config(true, true, kTechnique)>(batch, {.lead = 1});
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
