// Products of tiles by the tensor cores of single warps, mma.sync: of numbers of 16 bits, or of
// float32 as exactly as in float32, by the six largest products of three components each
// (cuda/tensor_cores.cuh), which numbers are split into on their way from shared memory. Tensor
// cores add those of 16 places, smallest first; what they give is added as float32.
//
// Tiles are PlainTiles (cuda/warpgroup.cuh) of rows of kPitch numbers. A product's rows come in
// strips of 16; of each, a lane has the numbers that mma.m16n8k16 gives it of one block of 8
// columns after the other, as a warpgroup has them.
#pragma once

#include "attention/kernels/mma.h"
#include "attention/kernels/products.cuh"

namespace jaxsparse {

// 16 rows of 16 numbers on the left side of a product, as a lane has them: of rows lane / 4 and
// 8 below it, pairs from number lane % 4 * 2 on, then those 8 behind.
template <typename T>
struct LeftFactor {
  uint32_t words[kComponents<T>][4];
};
// 16 numbers of each of 16 columns on the right side: of columns lane / 4, and of those 8 behind
// it, pairs as above.
template <typename T>
struct RightFactor {
  uint32_t words[kComponents<T>][2][2];
};

__device__ __forceinline__ const void* RowAt(uint32_t address) {
  return &SharedAt<const unsigned char>(address);
}

// A pair of numbers, split, as word `word` of a factor.
template <typename T, typename Place>
__device__ __forceinline__ void SplitTo(T x, T y, const Place& place) {
  uint32_t words[kComponents<T>];
  Split(x, y, words);
#pragma unroll
  for (int c = 0; c < kComponents<T>; ++c) place(c) = words[c];
}

// Where a lane begins to read factors of a tile, and how it reads them from there.
template <typename T, int kPitch>
struct FactorsOfTile {
  // Rows of the tile are rows of the left factor, or columns of the right one, or numbers of the
  // right one's columns: it is transposed.
  __device__ __forceinline__ static uint32_t LeftPlace() {
    const int lane = threadIdx.x % kWarp;
    return (lane % 16 * kPitch + lane / 16 * 8) * sizeof(T);
  }
  __device__ __forceinline__ static uint32_t RightPlace() {
    const int lane = threadIdx.x % kWarp;
    return ((lane % 8 + lane / 16 * 8) * kPitch + lane / 8 % 2 * 8) * sizeof(T);
  }
  __device__ __forceinline__ static uint32_t TransposedPlace() { return LeftPlace(); }

  __device__ __forceinline__ static void Load(LeftFactor<T>& to, uint32_t from) {
    LoadMatrices(to.words[0], RowAt(from));
  }
  __device__ __forceinline__ static void Load(RightFactor<T>& to, uint32_t from) {
    uint32_t words[4];
    LoadMatrices(words, RowAt(from));
    Take(words, to);
  }
  __device__ __forceinline__ static void LoadTransposed(RightFactor<T>& to, uint32_t from) {
    uint32_t words[4];
    LoadTransposedMatrices(words, RowAt(from));
    Take(words, to);
  }

 private:
  __device__ __forceinline__ static void Take(const uint32_t (&words)[4], RightFactor<T>& to) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to.words[0][i / 2][i % 2] = words[i];
  }
};

template <int kPitch>
struct FactorsOfTile<float, kPitch> {
  __device__ __forceinline__ static uint32_t LeftPlace() {
    const int lane = threadIdx.x % kWarp;
    return (lane / 4 * kPitch + lane % 4 * 2) * sizeof(float);
  }
  __device__ __forceinline__ static uint32_t RightPlace() { return LeftPlace(); }
  __device__ __forceinline__ static uint32_t TransposedPlace() {
    const int lane = threadIdx.x % kWarp;
    return (lane % 4 * 2 * kPitch + lane / 4) * sizeof(float);
  }

  __device__ __forceinline__ static void Load(LeftFactor<float>& to, uint32_t from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto pair = PairAt(from + (i % 2 * 8 * kPitch + i / 2 * 8) * sizeof(float));
      SplitTo(pair.elements[0], pair.elements[1],
              [&](int c) -> uint32_t& { return to.words[c][i]; });
    }
  }
  __device__ __forceinline__ static void Load(RightFactor<float>& to, uint32_t from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto pair = PairAt(from + (i / 2 * 8 * kPitch + i % 2 * 8) * sizeof(float));
      SplitTo(pair.elements[0], pair.elements[1],
              [&](int c) -> uint32_t& { return to.words[c][i / 2][i % 2]; });
    }
  }
  __device__ __forceinline__ static void LoadTransposed(RightFactor<float>& to, uint32_t from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t at = from + (i % 2 * 8 * kPitch + i / 2 * 8) * sizeof(float);
      SplitTo(SharedAt<const float>(at), SharedAt<const float>(at + kPitch * sizeof(float)),
              [&](int c) -> uint32_t& { return to.words[c][i / 2][i % 2]; });
    }
  }

 private:
  __device__ __forceinline__ static Vector<float, 2> PairAt(uint32_t address) {
    return SharedAt<const Vector<float, 2>>(address);
  }
};

