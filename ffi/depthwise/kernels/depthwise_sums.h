// How the kernels of the transpose in the kernel are configured, by the host, for the device: where
// their sums lie.
#pragma once

#include "depthwise/problem.h"

namespace jaxsparse {

constexpr int kDepthwiseSumThreads = 128;  // of a block
constexpr int kDepthwiseSumColumns = 4;    // of a piece

// Rows of y that a thread takes at a time: those of x that they read are all in registers.
JAXSPARSE_INLINE constexpr int DepthwiseSumRows(int stride) { return stride == 1 ? 4 : 2; }

struct DepthwiseSumsConfig {
  int stride = 1;
  int left = 1;
};

// Pieces of four columns and some rows that a channel consists of.
JAXSPARSE_INLINE int64_t DepthwisePieces(const DepthwiseProblem& p) {
  return p.images * CeilDivide(p.rows, DepthwiseSumRows(p.stride)) *
         CeilDivide(p.columns, kDepthwiseSumColumns);
}

// Slices of a channel, each a block's: by shapes alone, so that sums are the same on every GPU.
JAXSPARSE_INLINE int64_t DepthwiseSlices(const DepthwiseProblem& p) {
  constexpr int64_t kBlocks = 1024;  // enough for any GPU
  const int64_t channels = p.batch.count * p.channels;
  const int64_t wanted = channels > 0 ? CeilDivide(kBlocks, channels) : 1;
  const int64_t full = CeilDivide(DepthwisePieces(p), kDepthwiseSumThreads);
  return wanted < full ? wanted : full > 0 ? full : 1;
}

}  // namespace jaxsparse
