// The CUDA variants of the product by a packed matrix, each defined beside its kernel in kernels/.
#pragma once

#include "host/variant.h"
#include "packed/problem.h"

namespace jaxsparse {

using PackedVariant = CudaVariant<PackedProblem>;

// kernels/packed_mma.cc
extern const PackedVariant kPackedMma;

}  // namespace jaxsparse
