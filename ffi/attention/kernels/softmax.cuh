// The softmax of rows of scores that come tile by tile, in the registers of a warpgroup: a thread
// has two rows of a product of 64 rows, which it shares with three neighbours.
//
// Numbers are powers of 2: of scores times `scale`, which is that of the problem times log2(e).
#pragma once

#include "attention/kernels/logarithms.h"
#include "cuda/device.cuh"

namespace jaxsparse {

constexpr float kNoScore =
    __builtin_bit_cast(float, 0xff800000u);  // -infinity: of what is not seen

// Sums and largest scores of a row are those of a lane and its neighbours in a group of four.
__device__ __forceinline__ float MaxOverRow(float x) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  }
  return x;
}

// Which of its two rows a thread's number `i` of a product is of.
constexpr int RowOfNumber(int i) { return i / 2 % 2; }

// The natural logarithm of a sum of powers of 2 that are less by `shift`.
__device__ __forceinline__ float LogOfSums(float shift, float total) {
  return total == 0 ? kNoScore : shift * kLn2<float> + logf(total);
}

class OnlineSoftmax {
  // Probabilities are powers of what scores are above a shift, which is no less than the largest
  // score so far less kSlack: so that sums are scaled anew only where scores rise by more. Where
  // nobody looks for the largest one, a thread's probabilities of a row and a tile add up to
  // kMostOfTile at most, which float16 has room for. All four threads' of a row are below 2^16 for
  // each tile. So sums of finite values may become infinite only where a value is above 2^112 over
  // the number of tiles, as bfloat16 has them.
  static constexpr float kSlack = 8, kMostOfTile = 1 << 14;
  static constexpr int kParts = 2;  // of a sum or a maximum, that do not wait for one another

  float scale_;
  float most_[2] = {kNoScore, kNoScore};  // the score that the shift is of
  float total_[2] = {};                   // of this thread's probabilities

  // Has scores that are larger than that of the shift by more than the slack take its place.
  // `factors` are those of all that was summed up before; whether any of the warp's is not 1. NaN
  // does not count.
  template <int kCount>
  __device__ __forceinline__ bool Raise(const float (&scores)[kCount], float slack,
                                        float (&factors)[2]) {
    float most[2][kParts] = {{kNoScore, kNoScore}, {kNoScore, kNoScore}};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& to = most[RowOfNumber(i)][i % kParts];
      to = fmaxf(to, scores[i]);
    }
    bool rises = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float now = fmaxf(MaxOverRow(fmaxf(most[row][0], most[row][1])), most_[row]);
      const bool rise = (now - most_[row]) * scale_ > slack;
      factors[row] = rise ? ApproximateExp2((most_[row] - now) * scale_) : 1.0f;
      most_[row] = rise ? now : most_[row];
      total_[row] *= factors[row];
      rises |= rise;
    }
    return __any_sync(kAllLanes, rises);
  }

 public:
  __device__ __forceinline__ explicit OnlineSoftmax(float scale) : scale_(scale) {}

  // What a thread's probabilities of a tile add up to, by rows.
  struct Totals {
    float parts[2][kParts];

    __device__ __forceinline__ float Of(int row) const { return parts[row][0] + parts[row][1]; }
  };

  template <int kCount>
  __device__ __forceinline__ bool Raise(const float (&scores)[kCount], float (&factors)[2]) {
    return Raise(scores, kSlack, factors);
  }
  // Has the largest scores so far take the shift's place, without slack.
  template <int kCount>
  __device__ __forceinline__ void RaiseToMost(const float (&scores)[kCount], float (&factors)[2]) {
    Raise(scores, 0, factors);
  }

  // Probabilities of a tile's scores by the shift as it is, of those from kFrom on, and the totals
  // so far, which begin with the first ones. A row that has seen nothing yet has no shift: then all
  // are 0.
  template <int kFrom, int kTaken, int kCount>
  __device__ __forceinline__ void Exponentiate(const float (&scores)[kCount],
                                               float (&probabilities)[kTaken],
                                               Totals& totals) const {
    const float shift[] = {most_[0] == kNoScore ? 0.0f : most_[0] * scale_,
                           most_[1] == kNoScore ? 0.0f : most_[1] * scale_};
#pragma unroll
    for (int i = 0; i < kTaken; ++i) {
      const int n = kFrom + i;
      probabilities[i] = ApproximateExp2(scores[n] * scale_ - shift[RowOfNumber(n)]);
      float& to = totals.parts[RowOfNumber(n)][n % kParts];
      to = n < 2 * kParts ? probabilities[i] : to + probabilities[i];
    }
  }

  // Whether some row of the warp has no shift yet: then scores are to be raised before they are
  // turned to probabilities.
  __device__ __forceinline__ bool LacksShift() const {
    return __any_sync(kAllLanes, most_[0] == kNoScore || most_[1] == kNoScore);
  }
  // Whether some lane of the warp has probabilities that may be too large: then they are to be
  // computed anew, of raised scores. No lane asks its neighbours, nor for the largest score.
  __device__ __forceinline__ bool Exceeds(const Totals& totals) const {
    const bool fit = totals.Of(0) <= kMostOfTile && totals.Of(1) <= kMostOfTile;
    return __any_sync(kAllLanes, !fit);
  }
  __device__ __forceinline__ void Add(const Totals& totals) {
#pragma unroll
    for (int row = 0; row < 2; ++row) total_[row] += totals.Of(row);
  }

  // All of this at once: turns scores to probabilities, in their place.
  template <int kCount>
  __device__ __forceinline__ bool Exponentiate(float (&scores)[kCount], float (&factors)[2]) {
    const bool rises = Raise(scores, factors);
    Totals totals;
    Exponentiate<0>(scores, scores, totals);
    Add(totals);
    return rises;
  }

  // A row's whole sum.
  __device__ __forceinline__ float Total(int row) const { return SumOverLanes(total_[row], 4); }
  // What probabilities are shifted by, a power of 2; -infinity for a row that has seen nothing.
  __device__ __forceinline__ float Shift(int row) const { return most_[row] * scale_; }
  // The natural logarithm of the sum of exponentials of scores, -infinity if there are none.
  __device__ __forceinline__ float LogOfSum(int row, float total) const {
    return LogOfSums(Shift(row), total);
  }
};

}  // namespace jaxsparse
