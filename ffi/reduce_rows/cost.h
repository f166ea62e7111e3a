// How the times of the CUDA kernels of reductions of rows are predicted.
#pragma once

#include "reduce_rows/problem.h"

namespace jaxsparse {

// Microseconds expected of an H200: a start, and the values at the pace of memory.
struct ReductionCost {
  double launch_us;

  double Of(const ReduceRowsProblem& p) const {
    constexpr double kBytesOfUs = 3.6e6;
    return launch_us +
           static_cast<double>(p.batch.count * p.pattern.nse * SizeOf(p.dtype)) / kBytesOfUs;
  }
};

}  // namespace jaxsparse
