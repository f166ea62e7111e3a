// The sparse-dense product by units of about as many entries on an emulated GPU, against sums in
// float64.
#include "device/row_cuts.h"
#include "device/spmm_operands.h"
#include "emulated/gpu.h"
#include "spmm/kernels/split.cu"

namespace jaxsparse {
namespace {

template <typename T, typename Out, typename Index, SpmmSplitConfig kConfig>
void Test(const SpmmSize& size, SpmmOptions options) {
  options.permuted = kConfig.permuted;
  SpmmTest<T, Out, Index> test(size, options);
  SpmmProblem p = test.Problem();
  const int64_t own = options.own_patterns ? size.batch : 1;
  std::vector<int32_t> cuts = CutsOf(p.pattern, own);
  if (options.disorder == Disorder::kWrongIndices) Spoil(cuts);
  p.row_cuts = Of(cuts, 0, own > 1 ? static_cast<int64_t>(cuts.size()) / own : 0);
  p.workspace.bytes = size.batch * SpmmSplitBlocksDown(p, kConfig.Units()) * kSpmmPartsOfBlock *
                      size.n * static_cast<int64_t>(sizeof(Accumulator<T>));
  const auto space = SpaceFor(p.workspace.bytes + 15);
  p.workspace.data = reinterpret_cast<char*>(space.get());
  const auto run = [&](int blocks) {
    emulated::Launch(blocks, kConfig.Threads(), [&] { SpmmSplitRows<T, Out, Index, kConfig>(p); });
    emulated::Launch(blocks, kSpmmAddThreads, [&] { SpmmAddParts<T, Out, kConfig>(p); });
  };
  run(3);
  test.Check();
  if (!AreWrong(options.disorder)) CheckRepeats("split rows", test.out(), [&] { run(2); });
}

template <typename T, typename Out, int kVector, int kLanes, int kGroupUnits = 1, int kAtOnce = 8>
struct Tests {
  static constexpr int64_t kTile = kVector * kLanes;

  static constexpr SpmmSplitConfig Config(bool permuted) {
    return {.vector = kVector,
            .lanes = kLanes,
            .group_units = kGroupUnits,
            .at_once = kAtOnce,
            .permuted = permuted,
            .batched = permuted};
  }
  static void Plain(const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, uint16_t, Config(false)>(size, options);
  }
  static void Permuted(const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, int32_t, Config(true)>(size, options);
  }

  // A single entry; short rows; long ones between short ones, which many units and several blocks
  // have pieces of, and one behind the other; hardly any entries.
  static void Sizes() {
    for (const SpmmSize& size :
         {SpmmSize{1, 1, kVector, 1.0}, SpmmSize{70, 60, kTile + kVector, 0.3},
          SpmmSize{21, 2900, kTile, 0.01, 0.9}, SpmmSize{5, 1300, kTile, 0.8},
          SpmmSize{700, 40, kTile, 0.001}}) {
      Plain(size, {});
      Plain(size, {.preactivation = true});
      Permuted(size, {});
      Permuted(size, {.bias = true, .activation = Activation::kGelu});
    }
    const SpmmSize batch{18, 500, kTile + kVector, 0.1, 0.9, 3};
    Plain({18, 500, kTile + kVector, 0.1, 0.9}, {.bias = true, .preactivation = true, .lead = 1});
    Permuted(batch, {.bias = true, .own_patterns = true, .lead = 1});
    Permuted(batch, {.activation = Activation::kRelu, .shared_x = true, .lead = 2});
  }

  // Entries that are not in order, are no numbers, or are not of the matrix.
  static void Disordered() {
    for (Disorder disorder :
         {Disorder::kShuffled, Disorder::kRepeated, Disorder::kNan, Disorder::kInfinite,
          Disorder::kWrongOffsets, Disorder::kFallingOffsets, Disorder::kWrongIndices}) {
      Plain({18, 1500, kTile, 0.03, 0.9}, {.disorder = disorder});
    }
    Permuted({37, 500, kTile, 0.1, 0.9}, {.disorder = Disorder::kWrongIndices, .bias = true});
    Permuted({18, 150, kTile, 0.1, 0.9, 3}, {.disorder = Disorder::kWrongIndices, .lead = 1});
  }
};

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  Tests<float, float, 4, 4>::Sizes();
  Tests<float, float, 4, 4>::Disordered();
  Tests<float, float, 4, 4>::Plain({2, 9300, 16, 0.97}, {.bias = true});  // rows of many parts
  Tests<float, float, 4, 32, 2>::Sizes();
  Tests<float, float, 1, 1>::Sizes();
  Tests<bfloat16, bfloat16, 8, 8, 1, 16>::Sizes();
  Tests<float, float, 4, 8, 1, 16>::Sizes();
  Tests<float, float, 4, 8, 1, 16>::Disordered();
  Tests<float16, float, 2, 16>::Sizes();
  Tests<double, double, 2, 2>::Sizes();
  Tests<double, double, 2, 2>::Disordered();
  std::puts("all results agree");
}
