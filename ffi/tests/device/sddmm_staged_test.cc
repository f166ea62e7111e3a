// The sampled dense-dense product with y staged in shared memory, on an emulated GPU.
#include "sddmm/sddmm_staged.cu"

#include <cstring>
#include <type_traits>

#include "device/sddmm_operands.h"
#include "emulated/gpu.h"

namespace jaxsparse {

alignas(128) unsigned char sddmm_ring[SddmmStagedBytes(1024, 2, 40, 2)];

namespace {

template <typename T, typename Out, typename Index, int kLanes, int kPieces, int kRows, int kPanel,
          int kStages, int kParts>
void Test(const SddmmSize& size, Disorder disorder, bool scaled, int64_t lead, int blocks) {
  static_assert(SddmmStagedBytes(kLanes * kPieces * 16, kRows, kPanel, kStages) <=
                sizeof(sddmm_ring));
  SddmmTest<T, Out, Index> test(size, disorder, scaled, lead);
  const SddmmProblem p = test.Problem();
  const auto run = [&] {
    std::memset(sddmm_ring, 0xff, sizeof(sddmm_ring));  // NaN that nothing must read
    emulated::Launch(blocks, kSddmmStagedThreads, [&] {
      SddmmStaged<T, Out, Index, kLanes, kPieces, kRows, kPanel, kStages, kParts>(p);
    });
  };
  run();
  test.Check();
  if (disorder != Disorder::kNone || size.density_of_longest == 0) return;
  CheckRepeats("sddmm", test.out(), run);
}

template <typename T, typename Out, int kLanes, int kPieces, int kRows, int kPanel, int kStages,
          int kParts>
void TestSizes() {
  constexpr int64_t kMost = kLanes * kPieces * 16 / sizeof(T), kVector = 16 / sizeof(T);
  const auto test = [](const SddmmSize& size, Disorder disorder, bool scaled, int64_t lead,
                       int blocks = 2) {
    using Index = std::conditional_t<kRows % 4 == 0, uint16_t, int32_t>;
    Test<T, Out, Index, kLanes, kPieces, kRows, kPanel, kStages, kParts>(size, disorder, scaled,
                                                                         lead, blocks);
  };
  test({1, 1, 1, 1.0}, Disorder::kNone, false, 1);
  // By bulk copies, which fill stages thrice.
  test({17, ((2 * kStages + 1) * kPanel - 3) * kParts, kMost, 0.95}, Disorder::kNone, true, 8);
  test({16 * kRows + 5, 30, kVector, 0.3}, Disorder::kNone, true, 1);  // x and y are misaligned
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
  TestSizes<float, float, 8, 4, 4, 40, 3, 1>();
  TestSizes<float, float, 2, 4, 8, 48, 2, 2>();
  TestSizes<bfloat16, bfloat16, 4, 4, 1, 36, 2, 4>();
  TestSizes<float16, float, 8, 8, 2, 40, 2, 1>();
  std::puts("all results agree");
}
