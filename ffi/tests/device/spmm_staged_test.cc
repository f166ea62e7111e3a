// The sparse-dense product with x staged in shared memory, on an emulated GPU.
#include <cstring>

#include "device/spmm_operands.h"
#include "emulated/gpu.h"
#include "spmm/kernels/staged.cu"

namespace jaxsparse {

constexpr SpmmStagedConfig kLargest{.lanes = 32, .panel = 40, .warps = 20};
alignas(128) unsigned char spmm_stages[kLargest.SharedBytes()];

namespace {

template <typename T, typename Out, typename Index, int kLanes, int kRows, int kPanel, int kStages,
          int kWarps, bool kPrefetch, bool kPermuted>
void Test(const SpmmSize& size, SpmmOptions options, int blocks = 2) {
  constexpr SpmmStagedConfig kConfig{.lanes = kLanes,
                                     .rows = kRows,
                                     .panel = kPanel,
                                     .stages = kStages,
                                     .warps = kWarps,
                                     .prefetched = kPrefetch,
                                     .permuted = kPermuted};
  static_assert(kConfig.SharedBytes() <= sizeof(spmm_stages));
  options.permuted = kPermuted;
  SpmmTest<T, Out, Index> test(size, options);
  const SpmmProblem p = test.Problem();
  const auto run = [&] {
    std::memset(spmm_stages, 0xff, sizeof(spmm_stages));  // NaN that nothing must read
    emulated::Launch(blocks, kWarps * kWarp, [&] { SpmmStaged<T, Out, Index, kConfig>(p); });
  };
  run();
  test.Check();
  const bool several_tiles = size.batch * size.rows > blocks * kWarps * kRows;  // of a block
  if (options.disorder != Disorder::kNone || (size.density_of_longest == 0 && !several_tiles)) {
    return;
  }
  CheckRepeats("spmm", test.out(), run);
}

template <typename T, typename Out, int kLanes, int kRows, int kPanel, int kStages, int kWarps,
          bool kPrefetch>
struct Tests {
  static constexpr int64_t kVector = 16 / sizeof(T), kColumns = kLanes * kVector;

  static void Plain(const SpmmSize& size, const SpmmOptions& options, int blocks = 2) {
    Test<T, Out, uint16_t, kLanes, kRows, kPanel, kStages, kWarps, kPrefetch, false>(size, options,
                                                                                     blocks);
  }

  static void Permuted(const SpmmSize& size, const SpmmOptions& options, int blocks = 2) {
    Test<T, Out, int32_t, kLanes, kRows, kPanel, kStages, kWarps, kPrefetch, true>(size, options,
                                                                                   blocks);
  }

  static constexpr SpmmSize kSizes[] = {
      {1, 1, kVector, 1.0},
      {40, (2 * kStages + 1) * kPanel - 3, kColumns, 0.97},  // stages are filled thrice
      {37, 2 * kPanel, kColumns + kVector, 0.1},
      {45, 0, kVector, 0.5},
      {20, 13, 2 * kColumns, 0.9},
      {20, 600, kColumns - kVector, 0.03, 0.97},
      {kWarps * kRows + 5, kPanel + 7, kColumns, 0.2, 0, 2},  // a block has several tiles
      {23, 50, 2 * kVector - 1, 0.4},
      {19, kPanel + 9, kColumns + 3, 0.3}};
  // Whose rows are cut.
  static constexpr SpmmSize kUneven{2 * kWarps * kRows + 5, 300, kVector, 0.03, 0.97, 2};
  static constexpr SpmmSize kBatch{18, kPanel + 5, kColumns + kVector, 0.3, 0, 2};

  static void PlainSizes() {
    for (const SpmmSize& size : kSizes) Plain(size, {.preactivation = true});
    Plain(kUneven, {.own_patterns = true});
    Plain(kBatch, {.bias = true, .preactivation = true, .lead = 1});  // x is misaligned
    Plain(kBatch, {.bias = true, .shared_x = true});
  }

  static void PermutedSizes() {
    for (const SpmmSize& size : kSizes) {
      Permuted(size, {.bias = true, .activation = Activation::kGelu});
    }
    Permuted(kUneven, {.bias = true, .shuffled_rows = true});
    Permuted(kBatch, {.activation = Activation::kRelu, .shared_x = true, .lead = kVector / 2});
    Permuted(kBatch, {.bias = true, .shared_values = true, .shared_bias = true});
  }

  // Entries that are not in order, are no numbers, or are not of the matrix.
  static void Disordered() {
    Plain(kUneven, {.disorder = Disorder::kWrongIndices, .own_patterns = true});
    Permuted(kUneven, {.disorder = Disorder::kWrongIndices});
    for (Disorder disorder : {Disorder::kReversed, Disorder::kShuffled, Disorder::kRepeated,
                              Disorder::kNan, Disorder::kInfinite, Disorder::kWrongIndices}) {
      const SpmmSize size{20, 220, kColumns + 3 * kVector, 0.03, 1.0};
      Plain(size, {.disorder = disorder});
      Permuted(size,
               {.disorder = disorder,
                .bias = true,
                .activation = Activation::kRelu,
                .preactivation = true},
               1);
      Permuted({25, 60, 2 * kVector + 1, 0.2}, {.disorder = disorder});
    }
  }
};

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  // What is permuted is looked up apart from rows, lanes and panels: of most shapes one kernel is
  // enough.
  Tests<float, float, 32, 4, 40, 3, 16, false>::PlainSizes();
  Tests<float, float, 8, 4, 40, 2, 20, false>::PermutedSizes();
  Tests<float16, float, 16, 2, 40, 2, 16, false>::PlainSizes();
  Tests<float16, float16, 4, 4, 40, 3, 16, true>::PermutedSizes();
  using OfFloats = Tests<float, float, 8, 8, 72, 2, 16, false>;
  OfFloats::PlainSizes();
  OfFloats::PermutedSizes();
  OfFloats::Disordered();
  using OfHalves = Tests<bfloat16, bfloat16, 16, 1, 24, 3, 16, true>;
  OfHalves::PlainSizes();
  OfHalves::PermutedSizes();
  OfHalves::Disordered();
  std::puts("all results agree");
}
