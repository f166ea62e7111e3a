// The CUDA variants of reductions of rows, each defined with its kernel in kernels/.
#pragma once

#include "host/variant.h"
#include "reduce_rows/problem.h"

namespace jaxsparse {

// kernels/rows.cc
extern const CudaVariant<ReduceRowsProblem> kReduceRowsByRows;
// kernels/runs.cc
extern const CudaVariant<ReduceRowsProblem> kReduceRowsByRuns;

inline const char* NameInDeviceCode(Reduction reduction) {
  switch (reduction) {
    case Reduction::kMaximum:
      return "jaxsparse::Reduction::kMaximum";
    case Reduction::kLogSumExp:
      return "jaxsparse::Reduction::kLogSumExp";
  }
  return "";
}

}  // namespace jaxsparse
