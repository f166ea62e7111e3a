// ffi/cuda/arithmetic_instructions.cuh on a host.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "emulated/intrinsics.h"
#include "types.h"

namespace jaxsparse {

inline float FloatOfHalf(uint16_t bits) {
  return static_cast<float>(std::bit_cast<_Float16>(bits));
}
// All that is not a number becomes the same one, whatever its sign, as on a GPU.
inline uint16_t HalfOfFloat(float x) {
  return std::isnan(x) ? uint16_t{0x7fff} : std::bit_cast<uint16_t>(static_cast<_Float16>(x));
}
inline float FloatOfBfloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}
inline uint16_t BfloatOfFloat(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>(std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint32_t BfloatsOfFloats(float low, float high) {
  return BfloatOfFloat(low) | static_cast<uint32_t>(BfloatOfFloat(high)) << 16;
}
inline uint32_t HalvesOfFloats(float low, float high) {
  return HalfOfFloat(low) | static_cast<uint32_t>(HalfOfFloat(high)) << 16;
}

inline float ApproximateReciprocal(float x) { return 1.0f / x; }
inline float ApproximateExp2(float x) { return exp2f(x); }
inline float ApproximateLog2(float x) { return log2f(x); }
inline float ApproximateTanh(float x) { return tanhf(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }  // CUDA's own, which hosts lack

inline float MaxOrNan(float a, float b) {
  if (a == b) return __uint_as_float(__float_as_uint(a) & __float_as_uint(b));
  return a > b || a != a ? a : b;
}
inline float MinOrNan(float a, float b) {
  if (a == b) return __uint_as_float(__float_as_uint(a) | __float_as_uint(b));
  return a < b || a != a ? a : b;
}

inline uint64_t MultiplyWide(uint32_t a, uint32_t b) { return uint64_t{a} * b; }
inline uint32_t ShiftRight(uint32_t x, uint32_t bits) { return bits < 32 ? x >> bits : 0; }
inline uint32_t PickBytes(uint32_t word, uint32_t places) {
  uint32_t picked = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t place = places >> 4 * i & 7;
    if (place < 4) picked |= (word >> 8 * place & 0xff) << 8 * i;
  }
  return picked;
}
inline uint32_t PickBytes(uint32_t low, uint32_t high, uint32_t places) {
  return __byte_perm(low, high, places);
}
inline void SetHighHalfIf(uint32_t condition, uint32_t half, uint32_t* word) {
  if (condition != 0) *word = (*word & 0xffff) | half << 16;
}
inline void AddProductUnlessZero(float a, float b, float* sum) {
  if (a != 0) *sum = fmaf(a, b, *sum);
}
inline uint32_t AddProductsOfBytes(uint32_t a, uint32_t b, uint32_t c) {
  for (int shift = 0; shift < 32; shift += 8) c += (a >> shift & 0xff) * (b >> shift & 0xff);
  return c;
}
// By way of float32: rounded once if that holds the sum, as it does for what is called so far.
inline uint32_t MultiplyAddBfloats(uint32_t a, uint32_t b, uint32_t c) {
  const auto sum = [&](int shift) {
    const auto at = [shift](uint32_t x) {
      return FloatOfBfloat(static_cast<uint16_t>(x >> shift));
    };
    return fmaf(at(a), at(b), at(c));
  };
  return BfloatsOfFloats(sum(0), sum(16));
}
inline uint32_t MultiplyAddHalves(uint32_t a, uint32_t b, uint32_t c) {
  const auto sum = [&](int shift) {
    const auto at = [shift](uint32_t x) { return FloatOfHalf(static_cast<uint16_t>(x >> shift)); };
    return fmaf(at(a), at(b), at(c));
  };
  return HalvesOfFloats(sum(0), sum(16));
}
constexpr bool kConvertsE4M3 = true;
inline uint32_t HalvesOfE4M3(uint16_t bytes) {
  const auto half = [](int byte) {
    const int exponent = byte >> 3 & 15, fraction = byte & 7;
    const float magnitude = (byte & 0x7f) == 0x7f ? NAN
                            : exponent == 0       ? std::ldexp(float(fraction), -9)
                                                  : std::ldexp(float(8 + fraction), exponent - 10);
    return (byte & 0x80) != 0 ? -magnitude : magnitude;
  };
  return HalvesOfFloats(half(bytes & 0xff), half(bytes >> 8));
}
inline uint32_t MinOfHalves(uint32_t a, uint32_t b) {
  const uint32_t low = std::min(a & 0xffff, b & 0xffff), high = std::min(a >> 16, b >> 16);
  return low | high << 16;
}

}  // namespace jaxsparse
