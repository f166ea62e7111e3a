// What an operation applies to its sums, by vectors.
#pragma once

#include <cmath>

#include "cpu/simd.h"
#include "cuda/activation.h"

namespace jaxsparse {

// x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3))) / 2, written as x * sigmoid of twice the
// argument.
template <int kLanes, typename Acc>
JAXSPARSE_INLINE Vector<Acc, kLanes> Gelu(Vector<Acc, kLanes> x) {
  const auto u = x * (Acc(1.5957691216057308) + Acc(0.071354816272600245) * x * x);
  if constexpr (sizeof(Acc) == 4) {
    return x / (Exp<kLanes>(-u) + 1.0f);
  } else {
    Vector<Acc, kLanes> y;
    for (int l = 0; l < kLanes; ++l) y[l] = x[l] / (1 + std::exp(-u[l]));
    return y;
  }
}

template <int kLanes, typename Acc>
JAXSPARSE_INLINE Vector<Acc, kLanes> Activate(Activation activation, Vector<Acc, kLanes> x) {
  switch (activation) {
    case Activation::kRelu:
      return x < Acc(0) ? Vector<Acc, kLanes>{} : x;  // keeps NaN
    case Activation::kGelu:
      return Gelu<kLanes, Acc>(x);
    default:
      return x;
  }
}

}  // namespace jaxsparse
