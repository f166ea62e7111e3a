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
  // score so far less kSlack: so that sums are scaled anew only where scores rise by more. No sum
  // comes near infinity by that.
  static constexpr float kSlack = 8;

  float scale_;
  float most_[2] = {kNoScore, kNoScore};  // the score that the shift is of
  float total_[2] = {};                   // of this thread's probabilities

 public:
  __device__ __forceinline__ explicit OnlineSoftmax(float scale) : scale_(scale) {}

  // Turns scores to probabilities. `factors` are those of all that was summed up before; whether
  // any of the warp's is not 1. NaN stays NaN and does not count for the largest score. A row that
  // has seen nothing yet has no shift: then all probabilities are 0.
  template <int kCount>
  __device__ __forceinline__ bool Exponentiate(float (&scores)[kCount], float (&factors)[2]) {
    constexpr int kParts = 2;  // that do not wait for one another
    float most[2][kParts] = {{kNoScore, kNoScore}, {kNoScore, kNoScore}};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& to = most[RowOfNumber(i)][i % kParts];
      to = fmaxf(to, scores[i]);
    }
    bool rises = false;
    float shift[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float now = fmaxf(MaxOverRow(fmaxf(most[row][0], most[row][1])), most_[row]);
      const bool rise = (now - most_[row]) * scale_ > kSlack;
      factors[row] = rise ? ApproximateExp2((most_[row] - now) * scale_) : 1.0f;
      most_[row] = rise ? now : most_[row];
      shift[row] = most_[row] == kNoScore ? 0.0f : most_[row] * scale_;
      rises |= rise;
    }
    float total[2][kParts] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = ApproximateExp2(scores[i] * scale_ - shift[RowOfNumber(i)]);
      total[RowOfNumber(i)][i % kParts] += scores[i];
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      total_[row] = total_[row] * factors[row] + (total[row][0] + total[row][1]);
    }
    return __any_sync(kAllLanes, rises);
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
