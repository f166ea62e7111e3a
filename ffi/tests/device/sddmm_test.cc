// The sampled dense-dense product on tensor cores of an emulated GPU, against sums in float64.
#include "device/sddmm_operands.h"
#include "emulated/gpu.h"
#include "sddmm/sddmm_tensor_cores.cu"

namespace jaxsparse {

alignas(128) unsigned char sddmm_shared[SddmmSharedBytes(3)];

namespace {

template <typename T, typename Out, typename Index, bool kKept>
void Test(const SddmmSize& size, Disorder disorder, bool scaled, int64_t lead) {
  SddmmTest<T, Out, Index> test(size, disorder, scaled, lead);
  const SddmmProblem p = test.Problem();
  emulated::Launch(3, kSddmmTensorThreads, [&] { SddmmTensorCores<T, Out, Index, kKept>(p); });
  test.Check();
}

template <typename T, typename Out, bool kKept>
void TestSizes() {
  const int64_t d = kKept ? 128 : 136;
  for (const SddmmSize& size :
       {SddmmSize{1, 1, 1, 1.0}, SddmmSize{70, 130, 5, 0.6}, SddmmSize{65, 131, d, 0.3},
        SddmmSize{37, 513, 3, 0.02}, SddmmSize{9, 128, 64, 1.0}, SddmmSize{12, 30, 0, 0.5},
        SddmmSize{0, 20, 3, 0.5}, SddmmSize{20, 0, 3, 0.5}}) {
    Test<T, Out, uint16_t, kKept>(size, Disorder::kNone, false, 1);
    Test<T, Out, int32_t, kKept>(size, Disorder::kNone, true, 8);
  }
  Test<T, Out, int32_t, kKept>({70, 140, 7, 0.2}, Disorder::kWrongOffsets, true, 8);
  if (sizeof(T) == 2) {  // as many columns as there can be
    Test<T, Out, uint16_t, kKept>({3, 65536, 2, 0.0001}, Disorder::kNone, false, 1);
  }
  for (Disorder disorder : {Disorder::kReversed, Disorder::kShuffled, Disorder::kRepeated,
                            Disorder::kNan, Disorder::kInfinite}) {
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
