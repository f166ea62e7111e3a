// The sparse-dense product with x staged in shared memory, on an emulated GPU.
#include "spmm/spmm_staged.cu"

#include <cstring>

#include "device/spmm_operands.h"
#include "emulated/gpu.h"

namespace jaxsparse {

alignas(128) unsigned char spmm_ring[SpmmStagedBytes(512, 16, 3)];

namespace {

template <typename T, typename Out, typename Index, int kLanes, int kRows, int kStages,
          bool kPermuted>
void Test(const SpmmSize& size, SpmmOptions options, int blocks = 2) {
  constexpr int kPanel = 16;
  static_assert(SpmmStagedBytes(kLanes * 16, kPanel, kStages) <= sizeof(spmm_ring));
  options.permuted = kPermuted;
  SpmmTest<T, Out, Index> test(size, options);
  const SpmmProblem p = test.Problem();
  const auto run = [&] {
    std::memset(spmm_ring, 0xff, sizeof(spmm_ring));  // NaN that nothing must read
    emulated::Launch(blocks, kSpmmStagedThreads, [&] {
      SpmmStaged<T, Out, Index, kLanes, kRows, kPanel, kStages, kPermuted>(p);
    });
  };
  run();
  test.Check();
  if (options.disorder != Disorder::kNone) return;
  const std::vector<Out> first = test.out();
  run();
  if (std::memcmp(first.data(), test.out().data(), first.size() * sizeof(Out)) != 0) {
    std::puts("spmm: a second run differs");
    std::exit(1);
  }
}

template <typename T, typename Out, int kLanes, int kRows, int kStages>
void TestSizes() {
  constexpr int64_t kVector = 16 / sizeof(T), kColumns = kLanes * kVector;
  for (const SpmmSize& size :
       {SpmmSize{1, 1, kVector, 1.0}, SpmmSize{70, 130, kColumns, 0.6},
        SpmmSize{37, 300, kColumns + kVector, 0.1}, SpmmSize{45, 0, kVector, 0.5},
        SpmmSize{20, 13, 2 * kColumns, 0.9}, SpmmSize{50, 700, kColumns - kVector, 0.03, 0.97},
        SpmmSize{16 * kRows + 5, 90, kColumns, 0.5, 0, 2}, SpmmSize{23, 50, 2 * kVector - 1, 0.4},
        SpmmSize{19, 75, kColumns + 3, 0.3, 0.9, 2}}) {
    Test<T, Out, uint16_t, kLanes, kRows, kStages, false>(size, {.preactivation = true});
    Test<T, Out, int32_t, kLanes, kRows, kStages, true>(size, {.bias = true});
  }
  for (Disorder disorder : {Disorder::kReversed, Disorder::kShuffled, Disorder::kRepeated,
                            Disorder::kNan, Disorder::kInfinite}) {
    const SpmmSize size{40, 400, kColumns + 3 * kVector, 0.1, 1.0};
    const SpmmSize odd{25, 120, 2 * kVector + 1, 0.2};
    Test<T, Out, uint16_t, kLanes, kRows, kStages, false>(size, {.disorder = disorder});
    Test<T, Out, uint16_t, kLanes, kRows, kStages, true>(odd, {.disorder = disorder});
    Test<T, Out, int32_t, kLanes, kRows, kStages, true>(
        size, {.disorder = disorder, .bias = true, .preactivation = true}, 1);
  }
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  TestSizes<float, float, 32, 4, 3>();
  TestSizes<float, float, 8, 8, 2>();
  TestSizes<bfloat16, bfloat16, 16, 1, 3>();
  TestSizes<float16, float, 16, 2, 2>();
  std::puts("all results agree");
}
