// What the code that jaxsparse/codegen/printer.py prints relies on. CUDA's own functions are called
// by their names where they mean what XLA means; the rest is here: XLA's rules for NaN and for
// integers, rounding to narrower types, and the two functions that recurrent cells spend their time
// in. With the headers of tests/emulated a host compiler takes it, too, so that the numbers can be
// tested without a GPU.
#pragma once

#include "cuda/arithmetic_instructions.cuh"

namespace jaxsparse::pointwise {

__device__ __forceinline__ float FromBits(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned ToBits(float x) { return __float_as_uint(x); }

// tanh to about 2 ulp everywhere, by two instructions of the special function unit and no branch.
//
// From |x| = 1 on it is 1 - 2 / (exp(2|x|) + 1). That loses digits as x falls, so below 1 it is an
// odd polynomial, which costs no time: it runs while the special functions do. Errors, of all
// floats: the polynomial 0.94 ulp; the other side 1.32 ulp with an exact exponential and
// reciprocal, and 2.18 with these off by 2 ulp and 1 ulp in whatever direction is worst.
//
// Choices not taken. tanhf is the same scheme with a shorter polynomial, up to 0.6: as fast, and up
// to 3.3 ulp by the same count. tanh.approx.f32 is one instruction and has 11 bits: an error of
// 5e-4 in a state that is fed back at every step. expf would spend five instructions on a product
// by log2(e) that is exact for large arguments; here the result is 1 from |x| = 9 on, and a product
// rounded once is enough.
__device__ __forceinline__ float Tanh(float x) {
  const float square = x * x;
  float p = -0x1.77dd2ap-12f;
  p = fmaf(p, square, 0x1.2da4f4p-9f);
  p = fmaf(p, square, -0x1.0460c4p-7f);
  p = fmaf(p, square, 0x1.600992p-6f);
  p = fmaf(p, square, -0x1.b96222p-5f);
  p = fmaf(p, square, 0x1.110be2p-3f);
  p = fmaf(p, square, -0x1.55553cp-2f);
  const float small = fmaf(p * square, x, x);
  const float power = ApproximateExp2(fabsf(x) * 0x1.715476p+1f);  // infinity gives 1 below
  const float large = fmaf(-2.0f, ApproximateReciprocal(power + 1.0f), 1.0f);
  return copysignf(fabsf(x) < 1.0f ? small : large, x);  // -0 keeps its sign, NaN is large
}

// 1 / (1 + exp(-x)), as XLA computes it: to 2.5 ulp with an exact reciprocal, which here may be off
// by one more. An exponential that overflows gives 0, as it should; results below 2^-126 are 0.
//
// expf and not __expf: the latter multiplies by log2(e) in one rounding, which at x = -80 is an
// error of 20 ulp. The reciprocal is approximate because division branches. By way of tanh(x / 2)
// small results would have absolute accuracy only.
__device__ __forceinline__ float Logistic(float x) {
  return ApproximateReciprocal(1.0f + expf(-x));
}

// Forms of about 11 bits, of instructions of the special function unit.
__device__ __forceinline__ float ApproximateDivide(float x, float y) {
  return x * ApproximateReciprocal(y);
}
__device__ __forceinline__ float ApproximateExp2(float x) { return jaxsparse::ApproximateExp2(x); }
__device__ __forceinline__ float ApproximateExp(float x) {
  return ApproximateExp2(x * 0x1.715476p+0f);
}
__device__ __forceinline__ float ApproximateLog2(float x) { return jaxsparse::ApproximateLog2(x); }
__device__ __forceinline__ float ApproximateLog(float x) {
  return ApproximateLog2(x) * 0x1.62e43p-1f;
}
// Below 2^-8 by its series, of which the sum with 1 would lose digits.
__device__ __forceinline__ float ApproximateLog1p(float x) {
  return fabsf(x) < 0x1p-8f ? fmaf(-0.5f * x, x, x) : ApproximateLog(1.0f + x);
}
__device__ __forceinline__ float ApproximateLogistic(float x) {
  return ApproximateReciprocal(1.0f + ApproximateExp(-x));
}
__device__ __forceinline__ float ApproximateTanh(float x) { return jaxsparse::ApproximateTanh(x); }

__device__ __forceinline__ float Rsqrt(float x) { return rsqrtf(x); }

// M. Giles, Approximating the erfinv function, 2010, as in XLA. The logarithm is of 1 - x^2 rounded
// once: of 1 - round(x^2) nothing is left near 1.
__device__ __forceinline__ float ErfInv(float x) {
  float w = -logf(fmaf(-x, x, 1.0f));
  float p;
  if (w < 5.0f) {
    w -= 2.5f;
    p = 2.81022636e-08f;
    p = fmaf(p, w, 3.43273939e-07f);
    p = fmaf(p, w, -3.5233877e-06f);
    p = fmaf(p, w, -4.39150654e-06f);
    p = fmaf(p, w, 0.00021858087f);
    p = fmaf(p, w, -0.00125372503f);
    p = fmaf(p, w, -0.00417768164f);
    p = fmaf(p, w, 0.246640727f);
    p = fmaf(p, w, 1.50140941f);
  } else {
    w = sqrtf(w) - 3.0f;
    p = -0.000200214257f;
    p = fmaf(p, w, 0.000100950558f);
    p = fmaf(p, w, 0.00134934322f);
    p = fmaf(p, w, -0.00367342844f);
    p = fmaf(p, w, 0.00573950773f);
    p = fmaf(p, w, -0.0076224613f);
    p = fmaf(p, w, 0.00943887047f);
    p = fmaf(p, w, 1.00167406f);
    p = fmaf(p, w, 2.83297682f);
  }
  return fabsf(x) == 1.0f ? x * FromBits(0x7f800000u) : p * x;
}

__device__ __forceinline__ float Max(float a, float b) { return MaxOrNan(a, b); }
__device__ __forceinline__ float Min(float a, float b) { return MinOrNan(a, b); }

__device__ __forceinline__ float Sign(float x) {
  return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x;  // NaN and both zeros are their own signs
}

__device__ __forceinline__ bool IsFinite(float x) { return fabsf(x) <= 0x1.fffffep+127f; }

// x to a power that is known: products of squares, and the reciprocal of that for negative powers.
template <int kPower>
__device__ __forceinline__ float IntegerPow(float x) {
  if constexpr (kPower < 0) {
    return 1.0f / IntegerPow<-kPower>(x);
  } else if constexpr (kPower == 0) {
    return 1.0f;
  } else if constexpr (kPower == 1) {
    return x;
  } else if constexpr (kPower % 2 == 0) {
    return IntegerPow<kPower / 2>(x * x);
  } else {
    return x * IntegerPow<kPower - 1>(x);
  }
}

// To the nearest of a type with fewer bits, ties to even. As in XLA that type has no subnormal
// numbers, and has infinity and NaN.
template <int kExponentBits, int kMantissaBits>
__device__ __forceinline__ float ReducePrecision(float x) {
  unsigned bits = ToBits(x);
  if constexpr (kMantissaBits < 23) {
    constexpr unsigned kLast = 1u << (23 - kMantissaBits);
    bits += (kLast >> 1) - 1u + ((bits / kLast) & 1u);
    bits &= ~(kLast - 1u);
  }
  if constexpr (kExponentBits < 8) {
    constexpr unsigned kBias = (1u << (kExponentBits - 1)) - 1u;
    const unsigned exponent = bits & 0x7f800000u, sign = bits & 0x80000000u;
    if (exponent > (127u + kBias) << 23) bits = sign | 0x7f800000u;
    if (exponent <= (127u - kBias) << 23) bits = sign;
  }
  return x != x ? x : FromBits(bits);
}

__device__ __forceinline__ float RoundToBFloat16(float x) {
  return FromBits(static_cast<unsigned>(BfloatOfFloat(x)) << 16);
}

__device__ __forceinline__ float RoundToFloat16(float x) { return FloatOfHalf(HalfOfFloat(x)); }

// Towards 0, to the nearest integer that there is; NaN is 0.
__device__ __forceinline__ int ToInt(float x) { return __float2int_rz(x); }
__device__ __forceinline__ unsigned ToUnsigned(float x) { return __float2uint_rz(x); }

// Integers, int or unsigned, wrap around; dividing by 0 is defined as in XLA.

template <typename T>
__device__ __forceinline__ T Add(T a, T b) {
  return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
}

template <typename T>
__device__ __forceinline__ T Subtract(T a, T b) {
  return static_cast<T>(static_cast<unsigned>(a) - static_cast<unsigned>(b));
}

template <typename T>
__device__ __forceinline__ T Multiply(T a, T b) {
  return static_cast<T>(static_cast<unsigned>(a) * static_cast<unsigned>(b));
}

template <typename T>
__device__ __forceinline__ T Negate(T x) {
  return Subtract(T{0}, x);
}

__device__ __forceinline__ int Divide(int a, int b) {
  return b == 0 ? -1 : b == -1 ? Negate(a) : a / b;
}
__device__ __forceinline__ unsigned Divide(unsigned a, unsigned b) {
  return b == 0u ? 0xffffffffu : a / b;
}

__device__ __forceinline__ int Remainder(int a, int b) { return b == 0 ? a : b == -1 ? 0 : a % b; }
__device__ __forceinline__ unsigned Remainder(unsigned a, unsigned b) {
  return b == 0u ? a : a % b;
}

__device__ __forceinline__ int Max(int a, int b) { return a > b ? a : b; }
__device__ __forceinline__ unsigned Max(unsigned a, unsigned b) { return a > b ? a : b; }
__device__ __forceinline__ int Min(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ unsigned Min(unsigned a, unsigned b) { return a < b ? a : b; }
__device__ __forceinline__ int Abs(int x) { return x < 0 ? Negate(x) : x; }
__device__ __forceinline__ unsigned Abs(unsigned x) { return x; }
__device__ __forceinline__ int Sign(int x) { return (x > 0) - (x < 0); }
__device__ __forceinline__ unsigned Sign(unsigned x) { return x > 0u; }

// Shifts by 32 or more push all bits out.

template <typename T>
__device__ __forceinline__ T ShiftLeft(T x, T by) {
  const auto n = static_cast<unsigned>(by);
  return n > 31u ? T{0} : static_cast<T>(static_cast<unsigned>(x) << n);
}

template <typename T>
__device__ __forceinline__ T ShiftRightLogical(T x, T by) {
  const auto n = static_cast<unsigned>(by);
  return n > 31u ? T{0} : static_cast<T>(static_cast<unsigned>(x) >> n);
}

template <typename T>
__device__ __forceinline__ T ShiftRightArithmetic(T x, T by) {
  const auto n = static_cast<unsigned>(by);
  return static_cast<T>(static_cast<int>(x) >> (n > 31u ? 31u : n));
}

}  // namespace jaxsparse::pointwise
