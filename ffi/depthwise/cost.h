// How the times of the CUDA kernels of depthwise convolutions are predicted, and how much they
// take.
#pragma once

#include "depthwise/problem.h"

namespace jaxsparse {

// What they count in 32 bits is less.
constexpr int64_t kMostDepthwiseUnits = int64_t{1} << 30;

// Microseconds on an H200: a launch, and x and y once through memory. Expected, not fitted yet.
inline double DepthwiseMicroseconds(const DepthwiseProblem& p) {
  constexpr double kLaunch = 2.2, kBytes = 3.6e6;
  const auto count = static_cast<double>(p.batch.count * p.Planes());
  const double x = count * static_cast<double>(p.height * p.width);
  const double y = count * static_cast<double>(p.rows * p.columns);
  return kLaunch + (x + y) * static_cast<double>(SizeOf(p.dtype)) / kBytes;
}

}  // namespace jaxsparse
