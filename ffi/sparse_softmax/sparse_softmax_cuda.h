// The CUDA variants of the softmax over stored entries, each defined with its kernel in kernels/.
#pragma once

#include "host/variant.h"
#include "sparse_softmax/problem.h"

namespace jaxsparse {

// kernels/generic.cc
extern const CudaVariant<SparseSoftmaxProblem> kSparseSoftmaxGenericRows;
// kernels/registers.cc
extern const CudaVariant<SparseSoftmaxProblem> kSparseSoftmaxRowsInRegisters;
// kernels/runs.cc
extern const CudaVariant<SparseSoftmaxProblem> kSparseSoftmaxRunsOfRows;

}  // namespace jaxsparse
