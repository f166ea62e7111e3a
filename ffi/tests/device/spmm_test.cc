// The sparse-dense product on tensor cores of an emulated GPU, against sums in float64.
#include "device/spmm_operands.h"
#include "emulated/gpu.h"
#include "spmm/spmm_tensor_cores.cu"

namespace jaxsparse {

alignas(128) unsigned char spmm_stages[kSpmmStages * SpmmStageBytes(3, 128)];

namespace {

template <typename T, typename Out, typename Index, int kColumns, bool kPermuted, bool kLeft>
void Test(const SpmmSize& size, SpmmOptions options) {
  options.permuted = kPermuted;
  options.left = kLeft;
  SpmmTest<T, Out, Index> test(size, options);
  const SpmmProblem p = test.Problem();
  emulated::Launch(2, kSpmmTensorThreads,
                   [&] { SpmmTensorCores<T, Out, Index, kColumns, kLeft>(p); });
  test.Check();
}

template <typename T, typename Out, int kColumns, bool kLeft>
void TestSizes() {
  for (const SpmmSize& size :
       {SpmmSize{1, 1, 1, 1.0}, SpmmSize{70, 130, 5, 0.6}, SpmmSize{37, 300, kColumns + 3, 0.1},
        SpmmSize{130, 0, 4, 0.5}, SpmmSize{65, 200, kColumns - 8, 0.95}}) {
    Test<T, Out, uint16_t, kColumns, false, kLeft>(size, {.preactivation = true});
    Test<T, Out, int32_t, kColumns, true, kLeft>(size,
                                                 {.bias = true, .activation = Activation::kGelu});
  }
  if (sizeof(T) == 4) {
    Test<T, Out, uint16_t, kColumns, false, kLeft>(
        {3, 30, 20, 1.0},
        {.disorder = Disorder::kHuge, .bias = true, .activation = Activation::kRelu});
  }
  for (Disorder disorder : {Disorder::kReversed, Disorder::kShuffled, Disorder::kRepeated,
                            Disorder::kNan, Disorder::kInfinite}) {
    Test<T, Out, uint16_t, kColumns, false, kLeft>({40, 150, 20, 0.3}, {.disorder = disorder});
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  TestSizes<float, float, 32, false>();
  TestSizes<float, float, 128, false>();
  TestSizes<float, float, 64, true>();
  TestSizes<bfloat16, bfloat16, 64, false>();
  TestSizes<float16, float, 32, true>();
  std::puts("all results agree");
}
