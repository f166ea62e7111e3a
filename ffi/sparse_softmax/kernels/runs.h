// How the softmax by runs of rows is configured, by the host, for the device.
#pragma once

#include "cuda/row_cuts.h"
#include "types.h"

namespace jaxsparse {

constexpr int kSoftmaxRunsThreads = 128;  // of a block

struct SparseSoftmaxRunsConfig {
  bool backward = false;
  bool batched = false;
};

// What a unit leaves in the workspace of its piece of a row that has begun in an earlier unit, and
// of its piece of one that begins here and goes on: the maximum and the sum; of the derivative the
// sum alone counts.
template <typename Acc>
struct PieceOfRow {
  Acc max, sum;
};
constexpr int kPiecesOfUnit = 2;

// Units at whose pieces a warp of the second kernel looks.
constexpr int kSoftmaxUnitsOfWarp = 8;

}  // namespace jaxsparse
