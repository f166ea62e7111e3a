// out[m,n] = activation(sum_k a[m,k] * x[k,n] + bias[m]), a packed in streams of lanes.
//
// A strip is 16 rows, neighbours in the order `rows`. A piece is a strip's columns in one of
// `parts` equal ranges, which are whole panels. A lane of the warp that multiplies a piece needs of
// each fragment of 16 x 16 places those that mma.m16n8k16 deals it: in group g of 8 columns, for j
// = 0 and 1, the pair of row lane / 4 + 8 j and columns 8 g + 2 (lane % 4) and one more. What is
// stored of them lies in streams of its own: word w of lane l is l-th in row w of `values`. Which
// places are stored, bits in `masks` tell.
//
// With cell 1 the lower and the upper halves of a lane's words are two streams, of the first and of
// the second number of pairs. A step has 8 groups; bit 8 (2 j + e) + g of its mask tells whether
// number e of pair j of group g is stored. With cell 2 a word is a pair of which any is stored. A
// step has 16 groups; bit 8 (2 (g % 2) + j) + g / 2 is that of pair j of group g.
//
// Numbers of 8 bits are multiplied by the scale of their row when its sums are done. In cells they
// have cells of 1 and four streams in a lane, each a byte of its words: byte 2 j + e is of number e
// of pairs j, as in masks.
//
// At the end of each panel a stream that is more than kPackedDrift behind the longest one of its
// piece is padded up to that, so that few rows of words serve a panel, whatever the pattern is.
//
// With cell 0 there are no cells and no masks, but gaps, for products with so few columns that they
// need no fragments. A strip is 8 rows, and a piece one of `parts` ranges of its columns, as wide
// as GapRangeColumns says. Column c of the range has place c / 8 and residue c % 8. Lane l has two
// streams, each of the numbers of row l / 4 whose columns have one residue: 2 (l % 4) or one more.
// In odd rows the higher of the two is first, so that lanes of two neighbouring rows, when all take
// a number of the same stream, have all residues among them.
//
// Each number has a gap, of 4 bits: how many places it is behind the one before of its stream, or,
// the first one, behind the place in front of the range. Behind a gap of 15 a number may be none,
// only to bridge a wider one; it is 0. With a gap of 0 there is none, as behind the last one of a
// stream that has fewer than others. A step, a row of `values`, is 8 numbers of each lane, whatever
// their bits are: the streams' in turn, so that number e is of stream e % 2. Its gaps are a word of
// each lane in `masks`, number e in bits 4 e. `panels` has one for each piece. Numbers that are 0
// count as none.
#pragma once

#include "cuda/activation.h"
#include "types.h"

namespace jaxsparse {

constexpr int kPackedStripRows = 16;
constexpr int kPackedPanelColumns = 128;
constexpr int kPackedPanelPairs = kPackedPanelColumns / 4;  // of a lane, at most as many words
constexpr int kPackedPanelMasks = 2;                        // of a lane, at most
constexpr int kPackedDrift = 16;
constexpr int kPackedRowBytes = 4 * kWarp;  // of words, one for each lane

// Of matrices by gaps.
constexpr int kGapStripRows = 8;
constexpr int kGapLanes = 8;                           // residues of columns: a row's streams
constexpr int kGapRowLanes = kWarp / kGapStripRows;    // lanes that have a row
constexpr int kGapStreams = kGapLanes / kGapRowLanes;  // of a lane
constexpr int kGapNumbers = 8;                         // of a lane, of a step
constexpr int kGapStreamNumbers = kGapNumbers / kGapStreams;
constexpr int kGapBits = 4;
constexpr int kMostGap = 15;

JAXSPARSE_INLINE int64_t GapRangeColumns(int64_t columns, int64_t parts) {
  return CeilDivide(columns, kGapLanes * parts) * kGapLanes;
}

// The residue of the columns that a stream of a lane has.
JAXSPARSE_INLINE constexpr int GapResidue(int lane, int stream) {
  const int row = lane / kGapRowLanes;
  return lane % kGapRowLanes * kGapStreams + (stream ^ row % kGapStreams);
}

// What numbers are: kPlain ones of 16 bits what x is; others have 8 bits, of which a row of words
// has twice as many, and a scale for each row of the matrix.
enum class PackedNumbers : int { kPlain, kInt8, kE4M3 };

// Numbers of a word.
JAXSPARSE_INLINE constexpr int NumbersOfWord(PackedNumbers numbers) {
  return numbers == PackedNumbers::kPlain ? 2 : 4;
}

// Words of a lane that a step by gaps has: of numbers, and of numbers and gaps.
JAXSPARSE_INLINE constexpr int GapNumberWords(PackedNumbers numbers) {
  return kGapNumbers / NumbersOfWord(numbers);
}
JAXSPARSE_INLINE constexpr int GapStepWords(PackedNumbers numbers) {
  return GapNumberWords(numbers) + 1;
}

// Panels of each part of so many columns.
JAXSPARSE_INLINE int64_t PackedPanels(int64_t columns, int64_t parts) {
  return CeilDivide(columns, kPackedPanelColumns * parts);
}

// With x on the left it is (n, k), and the result (n, m).
struct PackedProblem {
  Gpu gpu;
  int64_t m = 0, k = 0, n = 0;
  int64_t words = 0;  // rows of values
  int cell = 1;       // 1 or 2, or 0 for gaps
  int64_t parts = 1;
  bool x_on_left = false;
  PackedNumbers numbers = PackedNumbers::kPlain;
  DType dtype = DType::kBFloat16;      // x, bias, and values if they are plain
  DType out_dtype = DType::kBFloat16;  // out
  Activation activation = Activation::kNone;
  Array values;  // (words, lanes, numbers of a word, or of a step)
  Array masks;   // uint32 (pieces, steps, lanes); of gaps (words, lanes)
  Array starts;  // int32 (pieces + 1,): rows of values in front of each piece
  Array panels;  // int32 (pieces, panels, 2): rows of the piece that all of its streams are through
                 // with when a panel begins, and that are read when it ends
  Array rows;    // int32 (m,)
  Array scales;  // float32 (m,), or null if numbers are plain
  Array x;
  Array bias;  // (m,) or null
  Array out;
  Workspace workspace;
};

JAXSPARSE_INLINE int64_t PackedStrips(const PackedProblem& p) {
  return CeilDivide(p.m, kPackedStripRows);
}
JAXSPARSE_INLINE int64_t GapStrips(const PackedProblem& p) {
  return CeilDivide(p.m, kGapStripRows);
}

}  // namespace jaxsparse
