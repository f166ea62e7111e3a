// How the kernel that makes small planes of a depthwise convolution out of shared memory is
// configured, by the host, for the device.
#pragma once

#include "depthwise/problem.h"

namespace jaxsparse {

constexpr int kDepthwiseStagedThreads = 128;     // of a block
constexpr int kDepthwiseStagedBytes = 24 << 10;  // of shared memory
constexpr int kDepthwiseStagedVector = 16;       // bytes that are copied at once

struct DepthwiseStagedConfig {
  int stride = 1;
  int left = 1;             // columns of zeros in front of the source
  int rows = 7;             // of a thread, in one column
  bool transposed = false;  // x of y with stride 1, a convolution by the flipped kernel
};

// Planes that a block takes at a time, of which there is room for the source, numbers of `size`
// bytes, and for sums. So many that the next block's begin with a whole vector; 0 if that many do
// not fit.
JAXSPARSE_INLINE int64_t DepthwiseStagedPlanes(const DepthwiseProblem& p, bool transposed,
                                               int64_t size) {
  const int64_t of_x = p.height * p.width, of_y = p.rows * p.columns;
  const int64_t source = transposed ? of_y : of_x, result = transposed ? of_x : of_y;
  const int64_t bytes = source * size + result * static_cast<int64_t>(sizeof(float));
  if (bytes == 0 || bytes > kDepthwiseStagedBytes) return 0;
  const int64_t multiple = kDepthwiseStagedVector / size;
  return kDepthwiseStagedBytes / static_cast<uint32_t>(bytes) / multiple * multiple;
}

}  // namespace jaxsparse
