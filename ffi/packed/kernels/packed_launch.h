// How products by packed matrices are launched, whatever kernel makes them.
#pragma once

#include "packed/kernels/packed_parts.h"
#include "packed/packed_cuda.h"

namespace jaxsparse {

constexpr int kWidestPackedTile = 64;  // columns

inline bool FitsPacked(const PackedProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return p.k < kMost && p.n < kMost && p.m < kMost;
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
