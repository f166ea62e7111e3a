// The CUDA variants of the sparse-dense product, each defined beside its kernel in kernels/.
#pragma once

#include "host/variant.h"
#include "spmm/problem.h"

namespace jaxsparse {

using SpmmVariant = CudaVariant<SpmmProblem>;

// kernels/generic.cc: right for whatever the operation accepts; rows with the dense matrix on the
// right, dots with it on the left.
extern const SpmmVariant kSpmmGenericRows, kSpmmGenericDots;
// kernels/tiled.cc: with all techniques, and without one.
extern const SpmmVariant kSpmmTiledRows, kSpmmTiledRowsScalar, kSpmmTiledRowsUnshared,
    kSpmmTiledRowsUnordered, kSpmmTiledRowsRolled, kSpmmTiledRowsPrescaled;
// kernels/split.cc
extern const SpmmVariant kSpmmSplitRows;
// kernels/staged.cc
extern const SpmmVariant kSpmmStagedRows;
// kernels/tensor_cores.cc: split-K where that is faster, never, or wherever there is anything to
// split.
extern const SpmmVariant kSpmmTensorCores, kSpmmTensorCoresUnsplit, kSpmmTensorCoresSplitK;

}  // namespace jaxsparse
