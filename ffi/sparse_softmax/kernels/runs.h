// How the softmax by runs of rows is configured, by the host, for the device.
#pragma once

#include "cuda/row_cuts.h"
#include "types.h"

namespace jaxsparse {

constexpr int kSoftmaxRunsThreads = 128;  // of a block

struct SparseSoftmaxRunsConfig {
  bool backward = false;
  bool batched = false;

  // For which registers are left, of elements of so many bytes: in the first kernel, and in that
  // which writes pieces.
  constexpr int Blocks(int bytes) const {
    return bytes == 8 ? 2 : batched ? 6 : backward ? 8 : bytes == 2 ? 9 : 10;
  }
  constexpr int BlocksOfPieces(int bytes) const {
    return bytes == 8 ? 2 : batched ? 6 : backward ? 8 : 9;
  }
};

// A warp takes a run of rows, of so many neighbouring units of those that rows are cut into. It has
// its entries in registers: of each lane so many where they suffice, and the most that there are.
constexpr int kUnitsOfRun = 4, kFewOfLane = 8, kMostOfLane = 12;

JAXSPARSE_INLINE int64_t SoftmaxRuns(int64_t rows, int64_t nse) {
  return CeilDivide(RowUnits(rows, nse), kUnitsOfRun);
}

// What a run leaves in the workspace of its piece of a row that has begun in an earlier one, and of
// its piece of one that begins here and goes on: the maximum and the sum; of the derivative the sum
// alone counts.
template <typename Acc>
struct PieceOfRow {
  Acc max, sum;
};
constexpr int kPiecesOfRun = 2;

// Runs whose pieces a warp of the second kernel writes: so many that all of its warps find room
// beside one another, for graphs of a few million edges.
constexpr int kSoftmaxRunsOfWarp = 2;

}  // namespace jaxsparse
