// Vectors of the compiler's own (GCC and Clang), as wide as the instruction set this file is
// compiled for, so that the same kernel serves x86-64 and every other processor. Intrinsics stand
// only where GCC has no vectors for what the processor can do: conversions of float16.
//
// Files that include this are compiled several times with different flags. Keep anything that could
// be emitted out of line (the standard library's templates) out of them: the linker keeps one copy.
#pragma once

#ifdef __F16C__
#include <immintrin.h>
#endif

#include <cstring>
#include <type_traits>

#include "cpu/dispatch.h"
#include "cpu/half.h"

namespace jaxsparse {

template <typename T, int kLanes>
struct VectorType {
  typedef T type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <typename T, int kLanes>
using Vector = typename VectorType<T, kLanes>::type;

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

// Lanes of the widest register of an accumulator type.
template <typename Acc>
constexpr int kMaxLanes = kVectorBytes / static_cast<int>(sizeof(Acc));

// ToFloat and FromFloat of half.h, lane by lane.
template <int kLanes>
JAXSPARSE_INLINE Vector<float, kLanes> Widen(Vector<uint16_t, kLanes> bits, bfloat16) {
  const auto wide = __builtin_convertvector(bits, Vector<uint32_t, kLanes>) << 16;
  return BitCast<Vector<float, kLanes>>(wide);
}

template <int kLanes>
JAXSPARSE_INLINE Vector<float, kLanes> Widen(Vector<uint16_t, kLanes> bits, float16) {
#ifdef __AVX512F__
  // With a mask of all lanes: GCC 12 warns of its own header without one.
  if constexpr (kLanes == 16) {
    return BitCast<Vector<float, 16>>(_mm512_maskz_cvtph_ps(0xffff, BitCast<__m256i>(bits)));
  }
#endif
#ifdef __F16C__
  if constexpr (kLanes == 8) {
    return BitCast<Vector<float, 8>>(_mm256_cvtph_ps(BitCast<__m128i>(bits)));
  } else if constexpr (kLanes == 4) {
    return BitCast<Vector<float, 4>>(_mm_cvtph_ps(_mm_cvtsi64_si128(BitCast<int64_t>(bits))));
  } else if constexpr (kLanes == 2) {
    const __m128 wide = _mm_cvtph_ps(_mm_cvtsi32_si128(BitCast<int32_t>(bits)));
    return BitCast<Vector<float, 2>>(_mm_cvtsd_f64(_mm_castps_pd(wide)));
  } else if constexpr (kLanes == 1) {
    return Vector<float, 1>{ToFloat(float16{bits[0]})};
  }
#endif
  using Bits = Vector<uint32_t, kLanes>;
  const auto wide = __builtin_convertvector(bits, Bits);
  const Bits sign = (wide & 0x8000u) << 16, magnitude = wide & 0x7fffu;
  const Bits normal = (magnitude << 13) + ((127u - 15u) << 23);
  const Bits special = normal | 0xffu << 23;
  const auto subnormal =
      __builtin_convertvector(BitCast<Vector<int32_t, kLanes>>(magnitude), Vector<float, kLanes>) *
      0x1p-24f;
  Bits result = magnitude >= 0x7c00u ? special : normal;
  result = magnitude < 0x0400u ? BitCast<Bits>(subnormal) : result;
  return BitCast<Vector<float, kLanes>>(result | sign);
}

template <int kLanes>
JAXSPARSE_INLINE Vector<uint16_t, kLanes> Narrow(Vector<float, kLanes> v, bfloat16) {
  using Bits = Vector<uint32_t, kLanes>;
  const auto bits = BitCast<Bits>(v);
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Bits quiet_nan = (bits >> 16) | 0x40u;
  const Bits result = (bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded;
  return __builtin_convertvector(result, Vector<uint16_t, kLanes>);
}

template <int kLanes>
JAXSPARSE_INLINE Vector<uint16_t, kLanes> Narrow(Vector<float, kLanes> v, float16) {
#ifdef __AVX512F__
  if constexpr (kLanes == 16) {
    return BitCast<Vector<uint16_t, 16>>(
        _mm512_maskz_cvtps_ph(0xffff, BitCast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
#ifdef __F16C__
  if constexpr (kLanes == 8) {
    return BitCast<Vector<uint16_t, 8>>(
        _mm256_cvtps_ph(BitCast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
  } else if constexpr (kLanes == 4) {
    const auto bits = _mm_cvtps_ph(BitCast<__m128>(v), _MM_FROUND_TO_NEAREST_INT);
    return BitCast<Vector<uint16_t, 4>>(_mm_cvtsi128_si64(bits));
  } else if constexpr (kLanes == 2) {
    const __m128 wide = _mm_castpd_ps(_mm_set_sd(BitCast<double>(v)));
    const auto bits = _mm_cvtps_ph(wide, _MM_FROUND_TO_NEAREST_INT);
    return BitCast<Vector<uint16_t, 2>>(_mm_cvtsi128_si32(bits));
  } else if constexpr (kLanes == 1) {
    float16 half;
    FromFloat(v[0], &half);
    return Vector<uint16_t, 1>{half.bits};
  }
#endif
  using Bits = Vector<uint32_t, kLanes>;
  const auto bits = BitCast<Bits>(v);
  const Bits sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const Bits normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Beside 0.5 the last place of a float is that of a subnormal number: the sum rounds to it.
  // Floats that XLA's threads take for zero round to zero.
  const Bits subnormal =
      BitCast<Bits>(BitCast<Vector<float, kLanes>>(magnitude) + 0.5f) - 0x3f000000u;
  const Bits nan = magnitude - magnitude + 0x7e00u, infinity = magnitude - magnitude + 0x7c00u;
  Bits result = magnitude < 0x38800000u ? subnormal : normal;  // below 2^-14
  result = magnitude >= 0x477ff000u ? infinity : result;       // rounds to 65536 or more
  result = magnitude > 0x7f800000u ? nan : result;
  return __builtin_convertvector(result | sign, Vector<uint16_t, kLanes>);
}

// kLanes consecutive numbers from any address, as they are.
template <int kLanes, typename T>
JAXSPARSE_INLINE Vector<T, kLanes> LoadRaw(const T* from) {
  Vector<T, kLanes> v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

// kLanes consecutive elements from any address, as accumulators.
template <int kLanes, typename T>
JAXSPARSE_INLINE auto Load(const T* from) {
  using Acc = typename Accumulator<T>::type;
  if constexpr (std::is_same_v<T, Acc>) {
    return LoadRaw<kLanes>(from);
  } else {
    return Widen<kLanes>(LoadRaw<kLanes>(&from->bits), T{});
  }
}

template <int kLanes, typename Acc, typename T>
JAXSPARSE_INLINE void Store(Vector<Acc, kLanes> v, T* to) {
  if constexpr (std::is_same_v<T, Acc>) {
    std::memcpy(to, &v, sizeof(v));
  } else {
    const auto bits = Narrow<kLanes>(v, T{});
    std::memcpy(to, &bits, sizeof(bits));
  }
}

template <int kLanes, typename Acc>
JAXSPARSE_INLINE Vector<Acc, kLanes> Broadcast(Acc value) {
  return value - Vector<Acc, kLanes>{};  // folds away: x - 0 is x for every x, 0 + x is not
}

// The sum of all lanes, by halving: the order depends on kLanes alone.
template <int kLanes, typename Acc>
JAXSPARSE_INLINE Acc Sum(Vector<Acc, kLanes> v) {
  if constexpr (kLanes == 1) {
    return v[0];
  } else {
    Vector<Acc, kLanes / 2> halves[2];
    std::memcpy(halves, &v, sizeof(v));
    return Sum<kLanes / 2, Acc>(halves[0] + halves[1]);
  }
}

// e^x to 2 units in the last place; 0 below the least normal number, NaN for NaN. float or a
// vector. Range reduction by Cody and Waite, polynomial of degree 6 (minimax on [-ln2/2, ln2/2]).
template <int kLanes>
JAXSPARSE_INLINE Vector<float, kLanes> Exp(Vector<float, kLanes> x) {
  using Bits = Vector<uint32_t, kLanes>;  // as what overflows wraps around
  const auto underflow = x < -87.33654f;
  const auto overflow = x > 88.72283f;
  // Adding 1.5 * 2^23 rounds to an integer that stands in the low bits: no conversion of NaN.
  const auto shifted = x * 1.44269504088896341f + 12582912.0f;
  const auto n = shifted - 12582912.0f;
  auto r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  auto p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Bits exponent = (BitCast<Bits>(shifted) - 0x4b400000u) << 23;
  const auto scaled = BitCast<Vector<float, kLanes>>(BitCast<Bits>(p) + exponent);
  auto result = underflow ? Vector<float, kLanes>{} : scaled;
  result = overflow ? Broadcast<kLanes>(__builtin_inff()) : result;
  return x == x ? result : x;
}

// The same of double, by its power series up to degree 13.
template <int kLanes>
JAXSPARSE_INLINE Vector<double, kLanes> Exp(Vector<double, kLanes> x) {
  using Bits = Vector<uint64_t, kLanes>;
  const auto underflow = x < -708.39641853226408;
  const auto overflow = x > 709.78271289338397;
  const auto shifted = x * 1.44269504088896340736 + 6755399441055744.0;  // 1.5 * 2^52
  const auto n = shifted - 6755399441055744.0;
  auto r = x - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  auto p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  const Bits exponent = (BitCast<Bits>(shifted) - 0x4338000000000000u) << 52;
  const auto scaled = BitCast<Vector<double, kLanes>>(BitCast<Bits>(p) + exponent);
  auto result = underflow ? Vector<double, kLanes>{} : scaled;
  result = overflow ? Broadcast<kLanes>(__builtin_inf()) : result;
  return x == x ? result : x;
}

}  // namespace jaxsparse
