// Products of the vectors of a step's 16 entries on tensor cores, of numbers of 16 bits, which stay
// as they are in memory: nothing is converted, and no lane has more to hand over than a few words.
//
// Vectors are copied to shared memory, so that those on their way take no registers: with two
// stages while the step before is computed, with one while other warps compute. Lanes are those of
// CsrLanes; entry u of group t is row t + 4 u of a tile.
//
// Scalar products take gathered vectors as rows of the first operand: four lanes have an entry, of
// each access 16 bytes. These are in rows r and r + 8 of the operand, a half in either, so that an
// access is what a lane has of it. The second operand has two columns for each group's own vector,
// with the halves. Of the product only what stands in the row of an entry and the columns of its
// group is wanted.
//
// Weighted sums take gathered vectors as columns of the first operand, two for each entry, with
// even and with odd numbers, and as rows words of two numbers. The second operand has two columns
// for each group, one with an entry's weight in the row of its even, one of its odd numbers. So
// each lane has its part of its group's sums.
//
// Zeros of the second operand meet the numbers of other groups' entries: where one is not finite,
// all sums are NaN that should not be. Then they must be computed once more, without tensor cores.
#pragma once

#include "attention/kernels/csr_lanes.cuh"
#include "attention/kernels/csr_vectors.cuh"

namespace jaxsparse {

// The second operands of weighted sums, of a step's entries.
struct CsrWeights {
  uint32_t words[4];
};

// Of each lane's own entry's weight, which is rounded to T. Below 6e-5 float16 has only multiples
// of 6e-8: little beside a total of 1 or more, as forward has it, but cotangents may all be as
// small.
template <typename T, typename Lanes>
__device__ __forceinline__ CsrWeights WeightsOf(Lanes, float own) {
  const uint32_t place = Lanes::Place();
  // Places of bytes: the own number's, and those of the entry of the neighbouring place.
  constexpr uint32_t kNone = 0x4444;
  const bool is_odd = place % 2 != 0, has_any = place / 2 == Lanes::Group();
  const uint32_t first = !has_any ? kNone : is_odd ? 0x3244 : 0x4410;
  const uint32_t second = !has_any ? kNone : is_odd ? 0x1044 : 0x4432;
  const uint32_t pair = PairOf(T(), own, __shfl_xor_sync(kAllLanes, own, 4));
  const uint32_t other = __shfl_xor_sync(kAllLanes, pair, 16);
  return {{PickBytes(pair, first), PickBytes(pair, second), PickBytes(other, first),
           PickBytes(other, second)}};
}

// A matrix of one head, whose rows have kVectors * 64 numbers: its rows that a step's entries name,
// in tiles of shared memory.
template <typename T, int kVectors, typename Lanes>
class CsrTiledRows {
  static constexpr uint32_t kLine = 128;  // bytes of 64 numbers, of 16 entries one behind the other
  static constexpr uint32_t kBlock = 16 * kLine;
  static constexpr int kAccesses = 2 * kVectors;

 public:
  static constexpr uint32_t kTileBytes = kVectors * kBlock;

  struct Operand {
    uint32_t words[kAccesses][2];
  };

  __device__ __forceinline__ explicit CsrTiledRows(const CsrMatrix<T>& matrix)
      : stride_(static_cast<uint32_t>(matrix.stride * sizeof(T))),
        data_(reinterpret_cast<const char*>(matrix.data)) {}

  // Begins to copy the rows of each lane's own entry; zeros where there is none. Eight neighbouring
  // lanes copy a line.
  __device__ __forceinline__ void Copy(uint32_t own_column, uint32_t tile) const {
    const uint32_t chunk = threadIdx.x % 8 * 16, group = threadIdx.x % kWarp / 8;
    const uint32_t to = tile + group * kLine + chunk;
#pragma unroll
    for (uint32_t u = 0; u < 4; ++u) {
      const uint32_t column = __shfl_sync(kAllLanes, own_column, Lanes::LaneOf(group, u));
      const char* from = data_ + chunk + MultiplyWide(column, stride_);
#pragma unroll
      for (uint32_t i = 0; i < kVectors; ++i) {
        AsyncCopyOrZero(to + u * 4 * kLine + i * kBlock, from + i * kLine, column != kNoEntry);
      }
    }
  }

  // The vectors of groups, of whose rows each group's lanes have their own.
  __device__ __forceinline__ Operand LoadOperand(uint32_t row) const {
    const uint32_t place = Lanes::Place(), group = place / 2;
    const char* from = data_ + MultiplyWide(__shfl_sync(kAllLanes, row, group), stride_);
    Operand operand;
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) {
      const char* access = from + i / 2 * kLine + PlaceOf(group, i) + place % 2 * 4;
      const auto* words = reinterpret_cast<const uint32_t*>(access);
      operand.words[i][0] = words[0];
      operand.words[i][1] = words[2];
    }
    return operand;
  }

  // The scalar products of the groups' vectors and a step's: that of a lane's own entry.
  static __device__ __forceinline__ float OfOwnEntry(const Operand& groups, uint32_t tile) {
    const uint32_t place = Lanes::Place(), group = Lanes::Group();
    float sums[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t line = (place % 4 ^ 2 * half) + 4 * (2 * half + place / 4);
#pragma unroll
      for (int i = 0; i < kAccesses; ++i) {
        uint32_t words[4];
        LoadShared(tile + line * kLine + i / 2 * kBlock + PlaceOf(place, i), words);
        MultiplyAdd(T(), sums[half], words, groups.words[i][0], groups.words[i][1]);
      }
    }
    const bool is_first = place % 4 == group;
    const float sum = is_first ? sums[0][0] + sums[0][3] : sums[1][0] + sums[1][3];
    const uint32_t from = (group ^ place % 2 * 2) + place / 4 * 4;
    return __shfl_sync(kAllLanes, sum, 4 * from + group);
  }

  // to += what a lane has of the weighted sum of its group's vectors.
  static __device__ __forceinline__ void AddWeighted(const CsrWeights& weights, uint32_t tile,
                                                     float (&to)[kVectors][8]) {
    const uint32_t group = Lanes::Group();
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float (&sums)[8] = to[i];
      float halves[2][4] = {{sums[0], sums[1], sums[2], sums[3]},
                            {sums[4], sums[5], sums[6], sums[7]}};
#pragma unroll
      for (uint32_t slot = 0; slot < 4; ++slot) {
        const uint32_t entry = slot % 2 * 2 + (group / 2 ^ slot / 2);
        uint32_t words[4];
        LoadShared(tile + (group + 4 * entry) * kLine + i * kBlock + Lanes::Part() * 16, words);
        MultiplyAdd(T(), halves[0], {words[0], words[1]}, weights.words[slot]);
        MultiplyAdd(T(), halves[1], {words[2], words[3]}, weights.words[slot]);
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) sums[e] = halves[e / 4][e % 4];
    }
  }

 private:
  // Of a lane's access to a line: those of odd groups begin with the upper half, for the sake of
  // the banks.
  static __device__ __forceinline__ uint32_t PlaceOf(uint32_t group, int access) {
    return threadIdx.x % 4 * 16 + (access ^ group) % 2 * 64;
  }

  uint32_t stride_;
  const char* data_;
};

}  // namespace jaxsparse
