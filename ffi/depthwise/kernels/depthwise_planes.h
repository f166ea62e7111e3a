// How the kernels that make planes of a depthwise convolution, or of its transpose in x, are
// configured, by the host, for the device.
#pragma once

#include "types.h"

namespace jaxsparse {

constexpr int kDepthwiseThreads = 128;  // of a block

struct DepthwisePlanesConfig {
  int stride = 1;
  int left = 1;             // columns of zeros in front of the source
  int rows = 4;             // of a thread: an even number where the transpose has stride 2
  int columns = 4;          // of a thread: in 16 bits eight, a load and a store of 16 bytes
  bool transposed = false;  // x of y, which with stride 1 is a convolution by the flipped kernel
};

}  // namespace jaxsparse
