// How products by packed matrices are launched, whatever kernel makes them.
#pragma once

#include "nvrtc/expression.h"
#include "packed/kernels/packed_parts.h"
#include "packed/packed_cuda.h"

namespace jaxsparse {

constexpr int kWidestPackedTile = 64;  // columns

inline bool FitsPacked(const PackedProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return p.k < kMost && p.n < kMost && p.m < kMost;
}

// What numbers are, as configurations say it.
inline Field NumbersField(PackedNumbers numbers) {
  const char* name = numbers == PackedNumbers::kPlain  ? "kPlain"
                     : numbers == PackedNumbers::kInt8 ? "kInt8"
                                                       : "kE4M3";
  return {"numbers", std::string("jaxsparse::PackedNumbers::") + name};
}

// Clocks that a fragment takes more than one of numbers of 16 bits: an instruction takes a warp
// 0.45, as cells of 1 and of 2 were measured.
inline double ClocksOfNumbers(PackedNumbers numbers) {
  constexpr double kOfInstruction = 0.45;
  switch (numbers) {
    case PackedNumbers::kPlain:
      return 0;
    case PackedNumbers::kInt8:
      return kOfInstruction * 11;
    case PackedNumbers::kE4M3:
      return kOfInstruction * 18;
  }
  return 0;
}

// Microseconds that a product takes at least: what passes through memory, or as many clocks for
// each fragment, where so many blocks run at once.
inline double PackedMicroseconds(const PackedProblem& p, int64_t blocks, int64_t at_once, int warps,
                                 double clocks_of_fragment) {
  constexpr double kBytes = 4.1e6;
  const double fragments = static_cast<double>(PackedPanels(p.k, p.parts)) * warps * 16;
  const auto waves = static_cast<double>(CeilDivide(blocks, at_once));
  const double masks = static_cast<double>(p.m) * static_cast<double>(p.k) / (8 * p.cell);
  const double bytes = static_cast<double>(p.words * kPackedRowBytes) + masks;
  const double shared = waves * fragments * clocks_of_fragment / kClocksOfMicrosecond;
  return bytes / kBytes > shared ? bytes / kBytes : shared;
}

}  // namespace jaxsparse
