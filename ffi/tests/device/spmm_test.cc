// The sparse-dense product on tensor cores of an emulated GPU, against sums in float64.
#include <cstring>

#include "device/spmm_operands.h"
#include "emulated/gpu.h"
#include "spmm/spmm_tensor_cores.cu"

namespace jaxsparse {

alignas(1024) unsigned char spmm_stages[SpmmTensorBytes(3, 128)];

namespace {

template <typename T, typename Out, typename Index, int kColumns, bool kPermuted>
void Test(const SpmmSize& size, SpmmOptions options) {
  static_assert(SpmmTensorBytes(kPlanes<T>, kColumns) <= sizeof(spmm_stages));
  options.permuted = kPermuted;
  SpmmTest<T, Out, Index> test(size, options);
  SpmmProblem p = test.Problem();
  std::memset(spmm_stages, 0xff, sizeof(spmm_stages));  // NaN that nothing must read
  const PlaneTiles planes(size.inner, size.n, kColumns, kPlanes<T>);
  std::vector<Packet<uint32_t, 4>> workspace(OwnEntries(p.batch, p.x) * planes.Bytes() / 16);
  std::fill_n(reinterpret_cast<char*>(workspace.data()), workspace.size() * 16, char(0xff));
  p.workspace.data = reinterpret_cast<char*>(workspace.data());
  emulated::Launch(3, kSpmmPlanesThreads, [&] { SpmmPlanes<T, kColumns>(p); });
  emulated::Launch(2, kSpmmTensorThreads,
                   [&] { SpmmTensorCores<T, Out, Index, kColumns, kPermuted>(p); });
  test.Check();
}

template <typename T, typename Out, int kColumns>
void TestSizes() {
  const auto plain = [](const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, uint16_t, kColumns, false>(size, options);
  };
  const auto permuted = [](const SpmmSize& size, const SpmmOptions& options) {
    Test<T, Out, int32_t, kColumns, true>(size, options);
  };
  for (const SpmmSize& size :
       {SpmmSize{1, 1, 1, 1.0}, SpmmSize{70, 130, 5, 0.6}, SpmmSize{37, 700, kColumns + 3, 0.1},
        SpmmSize{130, 0, 4, 0.5}, SpmmSize{65, 200, kColumns - 8, 0.95},
        SpmmSize{20, 600, 12, 0.03, 0.97}}) {
    plain(size, {.preactivation = true});
    permuted(size, {.bias = true, .activation = Activation::kGelu});
  }
  const SpmmSize batch{18, 150, kColumns + 4, 0.3, 0, 5};  // a block has several tiles
  plain(batch, {.bias = true, .preactivation = true, .lead = 1});
  permuted(batch, {.activation = Activation::kRelu, .shared_x = true, .lead = 2});
  if (sizeof(T) == 4) {
    plain({3, 30, 20, 1.0},
          {.disorder = Disorder::kHuge, .bias = true, .activation = Activation::kRelu});
  }
  for (Disorder disorder : {Disorder::kReversed, Disorder::kShuffled, Disorder::kRepeated,
                            Disorder::kNan, Disorder::kInfinite}) {
    plain({40, 150, 20, 0.3}, {.disorder = disorder});
    permuted({10, 70, 20, 0.9}, {.disorder = disorder});
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  TestSizes<float, float, 32>();
  TestSizes<float, float, 128>();
  TestSizes<bfloat16, bfloat16, 64>();
  TestSizes<float16, float, 32>();
  std::puts("all results agree");
}
