// What is added to the columns of a product of tiles, as one more step of this product: a tile has
// a line for each column, with the bfloat16 components of its term, and another tile has ones in
// the places of these. Threads that load terms themselves, each those of its columns, pass through
// shared memory at half the rate of tensor cores, since eight lanes want the same ones, and wait.
#pragma once

#include "attention/kernels/products.cuh"
#include "attention/problem.h"

namespace jaxsparse {

struct ColumnTerms {
  static constexpr int kWidth = kInnerOfProduct, kComponentsOfTerm = 3;
  using Tile = SwizzledTile<kMaskCell, kWidth>;
  static constexpr int kBytes = Tile::kBytes;
  static constexpr uint32_t kOne = 0x3f80;

  // By a warp: the tile of ones, and one without terms.
  __device__ __forceinline__ static void FillOnes(unsigned char* tile) {
    Fill(tile, {kOne | kOne << 16, kOne, 0, 0});
  }
  __device__ __forceinline__ static void Clear(unsigned char* tile) { Fill(tile, {0, 0, 0, 0}); }

  // Sets a column's term. Components are cut off, not rounded, so none of a finite term is
  // infinite, and three have all of its 24 bits. Of a term that is not finite the first component
  // has what it is, and the others are 0, so that infinity stays infinity. NaN becomes one whose
  // bits are all set, as it could have lost its only ones.
  __device__ __forceinline__ static void Set(unsigned char* tile, int column, float term) {
    const bool is_finite = term - term == 0;
    if (term != term) term = __uint_as_float(0x7fffffffu);
    uint32_t components[kComponentsOfTerm];
#pragma unroll
    for (uint32_t& component : components) {
      component = __float_as_uint(term) >> 16;
      term = is_finite ? term - __uint_as_float(component << 16) : 0.0f;
    }
    *reinterpret_cast<Vector<uint32_t, 2>*>(tile + Tile::At(column, 0)) = {
        {components[0] | components[1] << 16, components[2]}};
  }

  // One more step of a product, whatever its operands' type.
  template <int kCount>
  __device__ __forceinline__ static void Add(float (&product)[kCount], uint32_t ones,
                                             uint32_t terms) {
    static_assert(2 * kCount == kMaskCell);
    MultiplyShared<true>(bfloat16(), product, SharedMatrix<kWidth>(ones),
                         SharedMatrix<kWidth>(terms));
  }

 private:
  __device__ __forceinline__ static void Fill(unsigned char* tile, const Words4& first) {
#pragma unroll 1
    for (int line = threadIdx.x % kWarp; line < Tile::kRows; line += kWarp) {
      *reinterpret_cast<Words4*>(tile + Tile::At(line, 0)) = first;
      *reinterpret_cast<Words4*>(tile + Tile::At(line, 8)) = {0, 0, 0, 0};
    }
  }
};

}  // namespace jaxsparse
