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

// Microseconds of kernels that read rows of so many numbers from memory, by vectors or place by
// place: a launch, and x and y once through memory. Fitted to the forward operation in float32 on
// layers of MobileNetV1, six on one image, 1 to 4 MB, on an H100, and six on 256, 257 to 1,028 MB,
// on an H200: within 12 %. In 16 bits, by vectors of 8 or of 4 numbers, fitted to six layers on 256
// images: within 17 %. Odd widths are less exact. All but one of them lose to other forms anyway.
// The same rates serve the other operations. What XLA's form takes is in ops/plain_depthwise.py,
// beside that form.
inline double DepthwiseMicroseconds(const DepthwiseProblem& p, int64_t width) {
  const double rate = SizeOf(p.dtype) == 2 ? (width % 8 == 0   ? 3.1e6
                                              : width % 4 == 0 ? 1.9e6
                                                               : 0.55e6)
                                           : (width % 4 == 0 ? 4e6 : 1.9e6);
  return kDepthwiseLaunch + DepthwiseBytes(p) / rate;
}

}  // namespace jaxsparse
