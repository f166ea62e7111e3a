// How the times of the CUDA kernels of depthwise convolutions are predicted, and how much they
// take.
#pragma once

#include "depthwise/problem.h"

namespace jaxsparse {

// What they count in 32 bits is less.
constexpr int64_t kMostDepthwiseUnits = int64_t{1} << 30;

constexpr double kDepthwiseLaunch = 2.1;  // microseconds

// Of x and y, each once.
inline double DepthwiseBytes(const DepthwiseProblem& p) {
  const auto count = static_cast<double>(p.batch.count * p.Planes());
  const double x = count * static_cast<double>(p.height * p.width);
  const double y = count * static_cast<double>(p.rows * p.columns);
  return (x + y) * static_cast<double>(SizeOf(p.dtype));
}

// Microseconds of kernels that read rows from memory, by vectors or place by place: a launch, and x
// and y once through memory. Fitted to the forward operation in float32 on layers of MobileNetV1,
// six on one image, 1 to 4 MB, on an H100, and five on 256, 128 to 822 MB, on an H200: within 12 %.
// Taken for all else. What XLA's form takes is in ops/plain_depthwise.py, beside that form.
inline double DepthwiseMicroseconds(const DepthwiseProblem& p, bool by_vectors) {
  return kDepthwiseLaunch + DepthwiseBytes(p) / (by_vectors ? 3.7e6 : 1.9e6);
}

}  // namespace jaxsparse
