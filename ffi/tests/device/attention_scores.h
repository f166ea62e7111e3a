// A function of scores, for tests of kernels that take one.
#pragma once

#include <cmath>

#include "attention/kernels/scores.cuh"

namespace jaxsparse {

// A function of scores of operands of every kind, as it would be printed.
struct TestScore {
  static constexpr bool kExists = true;
  static constexpr int kOperands = 4, kGradients = 2;  // of the first two operands
  static constexpr bool kWhole[] = {false, true};
  static constexpr ScoreOperand kOperand[] = {
      {.by_row = true},
      {.by_head = true, .by_row = true, .by_column = true, .type = ScoreType::kBFloat16},
      {.by_head = true, .by_distance = true},
      {.by_column = true, .type = ScoreType::kInt32}};

  template <typename Values>
  static float Apply(float score, int row, int column, const Values& values) {
    float derivative;
    return Differentiate(score, row, column, values, &derivative);
  }
  template <typename Values>
  static float Differentiate(float score, int row, int column, const Values& values,
                             float* derivative) {
    const float heat = values.template Number<0>(), power = std::tanh(0.5f * score);
    *derivative = heat * (1 - power * power);
    return 2 * power * heat + values.template Number<1>() + values.template Number<2>() +
           0.01f * static_cast<float>((row - column) * values.template Number<3>());
  }
  template <typename Values>
  static float DifferentiateAll(float score, int row, int column, const Values& values,
                                float* derivative, float* gradients) {
    gradients[0] = 2 * std::tanh(0.5f * score);
    gradients[1] = 1;
    return Differentiate(score, row, column, values, derivative);
  }
};

}  // namespace jaxsparse
