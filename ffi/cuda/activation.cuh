// What an operation applies to its sums.
#pragma once

#include "cuda/activation.h"
#include "cuda/device.cuh"

namespace jaxsparse {

template <typename Acc>
__device__ __forceinline__ Acc Activate(Activation activation, Acc x) {
  if (activation == Activation::kRelu) return x < Acc(0) ? Acc(0) : x;  // keeps NaN
  if (activation == Activation::kGelu) {
    // x * (1 + tanh(u)) / 2 as x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3)
    return x / (Acc(1) + exp(-x * (Acc(1.5957691216057308) + Acc(0.071354816272600245) * x * x)));
  }
  return x;
}

}  // namespace jaxsparse
