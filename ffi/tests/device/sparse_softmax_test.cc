// The softmax with rows in registers on an emulated GPU, and its derivative, against float64.
#include "device/sparse_softmax_operands.h"
#include "emulated/gpu.h"
#include "sparse_softmax/kernels/registers.cu"

namespace jaxsparse {
namespace {

// Rows of up to `longest` entries, some empty, some too long for registers.
template <typename T, int kLanes, int kVectors, bool kBackward>
void Test(int rows, int longest, int first, int padding, bool wrong = false) {
  std::vector<int> lengths(static_cast<size_t>(rows));
  std::uniform_int_distribution<int> length(-1, longest);
  for (int& of_row : lengths) of_row = std::max(0, length(generator));
  TestSoftmax<T, kBackward>(
      lengths, first, padding, wrong, [](const SparseSoftmaxProblem& p, const auto&) {
        constexpr SparseSoftmaxRegistersConfig kConfig{
            .lanes = kLanes, .vectors = kVectors, .backward = kBackward};
        emulated::Launch(3, kConfig.Threads(), [&] { SparseSoftmaxInRegisters<T, kConfig>(p); });
      });
}

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  for (int first : {0, 4, 1, 3}) {
    for (int padding : {0, 5}) {
      Test<float, 32, 8, false>(20, 400, first, padding);
      Test<float, 32, 8, true>(7, 1200, first, padding);
      Test<float, 4, 2, false>(33, 40, first, padding);
      Test<float, 1, 1, false>(70, 3, first, padding);
      Test<float, 1, 1, true>(70, 6, first, padding);
      Test<bfloat16, 8, 2, false>(31, 150, first, padding);
      Test<float16, 16, 2, false>(9, 260, first, padding);
      Test<double, 2, 4, true>(9, 30, first, padding);
      // Rows of a block.
      Test<float, 64, 8, false>(7, 2200, first, padding);
      Test<float, 128, 8, true>(8, 4300, first, padding);
      Test<bfloat16, 256, 8, true>(4, 17000, first, padding);
      Test<float16, 64, 8, false>(5, 4300, first, padding);
      Test<double, 128, 8, false>(0, 0, first, padding);
    }
  }
  for (int turn = 0; turn < 10; ++turn) {
    Test<float, 4, 2, false>(33, 40, turn % 5, 3, true);
    Test<bfloat16, 8, 2, true>(31, 150, turn % 3, 0, true);
    Test<float, 128, 8, true>(8, 4300, turn % 5, 1, true);
  }
  std::puts("all results agree");
}
