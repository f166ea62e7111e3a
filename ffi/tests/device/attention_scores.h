// A function of scores, for tests of kernels that take one.
#pragma once

#include <algorithm>
#include <cmath>

#include "attention/kernels/scores.cuh"

namespace jaxsparse {

// A function of scores of operands of every kind, as it would be printed.
struct TestScore {
  static constexpr bool kExists = true;
  static constexpr int kOperands = 5, kGradients = 4;
  // Of the first three operands and of the last one.
  static constexpr ScoreSums kSums[] = {ScoreSums::kByRow, ScoreSums::kNone, ScoreSums::kByDistance,
                                        ScoreSums::kByColumn};
  static constexpr ScoreOperand kOperand[] = {
      {.by_row = true},
      {.by_head = true, .by_row = true, .by_column = true, .type = ScoreType::kBFloat16},
      {.by_head = true, .by_distance = true},
      {.by_column = true, .type = ScoreType::kInt32},
      {.by_head = true, .by_column = true}};

  template <typename Values>
  static float Apply(float score, int row, int column, const Values& values) {
    float derivative;
    return Differentiate(score, row, column, values, &derivative);
  }
  template <typename Values>
  static float Differentiate(float score, int row, int column, const Values& values,
                             float* derivative) {
    const float heat = values.template Number<0>(), power = std::tanh(0.5f * score);
    const float cosh = std::cosh(0.5f * score);
    *derivative = heat / (cosh * cosh);  // 1 - power^2 would cancel out
    return 2 * power * heat + values.template Number<1>() + values.template Number<2>() +
           0.5f * values.template Number<4>() +
           0.01f * static_cast<float>((row - column) * values.template Number<3>());
  }
  template <typename Values>
  static float DifferentiateAll(float score, int row, int column, const Values& values,
                                float* derivative, float* gradients) {
    gradients[0] = 2 * std::tanh(0.5f * score);
    gradients[1] = gradients[2] = 1;
    gradients[3] = 0.5f;
    return Differentiate(score, row, column, values, derivative);
  }
};

// The same with cotangents of its first two operands alone, which need no sums over tiles.
struct TestScoreByRows : TestScore {
  static constexpr int kGradients = 2;
  static constexpr ScoreSums kSums[] = {ScoreSums::kByRow, ScoreSums::kNone};

  template <typename Values>
  static float DifferentiateAll(float score, int row, int column, const Values& values,
                                float* derivative, float* gradients) {
    float all[TestScore::kGradients];
    const float result = TestScore::DifferentiateAll(score, row, column, values, derivative, all);
    std::copy_n(all, kGradients, gradients);
    return result;
  }
};

}  // namespace jaxsparse
