// The sampled dense-dense product with y staged in shared memory, on an emulated GPU.
#include <cstring>
#include <type_traits>

#include "device/sddmm_operands.h"
#include "emulated/gpu.h"
#include "sddmm/kernels/staged.cu"

namespace jaxsparse {

alignas(128) unsigned char sddmm_staged_memory[SddmmStagedConfig{
    .lanes = 8, .vectors = 8, .rows = 2, .panel = 40, .stages = 2}
                                                   .SharedBytes()];

namespace {

template <typename T, typename Out, typename Index, SddmmStagedConfig kConfig>
void Test(const SddmmSize& size, Disorder disorder, bool scaled, int64_t lead, int blocks) {
  static_assert(kConfig.SharedBytes() <= sizeof(sddmm_staged_memory));
  SddmmTest<T, Out, Index> test(size, disorder, scaled, lead);
  const SddmmProblem p = test.Problem();
  const auto run = [&] {
    std::memset(sddmm_staged_memory, 0xff,
                sizeof(sddmm_staged_memory));  // NaN that nothing must read
    emulated::Launch(blocks, kSddmmStagedThreads, [&] { SddmmStaged<T, Out, Index, kConfig>(p); });
  };
  run();
  test.Check();
  if (disorder != Disorder::kNone || size.density_of_longest == 0) return;
  CheckRepeats("sddmm", test.out(), run);
}

template <typename T, typename Out, SddmmStagedConfig kConfig>
void TestSizes() {
  constexpr int64_t kMost = kConfig.RowBytes() / sizeof(T), kVector = 16 / sizeof(T);
  const auto test = [](const SddmmSize& size, Disorder disorder, bool scaled, int64_t lead,
                       int blocks = 2) {
    using Index = std::conditional_t<kConfig.rows % 4 == 0, uint16_t, int32_t>;
    Test<T, Out, Index, kConfig>(size, disorder, scaled, lead, blocks);
  };
  test({1, 1, 1, 1.0}, Disorder::kNone, false, 1);
  // By bulk copies, which fill stages thrice.
  test({17, ((2 * kConfig.stages + 1) * kConfig.panel - 3) * kConfig.parts, kMost, 0.95},
       Disorder::kNone, true, 8);
  test({16 * kConfig.rows + 5, 30, kVector, 0.3}, Disorder::kNone, true,
       1);  // x and y are misaligned
  test({9, 0, kVector, 0.5}, Disorder::kNone, false, 8);
  test({0, 20, 3, 0.5}, Disorder::kNone, false, 8);
  test({20, 13, 0, 0.9}, Disorder::kNone, true, 8);
  test({7, 600, kMost - kVector, 0.03, 0.97}, Disorder::kNone, false, 8, 1);
  test({6, 75, kMost - 1, 0.3, 0.9}, Disorder::kNone, false, 8);
  for (Disorder disorder : {Disorder::kReversed, Disorder::kShuffled, Disorder::kRepeated,
                            Disorder::kNan, Disorder::kInfinite, Disorder::kWrongOffsets,
                            Disorder::kFallingOffsets, Disorder::kWrongIndices}) {
    test({20, 220, kMost - 2 * kVector, 0.03, 1.0}, disorder, true, 8);
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  TestSizes<float, float,
            SddmmStagedConfig{.lanes = 8, .vectors = 4, .rows = 4, .panel = 40, .stages = 3}>();
  TestSizes<float, float,
            SddmmStagedConfig{
                .lanes = 2, .vectors = 4, .rows = 8, .panel = 48, .stages = 2, .parts = 2}>();
  TestSizes<bfloat16, bfloat16,
            SddmmStagedConfig{
                .lanes = 4, .vectors = 4, .rows = 1, .panel = 36, .stages = 2, .parts = 4}>();
  TestSizes<float16, float,
            SddmmStagedConfig{.lanes = 8, .vectors = 8, .rows = 2, .panel = 40, .stages = 2}>();
  std::puts("all results agree");
}
