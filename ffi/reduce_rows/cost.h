// How the times of the CUDA kernels of reductions of rows are predicted.
#pragma once

#include "reduce_rows/problem.h"

namespace jaxsparse {

// Microseconds of an H200, fitted to maxima in float32 of graphs of 2 and 20 million edges and of
// 6.6 million weights, within 15 % where rows are alike: a start, the values at a pace, and what
// each row takes.
struct ReductionCost {
  double launch_us;
  double bytes_of_us;
  double row_us = 0;

  double Of(const ReduceRowsProblem& p) const {
    const auto count = static_cast<double>(p.batch.count);
    const auto bytes = static_cast<double>(p.pattern.nse * SizeOf(p.dtype));
    return launch_us + count * (bytes / bytes_of_us + row_us * static_cast<double>(p.pattern.rows));
  }
};

}  // namespace jaxsparse
