// CUDA's keywords, vector types and functions of one thread, for a host compiler.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#define __global__
#define __device__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

// Shared memory, of what is static or extern. Blocks that run one after another take it in turn;
// of a launch whose blocks run at once each has its own (concurrent_blocks.h).
#ifdef EMULATED_CONCURRENT_BLOCKS
#define __shared__ __thread
#else
#define __shared__
#endif

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned places) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned picked = 0;
  for (int i = 0; i < 4; ++i) {
    picked |= static_cast<unsigned>(bytes >> (places >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return picked;
}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return std::countr_zero(static_cast<unsigned>(x)) % 32 + (x != 0); }
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(uint64_t{x} * y >> 32);
}
// Towards 0, to the nearest integer that there is; NaN is 0.
inline int __float2int_rz(float x) {
  return x != x          ? 0
         : x >= 0x1p31f  ? 0x7fffffff
         : x <= -0x1p31f ? -0x7fffffff - 1
                         : static_cast<int>(x);
}
inline unsigned __float2uint_rz(float x) {
  return !(x > 0.0f) ? 0u : x >= 0x1p32f ? 0xffffffffu : static_cast<unsigned>(x);
}
