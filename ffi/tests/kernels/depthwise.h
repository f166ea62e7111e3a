// The CPU kernels of depthwise convolutions and their transposes, against plain loops.
#pragma once

#include <algorithm>

#include "depthwise/depthwise.h"
#include "operands.h"

namespace jaxsparse {
namespace {

// What each of the three arrays is in terms of the other two, in float64.
template <typename T>
struct DepthwiseSums {
  std::vector<double> x, y, kernel;

  DepthwiseSums(const DepthwiseProblem& p, const T* of_x, const T* of_y, const T* of_kernel)
      : x(static_cast<size_t>(p.Planes() * p.height * p.width)),
        y(static_cast<size_t>(p.Planes() * p.rows * p.columns)),
        kernel(static_cast<size_t>(p.channels * 9)) {
    for (int64_t plane = 0; plane < p.Planes(); ++plane) {
      for (int64_t row = 0; row < p.rows; ++row) {
        for (int64_t column = 0; column < p.columns; ++column) {
          for (int64_t i = 0; i < 9; ++i) {
            const int64_t h = p.stride * row - p.above + i / 3;
            const int64_t w = p.stride * column - p.left + i % 3;
            if (h < 0 || h >= p.height || w < 0 || w >= p.width) continue;
            const int64_t a = (plane * p.height + h) * p.width + w;
            const int64_t b = (plane * p.rows + row) * p.columns + column;
            const int64_t c = p.ChannelOf(plane) * 9 + i;
            x[a] += double(ToFloat(of_y[b])) * double(ToFloat(of_kernel[c]));
            y[b] += double(ToFloat(of_x[a])) * double(ToFloat(of_kernel[c]));
            kernel[c] += double(ToFloat(of_x[a])) * double(ToFloat(of_y[b]));
          }
        }
      }
    }
  }
};

template <typename T, typename Out>
void TestDepthwise(Random& random, DepthwiseProblem p, const DepthwiseCpuTables& tables) {
  ThreadWorkers workers;
  p.dtype = kDType<T>;
  p.out_dtype = kDType<Out>;
  const auto of_x = Values<T>(random, p.Planes() * p.height * p.width);
  const auto of_y = Values<T>(random, p.Planes() * p.rows * p.columns);
  const auto of_kernel = Values<T>(random, p.channels * 9), bias = Values<T>(random, p.channels);
  const DepthwiseSums<T> wanted(p, of_x.get(), of_y.get(), of_kernel.get());
  p.x.data = of_x.get();
  p.y.data = of_y.get();
  p.kernel.data = of_kernel.get();
  const auto compare = [](const Out* out, const std::vector<double>& sums, const char* what) {
    for (size_t i = 0; i < sums.size(); ++i)
      Expect(ToFloat(out[i]), sums[i], kTolerance<Out>, what);
  };
  const auto run = [&](const auto& table, Array DepthwiseProblem::* result,
                       const std::vector<double>& sums, const char* what) {
    for (const auto& variant : table) {
      const auto out = Block<Out>(static_cast<int64_t>(sums.size()));
      DepthwiseProblem problem = p;
      (problem.*result).data = out.get();
      variant.launch(problem, workers);
      compare(out.get(), sums, what);
    }
  };
  run(tables.forward, &DepthwiseProblem::y, wanted.y, "convolution");
  run(tables.input, &DepthwiseProblem::x, wanted.x, "transpose in x");
  run(tables.kernel, &DepthwiseProblem::kernel, wanted.kernel, "transpose in k");
  auto with_bias = wanted.y;
  for (size_t i = 0; i < with_bias.size(); ++i) {
    const int64_t plane = static_cast<int64_t>(i) / (p.rows * p.columns);
    with_bias[i] += double(ToFloat(bias[p.ChannelOf(plane)]));
  }
  auto activated = with_bias;
  for (double& y : activated) y = std::max(y, 0.0);
  const auto kept = Block<Out>(static_cast<int64_t>(with_bias.size()));
  p.bias.data = bias.get();
  p.preactivation.data = kept.get();
  p.activation = Activation::kRelu;
  run(tables.forward, &DepthwiseProblem::y, activated, "convolution, bias and activation");
  compare(kept.get(), with_bias, "preactivation");
}

// Images of all sorts of sizes, windows that reach beyond them, with strides 1 and 2.
void TestDepthwise(Random& random) {
  for (int turn = 0; turn < 120; ++turn) {
    DepthwiseProblem p;
    p.channels = 1 + random.Below(3);
    p.images = random.Below(4);
    p.channels_first = turn % 3 != 0;
    p.height = random.Below(12);
    p.width = random.Below(turn % 4 == 0 ? 80 : 20);
    p.stride = 1 + turn % 2;
    p.above = static_cast<int>(random.Below(3));
    p.left = static_cast<int>(random.Below(3));
    p.rows = random.Below(p.height / p.stride + 3);
    p.columns = random.Below(p.width / p.stride + 3);
    const DepthwiseCpuTables& tables = JAXSPARSE_ISA::kDepthwiseCpuVariants;
    if (turn % 5 == 0) TestDepthwise<bfloat16, float>(random, p, tables);
    else if (turn % 5 == 1) TestDepthwise<float16, float16>(random, p, tables);
    else TestDepthwise<float, float>(random, p, tables);
  }
  // So large that threads share the rows of a plane, or planes.
  for (int turn = 0; turn < 4; ++turn) {
    DepthwiseProblem p;
    p.stride = 1 + turn % 2;
    p.channels = turn < 2 ? 1 : 5;
    p.images = turn < 2 ? 1 : 3;
    p.above = p.left = 2 - p.stride;
    p.height = turn < 2 ? 211 : 60;
    p.width = turn < 2 ? 205 : 67;
    p.rows = CeilDivide(p.height, p.stride);
    p.columns = CeilDivide(p.width, p.stride);
    TestDepthwise<float, float>(random, p, JAXSPARSE_ISA::kDepthwiseCpuVariants);
  }
}

}  // namespace
}  // namespace jaxsparse
