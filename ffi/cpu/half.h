// 16-bit storage types for CPU kernels. Arithmetic is done in float; conversions are exact one way
// and round to nearest even the other, and keep NaN. XLA's threads flush subnormal floats to zero,
// so they use integer operations, or the processor's own for float16, which take no notice of that.
// simd.h has the same for vectors.
#pragma once

#ifdef __F16C__
#include <immintrin.h>
#endif

#include <cstring>

#include "types.h"

namespace jaxsparse {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

template <typename To, typename From>
JAXSPARSE_INLINE To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

JAXSPARSE_INLINE float ToFloat(bfloat16 x) {
  return BitCast<float>(static_cast<uint32_t>(x.bits) << 16);
}

JAXSPARSE_INLINE float ToFloat(float16 x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  // Move the exponent from bias 15 to bias 127; infinity and NaN go to the top of the new range.
  uint32_t bits = (magnitude << 13) + ((127 - 15) << 23);
  if (magnitude >= 0x7c00u) bits |= 0xffu << 23;
  if (magnitude < 0x0400u) {
    bits =
        BitCast<uint32_t>(static_cast<float>(magnitude) * 0x1p-24f);  // subnormal in 16 bits only
  }
  return BitCast<float>(bits | sign);
#endif
}

JAXSPARSE_INLINE float ToFloat(float x) { return x; }
JAXSPARSE_INLINE double ToFloat(double x) { return x; }

JAXSPARSE_INLINE void FromFloat(float x, bfloat16* out) {
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  out->bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

JAXSPARSE_INLINE void FromFloat(float x, float16* out) {
#ifdef __F16C__
  out->bits = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
  const uint32_t bits = BitCast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // rounds to 65536 or more
    half = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14: a normal number in 16 bits
    half = (magnitude - ((127 - 15) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  } else if (magnitude >= 0x33000000u) {  // 2^-25: rounds to a subnormal, shift the significand
    const uint32_t shift = 126u - (magnitude >> 23);
    const uint32_t significand = (magnitude & 0x7fffffu) | 0x800000u;
    const uint32_t kept = significand >> shift;
    const uint32_t rest = significand & ((1u << shift) - 1u);
    const uint32_t tie = 1u << (shift - 1u);
    half = kept + (rest > tie || (rest == tie && (kept & 1u)) ? 1u : 0u);
  } else {
    half = 0;
  }
  out->bits = static_cast<uint16_t>(half | sign);
#endif
}

JAXSPARSE_INLINE void FromFloat(float x, float* out) { *out = x; }
JAXSPARSE_INLINE void FromFloat(double x, double* out) { *out = x; }

}  // namespace jaxsparse
