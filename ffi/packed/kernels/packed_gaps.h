// How the product by a matrix that is packed by gaps is configured, by the host, for the device.
#pragma once

#include "packed/problem.h"

namespace jaxsparse {

constexpr int kMostGapColumns = 8;  // of x, of a tile

struct PackedGapsConfig {
  PackedNumbers numbers = PackedNumbers::kPlain;
  int columns = 1;  // of x, of a tile: 1, 2, 4 or 8
  // Parts of the columns that are multiplied at once: a team has a warp for each of them.
  int team = 1;
  bool x_on_left = false;

  constexpr int MostWarps() const { return columns < 8 ? 10 : 8; }  // that registers have room for
  // A row of shared memory, all of its banks, holds what lanes read of x at one place: units of
  // `columns` numbers, one for each residue of columns, and copies of these. A warp reads 128 bytes
  // at once, so as many lanes as there are units in a row: 32, 16 with four columns, 8 with eight.
  // They are of rows of the matrix that follow one another, two for each copy. Of two rows one is
  // even and one is odd, so they read units of other residues; the next two read the next copy.
  // Thus each lane reads banks of its own.
  static constexpr int kRowBytes = 128;
  constexpr int UnitBytes() const { return columns == 1 ? 4 : 2 * columns; }
  constexpr int Copies() const { return kRowBytes / (kGapLanes * UnitBytes()); }
  // Where a lane reads for one of its streams.
  constexpr uint32_t UnitAt(int lane, int stream) const {
    const int copy = lane / kGapRowLanes / kGapStreams % Copies();
    return (copy * kGapLanes + GapResidue(lane, stream)) * UnitBytes();
  }
  // Sums of a strip that each lane has when they are done.
  constexpr int SumsOfLane() const { return columns > kGapRowLanes ? columns / kGapRowLanes : 1; }
  // Steps that a lane has asked for while it adds up another one: about as many words for each
  // kind of number.
  constexpr int Ahead() const {
    return (columns == 1 ? 80 : columns == 2 ? 60 : 40) / GapStepWords(numbers);
  }

  // Of shared memory, in bytes: a row of zeros in front of x, which streams without numbers read;
  // rows behind x, where a damaged matrix may lead in a step; sums of warps.
  static constexpr int kBehindBytes = kGapStreamNumbers * kMostGap * kRowBytes;
  static constexpr int kXAt = kRowBytes;
  constexpr int64_t SharedBytes(int64_t width) const {
    return kXAt + team * width / kGapLanes * kRowBytes + kBehindBytes +
           (team > 1 ? MostWarps() * SumsOfLane() * kWarp * 4 : 0);
  }
};

// With what takes divisions: the host does them once, as each block would wait for them.
struct PackedGapsProblem : PackedProblem {
  int strips = 0, width = 0;
  int rounds = 0;      // of parts that are made at once
  int blocks = 1;      // or clusters, that share the strips of a tile of columns
  uint32_t steps = 0;  // of a piece in the mean, times kMeanSteps
  // The bits of 2^23 in float32, for conversions of int8. As a parameter of the kernel it stays in
  // a register: PRMT takes one constant, which is its selector.
  uint32_t power = 0x4b000000u;

  static constexpr int64_t kMeanSteps = 1 << 12;

  // For tiles of so many columns, of which so many parts are made at once.
  PackedGapsProblem(const PackedProblem& p, int columns, int at_once, int64_t groups)
      : PackedProblem(p),
        strips(static_cast<int>(GapStrips(p))),
        width(static_cast<int>(GapRangeColumns(p.k, p.parts))),
        rounds(static_cast<int>(p.parts) / at_once) {
    const int64_t tiles = CeilDivide(p.n, columns);
    if (strips == 0 || tiles == 0) return;
    blocks = static_cast<int>(groups / tiles);
    steps = static_cast<uint32_t>(p.words * kMeanSteps / (int64_t{strips} * p.parts));
  }
};

}  // namespace jaxsparse
