// How products by packed matrices are launched, whatever kernel makes them.
#pragma once

#include <algorithm>

#include "nvrtc/expression.h"
#include "packed/kernels/packed_parts.h"
#include "packed/packed_cuda.h"

namespace jaxsparse {

constexpr int kWidestPackedTile = 64;  // columns

inline bool FitsPacked(const PackedProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return p.k < kMost && p.n < kMost && p.m < kMost;
}

// Of numbers and gaps, of a matrix by gaps.
inline double GapBytes(const PackedProblem& p) {
  return static_cast<double>(p.words * GapStepWords(p.numbers) * kPackedRowBytes);
}

// How blocks share a matrix by gaps: tiles of so many columns, teams of so many warps, how many
// warps a block has at most, and clusters of so many blocks.
struct GapsShares {
  int columns, team, most_warps, cluster = 1;
};

// As many teams as make all strips in the fewest rounds, each of all multiprocessors. Those of a
// cluster's blocks make the same strips.
inline LaunchShape GapsShape(const PackedProblem& p, const GapsShares& shares,
                             int64_t shared_bytes) {
  constexpr int kLeastWarps = 4;  // that bring x
  const int64_t strips = GapStrips(p), most = shares.most_warps / shares.team;
  // The blocks of a larger cluster are in one of the groups that multiprocessors come in, some of
  // which are smaller.
  constexpr int kGroup = 16, kMissing = 2;
  const int multiprocessors = p.gpu.multiprocessors, cluster = shares.cluster;
  const int at_once = cluster <= 2 ? multiprocessors / cluster
                                   : multiprocessors / kGroup * (kGroup / cluster) - kMissing;
  const int64_t groups = std::max(at_once, 1);
  const int64_t of_group = std::max<int64_t>(CeilDivide(strips, groups), 1);
  const int64_t least = CeilDivide(kLeastWarps, shares.team);
  const int64_t teams = std::max(CeilDivide(of_group, CeilDivide(of_group, most)), least);
  const int64_t blocks = std::min(CeilDivide(strips, teams), groups) * shares.cluster;
  return {blocks * CeilDivide(p.n, shares.columns), static_cast<int>(teams * shares.team) * kWarp,
          static_cast<int>(shared_bytes), shares.cluster};
}

// What numbers are, as configurations say it.
inline Field NumbersField(PackedNumbers numbers) {
  const char* name = numbers == PackedNumbers::kPlain  ? "kPlain"
                     : numbers == PackedNumbers::kInt8 ? "kInt8"
                                                       : "kE4M3";
  return {"numbers", std::string("jaxsparse::PackedNumbers::") + name};
}

// Instructions that a fragment takes more than one of numbers of 16 bits in cells of 1, counted in
// machine code.
inline int InstructionsOfNumbers(PackedNumbers numbers) {
  switch (numbers) {
    case PackedNumbers::kPlain:
      return 0;
    case PackedNumbers::kInt8:
      return 13;
    case PackedNumbers::kE4M3:
      return 20;
  }
  return 0;
}

// Microseconds that a product takes at least: what passes through memory, or as many clocks for
// each fragment, where so many blocks run at once.
inline double PackedMicroseconds(const PackedProblem& p, int64_t blocks, int64_t at_once, int warps,
                                 double clocks_of_fragment) {
  constexpr double kBytes = 3.8e6;  // of memory, in a microsecond, as words come in parts
  const double fragments =
      static_cast<double>(PackedPanels(p.k, p.parts)) * warps * (kPackedPanelColumns / 16);
  const auto waves = static_cast<double>(CeilDivide(blocks, at_once));
  const double masks = static_cast<double>(p.m) * static_cast<double>(p.k) / (8 * p.cell);
  const double bytes = static_cast<double>(p.words * kPackedRowBytes) + masks;
  const double shared = waves * fragments * clocks_of_fragment / kClocksOfMicrosecond;
  return bytes / kBytes > shared ? bytes / kBytes : shared;
}

}  // namespace jaxsparse
