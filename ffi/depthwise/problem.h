// Depthwise convolutions by kernels of 3 x 3: for every batch entry, channel c and image n
//   y[t][u] = sum over i, j < 3 of x[stride t - above + i][stride u - left + j] * kernel[c][i][j]
// where x is 0 outside the image. The operations are y of (x, kernel), with a bias and an
// activation behind it, and the transposes x of (y, kernel) and kernel of (x, y).
#pragma once

#include "cuda/activation.h"
#include "types.h"

namespace jaxsparse {

constexpr int kTaps = 3;  // along an axis

struct DepthwiseProblem {
  Gpu gpu;
  int64_t channels = 0, images = 0;
  bool channels_first = true;           // planes (c, n), else (n, c)
  int64_t height = 0, width = 0;        // of x
  int64_t rows = 0, columns = 0;        // of y
  int stride = 1, above = 0, left = 0;  // 1 or 2, at most 2, at most 2
  DType dtype = DType::kFloat32;        // of operands
  DType out_dtype = DType::kFloat32;    // of results
  Activation activation = Activation::kNone;
  Batch batch;
  Array x;              // planes of height x width
  Array y;              // planes of rows x columns
  Array kernel;         // (channels, 3, 3)
  Array bias;           // (channels,) or null
  Array preactivation;  // as y, or null: what the activation was applied to, for its derivative
  Workspace workspace;

  JAXSPARSE_INLINE int64_t Planes() const { return channels * images; }
  JAXSPARSE_INLINE int64_t ChannelOf(int64_t plane) const {
    return channels_first ? plane / images : plane % channels;
  }
  JAXSPARSE_INLINE int64_t PlaneOf(int64_t channel, int64_t image) const {
    return channels_first ? channel * images + image : image * channels + channel;
  }
};

}  // namespace jaxsparse
