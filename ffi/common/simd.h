// Vectors of the compiler's own (GCC and Clang), as wide as the instruction set this file is
// compiled for: no intrinsics, so the same kernel serves x86-64 and every other processor.
//
// Files that include this are compiled several times with different flags. Keep anything that could
// be emitted out of line (the standard library's templates) out of them: the linker keeps one copy.
#pragma once

#include <cstring>
#include <type_traits>

#include "common/dispatch.h"
#include "common/half.h"

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

// kLanes consecutive elements from any address, as accumulators.
template <int kLanes, typename T>
JAXSPARSE_INLINE auto Load(const T* from) {
  using Acc = typename Accumulator<T>::type;
  if constexpr (std::is_same_v<T, Acc>) {
    Vector<T, kLanes> v;
    std::memcpy(&v, from, sizeof(v));
    return v;
  } else if constexpr (std::is_same_v<T, bfloat16>) {
    Vector<uint16_t, kLanes> bits;
    std::memcpy(&bits, from, sizeof(bits));
    const auto wide = __builtin_convertvector(bits, Vector<uint32_t, kLanes>) << 16;
    return BitCast<Vector<float, kLanes>>(wide);
  } else {
    Vector<float, kLanes> v = {};
    for (int l = 0; l < kLanes; ++l) v[l] = ToFloat(from[l]);
    return v;
  }
}

template <int kLanes, typename Acc, typename T>
JAXSPARSE_INLINE void Store(Vector<Acc, kLanes> v, T* to) {
  if constexpr (std::is_same_v<T, Acc>) {
    std::memcpy(to, &v, sizeof(v));
  } else {
    for (int l = 0; l < kLanes; ++l) FromFloat(v[l], &to[l]);
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
  using Bits = Vector<int32_t, kLanes>;
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
  const Bits exponent = (BitCast<Bits>(shifted) - 0x4b400000) << 23;
  const auto scaled = BitCast<Vector<float, kLanes>>(BitCast<Bits>(p) + exponent);
  auto result = underflow ? Vector<float, kLanes>{} : scaled;
  result = overflow ? Broadcast<kLanes>(__builtin_inff()) : result;
  return x == x ? result : x;
}

}  // namespace jaxsparse
