// The sums of a warp's piece number by number: only what is stored is multiplied. Tensor cores
// multiply the other places by 0, too, which is NaN where x is not finite.
#pragma once

#include "cuda/device.cuh"
#include "packed/kernels/lane_bytes.cuh"

namespace jaxsparse {

template <typename T, PackedNumbers kNumbers, int kCell>
class ExactPiece {
  static constexpr int kStreams = NumbersOfWord(kNumbers);
  const PackedProblem& p_;
  const PackedPiece& piece_;
  int64_t first_row_;  // of x
  int lane_ = static_cast<int>(threadIdx.x % kWarp);

  __device__ static int BitOf(int group, int j, int e) {
    return kCell == 1 ? 8 * (2 * j + e) + group % 8 : 8 * (2 * (group % 2) + j) + group % 16 / 2;
  }
  __device__ float X(int64_t row, int64_t column) const {
    if (row >= p_.k) return 0;
    return ToAccumulator(
        static_cast<const T*>(p_.x.data)[p_.x_on_left ? column * p_.k + row : row * p_.n + column]);
  }
  __device__ float Number(uint32_t word, int stream) const {
    return word < piece_.rows ? PackedNumberAt<T, kNumbers>(piece_.words, word, stream) : 0.0f;
  }

 public:
  __device__ ExactPiece(const PackedProblem& p, const PackedPiece& piece, int64_t part)
      : p_(p), piece_(piece), first_row_(part * piece.panel_count * kPackedPanelColumns) {}

  // By all lanes: the sums of one column in the lane's rows, lane / 4 and that of the other half.
  __device__ void Sum(int64_t column, float (&sums)[2]) const {
    constexpr int kGroups = kPackedPanelColumns / 8, kOfStep = 8 * kCell;
    uint32_t at[kStreams] = {};  // words that have been read
    sums[0] = sums[1] = 0;
#pragma unroll 1
    for (uint32_t panel = 0; panel < piece_.panel_count; ++panel) {
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        const uint32_t step = panel * (kPackedPanelMasks / kCell) + group / kOfStep;
        const uint32_t mask = piece_.masks[step * kWarp + lane_];
        const int64_t row = first_row_ + panel * kPackedPanelColumns + group * 8 + lane_ % 4 * 2;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if ((mask >> BitOf(group, j, e) & 1) == 0) continue;
            const int stream = kStreams == 4 ? 2 * j + e : e;
            const float number = Number(at[stream]++, stream);
            // Of a pair one may not be stored, and is 0.
            if (kCell == 1 || number != 0) sums[j] += number * X(row + e, column);
          }
        }
      }
      const uint32_t longest = piece_.panels[panel].y;
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        const uint32_t least = longest > kPackedDrift ? longest - kPackedDrift : 0;
        if (at[i] < least) at[i] = least;
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) sums[j] = SumOverLanes(sums[j], 4);
  }
};

// Whether all sums of a warp are finite, by all lanes.
template <int kTiles>
__device__ __forceinline__ bool AreFinite(const float (&sums)[kTiles][4]) {
  float not_finite = 0;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) not_finite += sums[t][i] * 0.0f;
  }
  return !__any_sync(kAllLanes, not_finite != 0);
}

// Where some number of x is not finite, no sum of its column is: then the sums of a warp's piece,
// of columns from `first_column` on, are made anew. `space`: 512 bytes of shared memory for each 8
// columns, the warp's own.
template <typename T, PackedNumbers kNumbers, int kCell, int kTiles>
__device__ void MakeExact(const PackedProblem& p, const PackedPiece& piece, int64_t part,
                          int64_t first_column, uint32_t space, float (&sums)[kTiles][4]) {
  __syncwarp();
  const int lane = threadIdx.x % kWarp;
  const ExactPiece<T, kNumbers, kCell> exact(p, piece, part);
#pragma unroll 1
  for (int column = 0; column < kTiles * 8 && first_column + column < p.n; ++column) {
    float of_column[2];
    exact.Sum(first_column + column, of_column);
    if (lane % 4 == column % 8 / 2) {
      const uint32_t to = space + ((column / 8 * kWarp + lane) * 4 + column % 2) * 4;
      StoreShared(to, of_column[0]);
      StoreShared(to + 8, of_column[1]);
    }
  }
  __syncwarp();
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[t][i] = SharedAt<const float>(space + ((t * kWarp + lane) * 4 + i) * 4);
    }
  }
}

}  // namespace jaxsparse
