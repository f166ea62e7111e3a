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

  // Sets a column's term. Only the first component of one that is not finite is not, either: a
  // product by it is what the term is, not NaN.
  __device__ __forceinline__ static void Set(unsigned char* tile, int column, float term) {
    uint32_t components[kComponentsOfTerm];
#pragma unroll
    for (uint32_t& component : components) {
      component = BfloatsOfFloats(term, 0);
      term = term - term == 0 ? term - __uint_as_float(component << 16) : 0.0f;
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
