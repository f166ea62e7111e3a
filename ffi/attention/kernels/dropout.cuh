// Which probabilities are dropped: by a hash of a seed, the row and the column, as
// jaxsparse/ops/dropout.py says. Two neighbouring columns share a hash, of which each has a half.
#pragma once

#include "cuda/device.cuh"

namespace jaxsparse {

// C. Wellons' bijection of low avalanche bias, github.com/skeeto/hash-prospector.
__device__ __forceinline__ uint32_t MixBits(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// What a head drops of its probabilities.
struct HeadDropout {
  uint32_t seed;
  uint32_t least;  // halves of hashes that are kept are no less
  float scale;     // of those that are kept

  __device__ __forceinline__ void Set(uint32_t seed_of_head, float rate) {
    seed = seed_of_head;
    least = static_cast<uint32_t>(rintf(rate * 65536.0f));
    scale = least < 65536 ? 1.0f / (1.0f - rate) : 0.0f;  // all are dropped, not NaN
  }
  // Positions may be negative, and are hashed by their bits.
  __device__ __forceinline__ uint32_t HashOfRow(int row) const {
    return MixBits(MixBits(static_cast<uint32_t>(row)) + seed);
  }
  // Of an even column and the next one.
  __device__ __forceinline__ static uint32_t HashOfPair(uint32_t of_row, int column) {
    return MixBits(of_row + (static_cast<uint32_t>(column) >> 1) * 0x9e3779b9u);
  }
  __device__ __forceinline__ bool KeepsEven(uint32_t hash) const {
    return (hash & 0xffff) >= least;
  }
  __device__ __forceinline__ bool KeepsOdd(uint32_t hash) const { return hash >> 16 >= least; }
  __device__ __forceinline__ bool Keeps(uint32_t of_row, int column) const {
    const uint32_t hash = HashOfPair(of_row, column);
    return column % 2 != 0 ? KeepsOdd(hash) : KeepsEven(hash);
  }
};

}  // namespace jaxsparse
