// A softmax of random entries, or its derivative, and what it is in float64.
#pragma once

#include "device/operands.h"
#include "sparse_softmax/problem.h"

namespace jaxsparse {

constexpr double kScale = 0.7;

// Runs a kernel on rows of these lengths; arrays begin `first` elements behind an aligned place.
template <typename T, bool kBackward, typename Run>
void TestSoftmax(const std::vector<int>& lengths, int first, int padding, bool wrong,
                 const Run& run) {
  const auto rows = static_cast<int>(lengths.size());
  std::vector<int32_t> offsets{0}, order(lengths.size());
  for (int r = 0; r < rows; ++r) {
    offsets.push_back(offsets.back() + lengths[r]);
    order[r] = r;
  }
  const auto entries = [&](int r) { return offsets[r + 1] - offsets[r]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return entries(a) > entries(b); });
  const int nnz = offsets.back(), nse = nnz + padding;
  std::vector<T> values = Normal<T>(first + nse), tangent = Normal<T>(first + nse);
  // Some numbers are large, and most are not: kernels may tell them apart.
  for (int i = first; i < first + nnz && !kBackward; i += 431) {
    FromAccumulator(30 * ToAccumulator(values[i]), &values[i]);
  }
  for (int i = first + nnz; i < first + nse; ++i) values[i] = tangent[i] = FromFloat<T>(NAN);
  const float untouched = 77;
  std::vector<T> out(static_cast<size_t>(first + nse), FromFloat<T>(untouched));

  if (wrong) {
    Spoil(offsets);
    Spoil(order);
  }
  SparseSoftmaxProblem p;
  p.pattern.rows = rows;
  p.pattern.nse = nse;
  p.pattern.row_offsets = Of(offsets);
  p.pattern.row_order = Of(order);
  p.batch.count = 1;
  p.scale = kScale;
  p.backward = kBackward;
  p.values = Of(values, first);
  p.tangent = Of(tangent, first);
  p.out = Of(out, first);
  run(p, out);
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
      // An exponential is as exact as its argument, whose rounding grows with it, as that of a sum
      // does with its terms.
      const double of_sum = std::sqrt(offsets[r + 1] - offsets[r]) / 8;
      const double magnitude =
          kBackward ? std::fabs(kScale * x) * most : wanted * (max - kScale * x + of_sum);
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

}  // namespace jaxsparse
