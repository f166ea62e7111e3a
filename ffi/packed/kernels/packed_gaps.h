// How the product by a matrix that is packed by gaps is configured, by the host, for the device.
#pragma once

#include "packed/problem.h"

namespace jaxsparse {

constexpr int kMostGapColumns = 8;  // of x, of a tile

struct PackedGapsConfig {
  int columns = 1;  // of x, of a tile: 1, 2, 4 or 8
  // Ranges of columns that warps share a strip by: a team of so many makes it at once.
  int team = 1;
  bool x_on_left = false;

  static constexpr int kMostWarps = 20;
  // A row of shared memory holds what lanes read of x at one place, so that each reads banks of
  // its own: units of `columns` numbers of its eight columns, and copies of these.
  static constexpr int kRowBytes = 128;
  constexpr int UnitBytes() const { return columns == 1 ? 4 : 2 * columns; }
  constexpr int Copies() const { return kRowBytes / (kGapLanes * UnitBytes()); }
  // Steps that a lane has asked for while it adds up another one.
  constexpr int Ahead() const { return columns <= 2 ? 8 : 4; }

  // Of shared memory, in bytes: a row of zeros in front of x, which lanes without numbers read;
  // rows behind x, where a damaged matrix may lead in a step; sums of warps.
  static constexpr int kBehindBytes = kGapNumbers * kMostGap * kRowBytes;
  static constexpr int kXAt = kRowBytes;
  constexpr int XBytes(int64_t width) const {
    return static_cast<int>(team * width / kGapLanes) * kRowBytes;
  }
  constexpr int SumsAt(int64_t width) const { return kXAt + XBytes(width) + kBehindBytes; }
  constexpr int64_t SharedBytes(int64_t width) const {
    return kXAt + team * width / kGapLanes * kRowBytes + kBehindBytes +
           (team > 1 ? kMostWarps * kWarp * 4 : 0);
  }
};

}  // namespace jaxsparse
