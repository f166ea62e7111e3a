// Conversions and arithmetic of one thread that C++ has no name for. A host that emulates a GPU
// replaces this header.
#pragma once

#include "types.h"

namespace jaxsparse {

__device__ __forceinline__ float FloatOfHalf(uint16_t bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}
__device__ __forceinline__ uint16_t HalfOfFloat(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ __forceinline__ uint16_t BfloatOfFloat(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
// Two of them in a word, the first one in its lower half.
__device__ __forceinline__ uint32_t BfloatsOfFloats(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ uint32_t HalvesOfFloats(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// 1 / x to 1 ulp. Results below 2^-126 are 0.
__device__ __forceinline__ float ApproximateReciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 2^x to 2 ulp.
__device__ __forceinline__ float ApproximateExp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Its logarithm to 2 ulp, near 1 to 2^-22.
__device__ __forceinline__ float ApproximateLog2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// With an error of at most 2^-11 of the result.
__device__ __forceinline__ float ApproximateTanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// NaN if either is, and -0 < 0. fmaxf and fminf drop a NaN.
__device__ __forceinline__ float MaxOrNan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float MinOrNan(float a, float b) {
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// The whole product. In C++ it is one of 64 bits as soon as the compiler widens a factor in front
// of a loop, with an instruction more.
__device__ __forceinline__ uint64_t MultiplyWide(uint32_t a, uint32_t b) {
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
}

// So many bits to the right, however many: C++ says nothing of more than 31.
__device__ __forceinline__ uint32_t ShiftRight(uint32_t x, uint32_t bits) {
  uint32_t shifted;
  asm("shr.b32 %0, %1, %2;" : "=r"(shifted) : "r"(x), "r"(bits));
  return shifted;
}

// Bytes of a word by the numbers of four places, four bits each: 0 to 3 those of `word`, 4 a zero.
__device__ __forceinline__ uint32_t PickBytes(uint32_t word, uint32_t places) {
  uint32_t picked;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(picked) : "r"(word), "r"(places));
  return picked;
}

// The same of two words: places 4 to 7 are the bytes of `high`.
__device__ __forceinline__ uint32_t PickBytes(uint32_t low, uint32_t high, uint32_t places) {
  uint32_t picked;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(picked) : "r"(low), "r"(high), "r"(places));
  return picked;
}

// The lower half of `half` as the upper one of a word, if `condition` is not 0.
__device__ __forceinline__ void SetHighHalfIf(uint32_t condition, uint32_t half, uint32_t* word) {
  asm("{ .reg .pred p; setp.ne.u32 p, %1, 0; @p prmt.b32 %0, %0, %2, 0x5410; }"
      : "+r"(*word)
      : "r"(condition), "r"(half));
}

// Adds a b to a sum unless a is 0, so that 0 * NaN is no term, without a branch.
__device__ __forceinline__ void AddProductUnlessZero(float a, float b, float* sum) {
  asm("{ .reg .pred p; setp.neu.f32 p, %1, 0f00000000; @p fma.rn.f32 %0, %1, %2, %0; }"
      : "+f"(*sum)
      : "f"(a), "f"(b));
}

// c and the products of unsigned bytes that stand in the same place of two words.
__device__ __forceinline__ uint32_t AddProductsOfBytes(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("dp4a.u32.u32 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// a b + c of two numbers in each word, rounded once; small ones are not taken for 0.
__device__ __forceinline__ uint32_t MultiplyAddBfloats(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sums;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
  return sums;
}
__device__ __forceinline__ uint32_t MultiplyAddHalves(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sums;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sums) : "r"(a), "r"(b), "r"(c));
  return sums;
}

// Two numbers of e4m3 as float16, exactly; from compute capability 8.9 on.
#if __CUDA_ARCH__ >= 890
constexpr bool kConvertsE4M3 = true;
#else
constexpr bool kConvertsE4M3 = false;
#endif
__device__ __forceinline__ uint32_t HalvesOfE4M3(uint16_t bytes) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(bytes));
  return halves;
}

// The lesser of two unsigned numbers of 16 bits, in each half of a word.
__device__ __forceinline__ uint32_t MinOfHalves(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 900
  uint32_t least;
  asm("min.u16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
  return least;
#else
  const uint32_t low_a = a & 0xffff, low_b = b & 0xffff, high_a = a - low_a, high_b = b - low_b;
  return (low_a < low_b ? low_a : low_b) | (high_a < high_b ? high_a : high_b);
#endif
}

}  // namespace jaxsparse
