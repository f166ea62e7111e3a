// The sampled dense-dense product on tensor cores of an emulated GPU, against sums in float64.
#include <cstring>

#include "device/sddmm_operands.h"
#include "emulated/gpu.h"
#include "sddmm/kernels/tensor_cores.cu"

namespace jaxsparse {

alignas(1024) unsigned char sddmm_shared[SddmmTensorConfig{.inner = 128}.SharedBytes(3)];
int32_t found_starts[kPrepareBytes / 4];

namespace {

template <typename T, typename Out, typename Index, int kInner, bool kScaled>
void Test(const SddmmSize& size, Disorder disorder, int64_t lead, int blocks = 3,
          bool own_patterns = false) {
  constexpr SddmmTensorConfig kConfig{.inner = kInner, .scaled = kScaled};
  static_assert(kConfig.SharedBytes(kComponents<T>) <= sizeof(sddmm_shared));
  SddmmTest<T, Out, Index> test(size, disorder, kScaled, lead);
  SddmmProblem p = test.Problem(own_patterns);
  const auto run = [&] {
    const auto workspace = SpaceFor(PreparationOf<T, kInner>(p).Bytes());
    p.workspace.data = reinterpret_cast<char*>(workspace.get());
    std::memset(sddmm_shared, 0xff, sizeof(sddmm_shared));  // NaN that nothing must read
    emulated::Launch(3, kPrepareThreads, [&] { SddmmPrepare<T, Index, kConfig>(p); });
    emulated::Launch(blocks, kSddmmTensorThreads,
                     [&] { SddmmTensorCores<T, Out, Index, kConfig>(p); });
  };
  run();
  test.Check();
  if (own_patterns || disorder == Disorder::kShuffled || disorder == Disorder::kWrongIndices) {
    const auto found = PreparationOf<T, kInner>(p);
    const auto workspace = SpaceFor(found.Bytes());
    p.workspace.data = reinterpret_cast<char*>(workspace.get());
    emulated::Launch(3, kPrepareThreads, [&] { SddmmPrepare<T, Index, kConfig>(p); });
    auto given = GiveStarts(found, p.workspace, &p.pattern);
    if (disorder == Disorder::kWrongIndices) Spoil(given);
    std::fill(test.out().begin() + lead, test.out().end(), FromFloat<Out>(NAN));
    run();
    test.Check();
    p.pattern.tile_starts = {};
  }
  if (disorder != Disorder::kNone || size.rows < kSddmmTileRows) return;
  CheckRepeats("sddmm", test.out(), run);
}

template <typename T, typename Out, int kInner>
void TestSizes() {
  for (const SddmmSize& size :
       {SddmmSize{1, 1, 1, 1.0}, SddmmSize{70, 130, 5, 0.6}, SddmmSize{130, 131, kInner, 0.3},
        SddmmSize{37, 513, kInner - 12, 0.02}, SddmmSize{9, 128, kInner / 2 + 1, 1.0},
        SddmmSize{12, 30, 1, 0.5}, SddmmSize{0, 20, 3, 0.5}, SddmmSize{20, 0, 3, 0.5}}) {
    Test<T, Out, uint16_t, kInner, false>(size, Disorder::kNone, 1);
    Test<T, Out, int32_t, kInner, true>(size, Disorder::kNone, 8);
  }
}

// Entries that are not in order, are no numbers, or are not of the matrix.
template <typename T, typename Out, int kInner>
void TestDisorder() {
  Test<T, Out, int32_t, kInner, true>({70, 140, 7, 0.2}, Disorder::kWrongOffsets, 8);
  Test<T, Out, int32_t, kInner, true>({150, 300, 7, 0.2, 1.0}, Disorder::kWrongIndices, 8, 2, true);
  Test<T, Out, uint16_t, kInner, false>({70, 140, 7, 0.4}, Disorder::kWrongIndices, 1);
  Test<T, Out, int32_t, kInner, true>({70, 140, 7, 0.2}, Disorder::kFallingOffsets, 8);
  for (Disorder disorder : {Disorder::kReversed, Disorder::kShuffled, Disorder::kRepeated,
                            Disorder::kNan, Disorder::kInfinite}) {
    Test<T, Out, uint16_t, kInner, false>({40, 200, 20, 0.3}, disorder, 8);
    Test<T, Out, int32_t, kInner, true>({66, 310, kInner, 0.1}, disorder, 1, 2);
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  TestSizes<float, float, 32>();
  TestSizes<float, float, 128>();
  TestSizes<bfloat16, bfloat16, 64>();
  TestSizes<float16, float, 256>();
  TestDisorder<float, float, 32>();
  TestDisorder<bfloat16, bfloat16, 64>();
  // Several units of a block: rows of more tiles than a unit has, and more runs than one a block.
  Test<float, float, int32_t, 32, true>({140, 2200, 20, 0.02}, Disorder::kNone, 8, 1);
  Test<float, float, uint16_t, 128, false>({140, 2200, 33, 0.01, 1.0}, Disorder::kShuffled, 1, 2);
  // Batch entries that share y.
  Test<float, float, uint16_t, 32, false>({150, 300, 32, 0.4, 0, true}, Disorder::kNone, 1);
  // Patterns of their own; rows of many more entries in a tile than others have.
  Test<float, float, int32_t, 32, true>({150, 300, 30, 0.3}, Disorder::kNone, 1, 3, true);
  Test<float, float, int32_t, 32, true>({150, 300, 30, 0.1, 1.0}, Disorder::kRepeated, 8, 2, true);
  Test<bfloat16, float, int32_t, 32, true>({150, 300, 30, 0.1, 1.0}, Disorder::kNone, 8, 1);
  // Tiles without entries; as many columns as there can be.
  Test<bfloat16, float, int32_t, 32, true>({130, 3000, 32, 0.0005}, Disorder::kNone, 1, 2);
  Test<float16, float16, uint16_t, 32, false>({3, 65536, 2, 0.0001}, Disorder::kNone, 1);
  std::puts("all results agree");
}
