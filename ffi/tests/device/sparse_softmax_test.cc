// The softmax with rows in registers on an emulated GPU, and its derivative, against float64.
#include "device/operands.h"
#include "emulated/gpu.h"
#include "sparse_softmax/kernels/registers.cu"

namespace jaxsparse {
namespace {

constexpr double kScale = 0.7;

// Rows of up to `longest` entries, some empty, some too long for registers; arrays begin `first`
// elements behind an aligned place.
template <typename T, int kLanes, int kVectors, bool kBackward>
void Test(int rows, int longest, int first, int padding, bool wrong = false) {
  std::vector<int32_t> offsets{0}, order(static_cast<size_t>(rows));
  std::uniform_int_distribution<int> length(-1, longest);
  for (int r = 0; r < rows; ++r) {
    offsets.push_back(offsets.back() + std::max(0, length(generator)));
    order[r] = r;
  }
  const auto entries = [&](int r) { return offsets[r + 1] - offsets[r]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return entries(a) > entries(b); });
  const int nnz = offsets.back(), nse = nnz + padding;
  std::vector<T> values = Normal<T>(first + nse), tangent = Normal<T>(first + nse);
  for (int i = first + nnz; i < first + nse; ++i) values[i] = tangent[i] = FromFloat<T>(NAN);
  const float untouched = 77;
  std::vector<T> out(static_cast<size_t>(first + nse), FromFloat<T>(untouched));

  if (wrong) {
    Spoil(offsets);
    Spoil(order);
  }
  SparseSoftmaxProblem p;
  p.pattern.rows = rows;
  p.pattern.columns = longest;
  p.pattern.nse = nse;
  p.pattern.row_offsets = Of(offsets);
  p.pattern.row_order = Of(order);
  p.batch.count = 1;
  p.scale = kScale;
  p.backward = kBackward;
  p.values = Of(values, first);
  p.tangent = Of(tangent, first);
  p.out = Of(out, first);
  constexpr SparseSoftmaxRegistersConfig kConfig{
      .lanes = kLanes, .vectors = kVectors, .backward = kBackward};
  emulated::Launch(3, kConfig.Threads(), [&] { SparseSoftmaxInRegisters<T, kConfig>(p); });
  if (wrong) return;  // nothing was out of bounds

  const auto number = [&](const std::vector<T>& x, int i) -> double {
    return ToAccumulator(x[first + i]);
  };
  for (int r = 0; r < rows; ++r) {
    double max = -std::numeric_limits<double>::infinity(), sum = 0, most = 0;
    for (int i = offsets[r]; i < offsets[r + 1]; ++i)
      max = std::max(max, kScale * number(values, i));
    for (int i = offsets[r]; i < offsets[r + 1]; ++i) {
      const double term = kBackward ? number(values, i) * number(tangent, i)
                                    : std::exp(kScale * number(values, i) - max);
      sum += term;
      most += std::fabs(term);
    }
    for (int i = offsets[r]; i < offsets[r + 1]; ++i) {
      const double x = number(values, i), got = number(out, i);
      const double wanted =
          kBackward ? kScale * x * (number(tangent, i) - sum) : std::exp(kScale * x - max) / sum;
      // An exponential is as exact as its argument, whose rounding grows with it.
      const double magnitude =
          kBackward ? std::fabs(kScale * x) * most : wanted * (max - kScale * x);
      if (!IsClose<T>(got, wanted, magnitude)) {
        Fail("softmax", r, i, got, wanted);
      }
    }
  }
  for (int i = -first; i < 0; ++i) {
    if (number(out, i) != untouched)
      Fail("in front of the softmax", -1, i, number(out, i), untouched);
  }
  for (int i = nnz; i < nse; ++i) {
    if (number(out, i) != 0) Fail("padding of the softmax", -1, i, number(out, i), 0);
  }
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
