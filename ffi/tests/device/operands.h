// Random operands of kernels on an emulated GPU, and how their results are compared with float64.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <vector>

#include "common/device.cuh"

namespace jaxsparse {

inline std::mt19937 generator(0);

template <typename T>
T FromFloat(float x) {
  T y;
  FromAccumulator(Accumulator<T>(x), &y);
  return y;
}

template <typename T>
std::vector<T> Normal(int64_t size) {
  std::normal_distribution<float> normal;
  std::vector<T> x(static_cast<size_t>(size));
  for (T& element : x) element = FromFloat<T>(normal(generator));
  return x;
}

// From element `first` on, batch entries `stride` apart.
template <typename T>
Array Of(std::vector<T>& x, int64_t first = 0, int64_t stride = 0) {
  Array array;
  array.data = x.data() + first;
  array.strides[0] = stride;
  return array;
}

// What may be odd about a pattern or its operands.
enum class Disorder {
  kNone,
  kReversed,
  kShuffled,
  kRepeated,
  kNan,
  kInfinite,
  kHuge,
  kWrongOffsets
};

// `most`: the sum of the absolute values of what was added up.
template <typename Out>
bool IsClose(double got, double wanted, double most) {
  const double rounding = sizeof(Out) == 2 ? 0x1p-8 : sizeof(Out) == 4 ? 0x1p-21 : 0x1p-50;
  if (std::isnan(wanted)) return std::isnan(got);
  if (std::isinf(wanted)) return got == wanted;
  return std::fabs(got - wanted) <= rounding * (most + std::fabs(wanted)) + 1e-30;
}

[[noreturn]] inline void Fail(const char* what, int64_t row, int64_t column, double got,
                              double wanted) {
  std::fprintf(stderr, "%s: (%ld, %ld) is %.9g, not %.9g\n", what, long(row), long(column), got,
               wanted);
  std::exit(1);
}

}  // namespace jaxsparse
