// How the softmax by runs of rows is configured, by the host, for the device.
#pragma once

#include "cuda/row_cuts.h"
#include "types.h"

namespace jaxsparse {

constexpr int kSoftmaxRunsThreads = 128;  // of a block

// A warp takes a run of rows, of some neighbouring units of those that rows are cut into. It has
// its entries in registers: of each lane so many where they suffice, and the most that there are.
struct SparseSoftmaxRunsConfig {
  int units = 4;                   // of a run: 4 or 6
  int team = kSoftmaxRunsThreads;  // lanes that write a row's entries next to a boundary
  bool backward = false;
  bool batched = false;

  constexpr int FewOfLane() const { return units * kPlacesOfUnit / kWarp; }
  constexpr int MostOfLane() const { return FewOfLane() + 4; }
  constexpr int UnitsOfBlock() const { return units * kSoftmaxRunsThreads / kWarp; }
  // For which registers are left, of elements of so many bytes: in the first kernel, and in that
  // which writes what is next to boundaries.
  constexpr int Blocks(int bytes) const {
    if (bytes == 8) return 2;
    if (units > 4) return batched ? 4 : 6;
    return batched ? 5 : 7;
  }
  constexpr int BlocksOfPieces(int bytes) const {
    return bytes == 8 ? 2 : !backward ? 8 : batched ? 6 : 7;
  }
};

// Blocks of the first kernel, each of which takes so many units.
JAXSPARSE_INLINE int64_t SoftmaxBlocksDown(int64_t rows, int64_t nse, int units_of_block) {
  return CeilDivide(RowUnits(rows, nse), units_of_block);
}

// What a run leaves of its piece of a row that has begun in an earlier one, and of its piece of one
// that begins here and goes on: what exponentials are relative to, which is the maximum, or 0 where
// all entries are small; and their sum. Of the derivative the sum alone counts. A block leaves the
// same in the workspace.
template <typename Acc>
struct PieceOfRow {
  Acc max, sum;
};
constexpr int kPiecesOfRun = 2;

}  // namespace jaxsparse
