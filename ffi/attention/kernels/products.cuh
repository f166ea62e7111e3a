// Products of tiles by a warpgroup, of numbers of 16 bits. A tile lies in shared memory in blocks
// of 64 numbers of each line, as tensor copies bring them: a BlockedTile (cuda/warpgroup.cuh).
//
// Products are asynchronous: FenceProducts comes before them, CommitProducts behind; what they add
// to and the rows that they take from registers must not be touched until WaitForGroups.
#pragma once

#include "cuda/warpgroup.cuh"

namespace jaxsparse {

template <int kCount>
__device__ __forceinline__ void MultiplyAddTransposed(bfloat16, float (&d)[kCount],
                                                      const uint32_t (&a)[4], uint64_t b) {
  MultiplyAddBfloats<true>(d, a, b);
}
template <int kCount>
__device__ __forceinline__ void MultiplyAddTransposed(float16, float (&d)[kCount],
                                                      const uint32_t (&a)[4], uint64_t b) {
  MultiplyAddHalves<true>(d, a, b);
}

constexpr int kInnerOfProduct = 16;  // places of the inner dimension that one instruction takes

// d = a b^T of 64 lines of one tile and 2 kCount lines of another one, kInner numbers each. `a`
// and `b` are the places of the first ones in the tiles' first blocks; a tile's blocks lie so many
// bytes apart.
template <typename T, int kInner, int kBlockBytesOfA, int kBlockBytesOfB, int kCount>
__device__ __forceinline__ void MultiplyTiles(float (&d)[kCount], uint32_t a, uint32_t b) {
  const uint64_t of_a = SharedMatrix<64>(a), of_b = SharedMatrix<64>(b);
#pragma unroll
  for (int k = 0; k < kInner; k += kInnerOfProduct) {
    const uint64_t step_of_a = Behind(of_a, k / 64 * kBlockBytesOfA + k % 64 * 2);
    const uint64_t step_of_b = Behind(of_b, k / 64 * kBlockBytesOfB + k % 64 * 2);
    if (k == 0) MultiplyShared<false>(T(), d, step_of_a, step_of_b);
    else MultiplyShared<true>(T(), d, step_of_a, step_of_b);
  }
}

// d += a b of 64 rows in registers and a tile of kSteps * 16 lines of 2 kCount numbers, whose
// blocks lie so many bytes apart.
template <typename T, int kBlockBytes, int kSteps, int kCount>
__device__ __forceinline__ void MultiplyRows(float (&d)[kCount], const uint32_t (&a)[kSteps][4],
                                             uint32_t b) {
  constexpr int kLineBytes = 64 * 2;
  const uint64_t of_b =
      2 * kCount > 64 ? SharedMatrixOfBlocks(b, kBlockBytes) : SharedMatrix<64>(b);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    MultiplyAddTransposed(T(), d, a[step], Behind(of_b, step * kInnerOfProduct * kLineBytes));
  }
}

// A product as the rows of the next one, rounded.
template <typename T, int kCount>
__device__ __forceinline__ void RowsOfProduct(const float (&d)[kCount],
                                              uint32_t (&rows)[kCount / 8][4]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) rows[i / 4][i % 4] = PairOf(T(), d[2 * i], d[2 * i + 1]);
}

}  // namespace jaxsparse
