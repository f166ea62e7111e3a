// Stores rows of a product that lies in registers, as tensor cores give it.
#pragma once

#include "attention/kernels/products.cuh"

namespace jaxsparse {

// Of four words of each of four neighbouring lanes, hands word k of all to lane k.
__device__ __forceinline__ void TransposeWords(uint32_t (&words)[4]) {
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
    const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) != 0) continue;
      uint32_t& low = words[i];
      uint32_t& high = words[i + distance];
      const uint32_t received = __shfl_xor_sync(kAllLanes, upper ? low : high, distance);
      if (upper) low = received;
      else high = received;
    }
  }
}

// Calls with each row of which `rows` has the bit.
template <typename Function>
__device__ __forceinline__ void ForEachRow(uint32_t rows, Function function) {
#pragma unroll 1
  for (; rows != 0; rows &= rows - 1) function(__ffs(static_cast<int>(rows)) - 1);
}

// Stores those of 16 rows of a warp's product that there are, the first `size` numbers of each, a
// multiple of 16 bytes: times `scales`, of rows 0 to 7 and of the others. Rows are `stride` numbers
// apart. Returns which of them have a number that is not finite.
template <typename T, int kCount>
__device__ __forceinline__ uint32_t StoreStrip(const float (&sums)[kCount],
                                               const float (&scales)[2], T* to, int64_t stride,
                                               int rows, int size) {
  const int lane = threadIdx.x % kWarp;
  uint32_t not_finite = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 8 + lane / 4;
    float zero = 0;  // NaN if a number is not finite
#pragma unroll
    for (int column = 0; column < 2 * kCount; column += 32) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &sums[column / 2 + 4 * i + 2 * half];
        zero += pair[0] * 0 + pair[1] * 0;
        const float x = pair[0] * scales[half], y = pair[1] * scales[half];
        if constexpr (sizeof(T) == 2) {
          words[i] = PairOf(T(), x, y);
        } else {
          const int at = column + 8 * i + lane % 4 * 2;
          if (row < rows && at < size) {
            *reinterpret_cast<Vector<T, 2>*>(to + row * stride + at) = {{x, y}};
          }
        }
      }
      if constexpr (sizeof(T) == 2) {
        TransposeWords(words);
        if (row < rows && column + lane % 4 * 8 < size) {
          *reinterpret_cast<Words4*>(to + row * stride + column + lane % 4 * 8) = {
              words[0], words[1], words[2], words[3]};
        }
      }
    }
    const uint32_t wrong = __ballot_sync(kAllLanes, !(zero == 0) && row < rows);
#pragma unroll
    for (int r = 0; r < 8; ++r) not_finite |= (wrong >> 4 * r & 15) != 0 ? 1u << (half * 8 + r) : 0;
  }
  return not_finite;
}

// The same of a warpgroup's 64 rows, by each of its warps, whose rows `not_finite` are.
template <typename T, int kCount>
__device__ __forceinline__ uint32_t StoreRows(const float (&sums)[kCount], float scale, T* to,
                                              int64_t stride, int rows) {
  const int first = threadIdx.x % kWarpgroup / kWarp * 16;
  return StoreStrip(sums, {scale, scale}, to + first * stride, stride, rows - first, 2 * kCount);
}

}  // namespace jaxsparse
