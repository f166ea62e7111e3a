// The CUDA variants of the sampled dense-dense product, each defined with its kernel in kernels/.
#pragma once

#include "host/variant.h"
#include "sddmm/problem.h"

namespace jaxsparse {

// kernels/generic.cc
extern const CudaVariant<SddmmProblem> kSddmmGenericEntries;
// kernels/tiled.cc
extern const CudaVariant<SddmmProblem> kSddmmTiledEntries;
extern const CudaVariant<SddmmProblem> kSddmmTiledEntriesScalar;
extern const CudaVariant<SddmmProblem> kSddmmTiledEntriesUnbalanced;
// kernels/staged.cc
extern const CudaVariant<SddmmProblem> kSddmmStagedEntries;
// kernels/tensor_cores.cc
extern const CudaVariant<SddmmProblem> kSddmmTensorCores;

}  // namespace jaxsparse
