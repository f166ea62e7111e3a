// How the times of the softmax's CUDA kernels are predicted.
#pragma once

#include "sparse_softmax/problem.h"

namespace jaxsparse {

// Microseconds on an H200, fitted to 3 problems of float32: 0.1, 0.3 and 7 million entries.
struct SoftmaxCostModel {
  double launch_us;
  double entry_us;

  double Of(const SparseSoftmaxProblem& p) const {
    return launch_us + entry_us * static_cast<double>(p.batch.count * p.pattern.nse);
  }
};

}  // namespace jaxsparse