// A product's numbers of 16 columns, from `numbers` on, as a left factor of the next one.
template <typename T>
__device__ __forceinline__ LeftFactor<T> FactorOfProduct(const float* numbers) {
  LeftFactor<T> to;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = numbers[2 * i], y = numbers[2 * i + 1];
    if constexpr (kComponents<T> == 1) {
      to.words[0][i] = PairOf(T(), x, y);
    } else {
      SplitTo(x, y, [&](int c) -> uint32_t& { return to.words[c][i]; });
    }
  }
  return to;
}

// Adds to numbers of 16 columns, from `numbers` on: a 16 x 16 x 16 product.
template <typename T>
__device__ __forceinline__ void AddProduct(float* numbers, const LeftFactor<T>& a,
                                           const RightFactor<T>& b) {
  constexpr int kBlock = 4;  // a lane's numbers of 8 columns
  using Block = float[kBlock];
  if constexpr (kComponents<T> == 1) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      Block& sums = *reinterpret_cast<Block*>(numbers + block * kBlock);
      MultiplyAdd(T(), sums, a.words[0], b.words[0][block][0], b.words[0][block][1]);
    }
  } else {
    Block parts[2] = {};
#pragma unroll
    for (int order = kComponents<T> - 1; order >= 0; --order) {
#pragma unroll
      for (int i = 0; i <= order; ++i) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
          const uint32_t (&column)[2] = b.words[order - i][block];
          MultiplyAddBfloats(parts[block], a.words[i], column[0], column[1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kBlock; ++i) numbers[i] += parts[i / kBlock][i % kBlock];
  }
}

// numbers += a b^T of kStrips * 16 rows of one tile and kCount * 2 rows of another one, kInner
// numbers each. `a` and `b` are a lane's places there (LeftPlace, RightPlace).
template <typename T, int kInner, int kStrips, int kCount>
__device__ __forceinline__ void AddRowsByRows(float (&numbers)[kStrips][kCount], uint32_t a,
                                              uint32_t b) {
  constexpr int kPitch = kInner + 8;
  // All steps at once would be more code than an instruction cache has.
  constexpr int kUnrolled = sizeof(T) == 2 ? 4 : 1;
  using Factors = FactorsOfTile<T, kPitch>;
#pragma unroll kUnrolled
  for (int k = 0; k < kInner; k += 16) {
    LeftFactor<T> left[kStrips];
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      Factors::Load(left[strip], a + (strip * kMmaStrip * kPitch + k) * sizeof(T));
    }
#pragma unroll
    for (int column = 0; column < 2 * kCount; column += 16) {
      RightFactor<T> right;
      Factors::Load(right, b + (column * kPitch + k) * sizeof(T));
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        AddProduct<T>(&numbers[strip][column / 2], left[strip], right);
      }
    }
  }
}

// numbers = a b^T.
template <typename T, int kInner, int kStrips, int kCount>
__device__ __forceinline__ void MultiplyRowsByRows(float (&numbers)[kStrips][kCount], uint32_t a,
                                                   uint32_t b) {
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[strip][i] = 0;
  }
  AddRowsByRows<T, kInner>(numbers, a, b);
}

// sums += a b of kStrips * 16 rows of a product, of kInner numbers each, and as many rows of a
// tile, of 2 kCount numbers. `b` is a lane's place there (TransposedPlace).
template <typename T, int kStrips, int kInner, int kCount>
__device__ __forceinline__ void MultiplyProductByRows(float (&sums)[kStrips][kCount],
                                                      const float (&product)[kStrips][kInner],
                                                      uint32_t b) {
  constexpr int kPitch = 2 * kCount + 8;
  using Factors = FactorsOfTile<T, kPitch>;
#pragma unroll
  for (int k = 0; k < 2 * kInner; k += 16) {
    LeftFactor<T> left[kStrips];
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      left[strip] = FactorOfProduct<T>(&product[strip][k / 2]);
    }
#pragma unroll
    for (int column = 0; column < 2 * kCount; column += 16) {
      RightFactor<T> right;
      Factors::LoadTransposed(right, b + (k * kPitch + column) * sizeof(T));
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        AddProduct<T>(&sums[strip][column / 2], left[strip], right);
      }
    }
  }
}

}  // namespace jaxsparse
