// The sampled dense-dense product on tensor cores of an emulated GPU, against sums in float64.
#include <cstring>

#include "device/sddmm_operands.h"
#include "emulated/gpu.h"
#include "sddmm/sddmm_tensor_cores.cu"

namespace jaxsparse {

alignas(1024) unsigned char sddmm_shared[SddmmSharedBytes(3, 128)];

namespace {

template <typename T, typename Out, typename Index, int kInner, bool kScaled>
void Test(const SddmmSize& size, Disorder disorder, int64_t lead, int blocks = 3) {
  static_assert(SddmmSharedBytes(kPlanes<T>, kInner) <= sizeof(sddmm_shared));
  SddmmTest<T, Out, Index> test(size, disorder, kScaled, lead);
  SddmmProblem p = test.Problem();
  const PlaneTiles planes(size.columns, size.d, kInner, kPlanes<T>);
  std::vector<Packet<uint32_t, 4>> workspace(OwnEntries(p.batch, p.y) * planes.Bytes() / 16);
  p.workspace.data = reinterpret_cast<char*>(workspace.data());
  const auto run = [&] {
    // NaN that nothing must read.
    std::fill(workspace.begin(), workspace.end(), Packet<uint32_t, 4>{{~0u, ~0u, ~0u, ~0u}});
    std::memset(sddmm_shared, 0xff, sizeof(sddmm_shared));
    emulated::Launch(3, kPlanesThreads, [&] { SddmmPlanes<T, kInner>(p); });
    emulated::Launch(blocks, kSddmmTensorThreads,
                     [&] { SddmmTensorCores<T, Out, Index, kInner, kScaled>(p); });
  };
  run();
  test.Check();
  if (disorder != Disorder::kNone || size.rows < kSddmmTensorRows) return;
  const std::vector<Out> first = test.out();
  run();
  if (std::memcmp(first.data(), test.out().data(), first.size() * sizeof(Out)) != 0) {
    std::puts("sddmm: a second run differs");
    std::exit(1);
  }
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
  Test<T, Out, int32_t, kInner, true>({70, 140, 7, 0.2}, Disorder::kWrongOffsets, 8);
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
  // Several units of a block: rows of more tiles than a unit has, and more runs than one a block.
  Test<float, float, uint16_t, 32, true>({140, 2200, 20, 0.02}, Disorder::kNone, 8, 1);
  Test<float, float, int32_t, 64, false>({140, 2200, 33, 0.01, 1.0}, Disorder::kShuffled, 1, 2);
  // Batch entries that share y.
  Test<float, float, int32_t, 32, false>({150, 300, 32, 0.4, 0, true}, Disorder::kNone, 1);
  // Tiles without entries; as many columns as there can be.
  Test<bfloat16, float, int32_t, 32, true>({130, 3000, 32, 0.0005}, Disorder::kNone, 1, 2);
  Test<float16, float16, uint16_t, 32, false>({3, 65536, 2, 0.0001}, Disorder::kNone, 1);
  std::puts("all results agree");
}
