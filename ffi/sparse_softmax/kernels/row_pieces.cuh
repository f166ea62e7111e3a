// The pieces of rows that several warps have entries of, and what they have in all: what
// exponentials are relative to, which is the maximum, or 0 where all entries are small; and their
// sum. Of the derivative it is the sum alone.
#pragma once

#include "cuda/exponentials.cuh"
#include "cuda/row_cuts.cuh"
#include "sparse_softmax/kernels/rows.cuh"
#include "sparse_softmax/kernels/runs.h"

namespace jaxsparse {

// Of a sum of exponentials; it is far from where floats end.
__device__ __forceinline__ float InverseOf(float sum) { return ApproximateReciprocal(sum); }
__device__ __forceinline__ double InverseOf(double sum) { return 1 / sum; }

// A cut between runs, and the row that it is in or in front of.
struct CutOfRun {
  int row, entry;
  int row_begin, row_end;  // as offsets say
  bool is_within;          // the row, which both runs have a piece of

  __device__ __forceinline__ CutOfRun(const CutsOfRows& cuts, const RowCut& cut, int row_begin,
                                      int row_end)
      : row(cut.row),
        entry(cut.entry),
        row_begin(row_begin),
        row_end(row_end),
        is_within((row < cuts.rows) & (entry > row_begin)) {}
  // Behind the last row, too, there is an offset. No load waits for another one.
  __device__ __forceinline__ CutOfRun(const CutsOfRows& cuts, const RowCut& cut)
      : CutOfRun(cuts, cut, cuts.offsets[cut.row],
                 cuts.offsets[cut.row < cuts.rows ? cut.row + 1 : cut.row]) {
    KeepInRegister(row_end);  // or it is loaded where it is looked at
  }
};

// What a run has: entries of whole rows, in front of them its piece of a row that has begun in an
// earlier one, behind them that of a row that goes on in the next.
struct RunOfRows {
  bool has_begun, has_new;
  int first, last;  // entries of whole rows

  __device__ __forceinline__ RunOfRows(const CutOfRun& begin, const CutOfRun& end)
      : has_begun(begin.is_within),
        has_new(end.is_within && !(has_begun && begin.row == end.row)),
        first(!has_begun             ? begin.entry
              : begin.row == end.row ? end.entry
                                     : Clamp(begin.row_end, begin.entry, end.entry)),
        last(has_new ? Clamp(end.row_begin, first, end.entry) : end.entry) {}
};

// What the pieces of a row have in all: of the derivative the sum alone.
template <typename Acc, bool kBackward>
struct TotalOfRow {
  Acc max = -kInfinity<Acc>, sum = 0;

  __device__ __forceinline__ void Add(const PieceOfRow<Acc>& piece) {
    if constexpr (kBackward) {
      sum += piece.sum;
    } else {
      const Acc both = Greater(max, piece.max), reference = Greater(both, kLeastFinite<Acc>);
      sum = sum * Exponential(max - reference) + piece.sum * Exponential(piece.max - reference);
      max = both;
    }
  }
  // Where each lane has some of the pieces.
  __device__ __forceinline__ void AddOverLanes() {
    if constexpr (!kBackward) {
      const Acc all = Greater(MaxOverLanes(max, kWarp), kLeastFinite<Acc>);
      sum *= Exponential(max - all);
      max = all;
    }
    sum = SumOverLanes(sum, kWarp);
  }
  // What exponentials relative to `of_piece` are to be multiplied by.
  __device__ __forceinline__ Acc FactorOf(Acc of_piece) const {
    const Acc least = kLeastFinite<Acc>;
    return Exponential(Greater(of_piece, least) - Greater(max, least)) * InverseOf(sum);
  }
};

// What the warps of a block have of rows that several of them have a piece of.
template <typename Acc, bool kBackward>
struct PiecesOfBlock {
  static constexpr int kWarps = kSoftmaxRunsThreads / kWarp;
  PieceOfRow<Acc> of_warp[kWarps][kPiecesOfRun];
  int rows[kWarps + 1];  // which the cuts between runs are within, or kNone
  static constexpr int kNone = -1;

  // Each warp adds up the pieces of the row of each cut, a lane of one of them, in one order.
  __device__ __forceinline__ TotalOfRow<Acc, kBackward> Total(int row) const {
    TotalOfRow<Acc, kBackward> total;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      const bool has_begun = rows[warp] == row;
      if (has_begun || rows[warp + 1] == row) total.Add(of_warp[warp][has_begun ? 0 : 1]);
    }
    return total;
  }
  // Whether other blocks have pieces of the row, too.
  __device__ __forceinline__ bool Leaves(int row) const {
    return row == rows[0] || row == rows[kWarps];
  }
};

// What a block has left in the workspace.
template <typename Acc>
__device__ __forceinline__ PieceOfRow<Acc>* PiecesOf(const Workspace& workspace, int64_t block) {
  return reinterpret_cast<PieceOfRow<Acc>*>(workspace.data) + block * kPiecesOfRun;
}

}  // namespace jaxsparse
