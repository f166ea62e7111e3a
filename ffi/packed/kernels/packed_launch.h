// How products by packed matrices are launched, whatever kernel makes them.
#pragma once

#include "nvrtc/kernel.h"
#include "packed/kernels/packed_parts.h"
#include "packed/packed_cuda.h"

namespace jaxsparse {

constexpr int kWidestPackedTile = 64;  // columns

// No block has arrived yet.
inline constexpr CudaKernel<PackedProblem> kPackedPrologue{
    [](const PackedProblem&) {
      return KernelSource{"packed/kernels/packed_prologue.cu", "jaxsparse::PackedPrologue"};
    },
    [](const PackedProblem& p) {
      constexpr int kThreads = 256;
      return LaunchShape{CeilDivide(PackedCountsBytes(p) / 16, kThreads), kThreads};
    }};

// Whichever tiles there will be: the last of them may be nearly empty.
inline int64_t MostPackedWorkspaceBytes(const PackedProblem& p, bool) {
  constexpr int kMostRows = 8 * kPackedStripRows;
  return PackedWorkspaceBytes(p, kMostRows, kWidestPackedTile);
}

inline bool FitsPacked(const PackedProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return p.k < kMost && p.n < kMost && p.m < kMost;
}

// Microseconds that a product takes at least: what passes through memory, or as many clocks for
// each fragment of the blocks of a multiprocessor.
inline double PackedMicroseconds(const PackedProblem& p, int64_t blocks, int warps,
                                 double clocks_of_fragment) {
  constexpr double kBytes = 4.1e6;
  const double fragments = static_cast<double>(PackedPanels(p.k, p.parts)) * warps * 16;
  const auto waves = static_cast<double>(CeilDivide(blocks, p.gpu.multiprocessors));
  const double masks = static_cast<double>(p.m) * static_cast<double>(p.k) / (8 * p.cell);
  const double bytes = static_cast<double>(p.words * kPackedRowBytes) + masks;
  const double shared = waves * fragments * clocks_of_fragment / kClocksOfMicrosecond;
  return bytes / kBytes > shared ? bytes / kBytes : shared;
}

}  // namespace jaxsparse
