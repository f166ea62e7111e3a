// The matrices of a layer in a wave: that of its own last state, and that of the layer below.
#pragma once

#include "recurrent/kernels/dense_shape.cuh"

namespace jaxsparse {

// Whether a set of bits is that of the first few numbers.
constexpr bool HasFirst(int mask) { return (mask & (mask + 1)) == 0; }
// The n-th number of a set of bits.
__device__ __forceinline__ int NthOf(int mask, int n) {
  int number = 0;
#pragma unroll
  for (int i = 0, before = 0; i < kMaxScanArrays; ++i) {
    if ((mask >> i & 1) == 0) continue;
    if (before++ == n) number = i;
  }
  return number;
}

// A layer's matrix, which may have only some products and take only some parts of a state.
template <typename Plan, bool kBelow>
struct MatrixOfWave {
  static constexpr auto kMatrix = kBelow ? Plan::kSizes.below : Plan::kSizes.own;
  static constexpr int kColumns = kMatrix.columns;

  __device__ __forceinline__ static DenseWeights Of(const RecurrentWaveLayer& p) {
    if constexpr (kBelow) return p.below_weights;
    return {p.weights, p.weight_row_stride, p.weight_column_stride};
  }
  __device__ __forceinline__ static int SlotColumn(int column) {
    constexpr int kPart = Plan::kSizes.part;
    if constexpr (HasFirst(kMatrix.states)) {
      return column;
    } else {
      if constexpr (CountBits(kMatrix.states) == 1) {
        return NthOf(kMatrix.states, 0) * kPart + column;
      }
      return NthOf(kMatrix.states, column / kPart) * kPart + column % kPart;
    }
  }
  __device__ __forceinline__ static int PlaceOf(int product) {
    if constexpr (HasFirst(kMatrix.products)) return product;
    return CountBits(kMatrix.products & ((1 << product) - 1));
  }
};

}  // namespace jaxsparse
