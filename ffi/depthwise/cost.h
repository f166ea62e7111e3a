// How the times of the CUDA kernels of depthwise convolutions are predicted, and how much they
// take.
#pragma once

#include "depthwise/problem.h"

namespace jaxsparse {

// What they count in 32 bits is less.
constexpr int64_t kMostDepthwiseUnits = int64_t{1} << 30;

// Microseconds: a launch, and x and y once through memory. Fitted to six layers of MobileNetV1 on
// an H100, of the forward operation in float32 on one image, 1 to 4 MB: within 10 %. Taken for all
// else. ops/depthwise.py has the same of the plain form.
inline double DepthwiseMicroseconds(const DepthwiseProblem& p) {
  constexpr double kLaunch = 2.1, kBytes = 3.7e6;
  const auto count = static_cast<double>(p.batch.count * p.Planes());
  const double x = count * static_cast<double>(p.height * p.width);
  const double y = count * static_cast<double>(p.rows * p.columns);
  return kLaunch + (x + y) * static_cast<double>(SizeOf(p.dtype)) / kBytes;
}

}  // namespace jaxsparse
