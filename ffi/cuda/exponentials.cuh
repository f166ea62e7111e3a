// What sums of exponentials are made of: exponentials of numbers less their maximum.
#pragma once

#include "cuda/device.cuh"

namespace jaxsparse {

// By its bits: compilers leave a division by 0 to each thread.
template <typename Acc>
constexpr Acc kInfinity = __builtin_bit_cast(float, 0x7f800000u);

template <typename Acc>
constexpr Acc kLeastFinite = Acc(-3.402823466e+38);
template <>
constexpr double kLeastFinite<double> = -1.7976931348623157e+308;

constexpr float kLog2E = 1.442695041f;

// The greater number; a NaN is skipped, and reaches the sum.
__device__ __forceinline__ float Greater(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double Greater(double a, double b) { return b > a ? b : a; }

// Of numbers that are at most 0, or next to it: as exact as such a number is.
__device__ __forceinline__ float Exponential(float x) { return ApproximateExp2(kLog2E * x); }
__device__ __forceinline__ double Exponential(double x) { return exp(x); }

}  // namespace jaxsparse
