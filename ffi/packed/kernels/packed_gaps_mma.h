// How the product on tensor cores by a matrix that is packed by gaps is configured, by the host,
// for the device.
#pragma once

#include "packed/kernels/packed_gaps.h"

namespace jaxsparse {

struct PackedGapsMmaConfig {
  PackedNumbers numbers = PackedNumbers::kPlain;
  int columns = 8;  // of x, of a tile: 8 or 16
  // Parts of the columns of the matrix that are multiplied at once: a team has a warp for each, or
  // a cluster a block.
  int team = 1;
  int cluster = 1;  // blocks
  bool x_on_left = false;

  static constexpr int kMostWarps = 8, kMostCluster = 8;
  static constexpr int kRounds = kGapStreamNumbers;  // of a step: a number of each stream
  // Of a round. One takes half of the numbers of a quarter of the lanes.
  static constexpr int kProducts = 4;

  constexpr int Planes() const { return columns / 8; }
  // How x lies in shared memory: in planes of 8 columns.
  constexpr PackedGapsConfig Plane() const {
    return {.numbers = numbers, .columns = 8, .x_on_left = x_on_left};
  }
  // Addresses of x that a lane brings: matrices of 8 x 8 come by fours, of a product two for each
  // plane.
  constexpr int Addresses() const { return kProducts * 2 * Planes() / 4; }
  constexpr int Ahead() const { return 60 / GapStepWords(numbers); }  // steps
  constexpr int Sums() const { return 2 * Planes(); }                 // of a lane

  // Of shared memory, in bytes: planes, each with a row of zeros in front, which streams without
  // numbers read, and rows behind, where a damaged matrix may lead in a step; sums of warps.
  static constexpr int kRowBytes = PackedGapsConfig::kRowBytes;
  static constexpr int kBehindBytes = kRounds * kMostGap * kRowBytes;
  constexpr int64_t PlaneBytes(int64_t width) const {
    return kRowBytes + team * width / kGapLanes * kRowBytes + kBehindBytes;
  }
  static constexpr int kSumsBytes = kWarp * 16;
  // Those of a cluster's block are read while it leaves the next ones.
  constexpr int SumsOfWarp() const { return cluster > 1 ? 2 : team > 1 ? 1 : 0; }
  constexpr int64_t SharedBytes(int64_t width) const {
    return Planes() * PlaneBytes(width) + kMostWarps * SumsOfWarp() * kSumsBytes;
  }
};

}  // namespace jaxsparse
