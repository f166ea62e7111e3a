// The CUDA variants of products by packed matrices, and of writing these out, each defined beside
// its kernel in kernels/.
#pragma once

#include "host/variant.h"
#include "packed/problem.h"

namespace jaxsparse {

using PackedVariant = CudaVariant<PackedProblem>;

// kernels/packed_mma.cc
extern const PackedVariant kPackedMma;
// kernels/packed_wgmma.cc
extern const PackedVariant kPackedWgmma;
// kernels/packed_unpack.cc
extern const PackedVariant kPackedUnpack;

}  // namespace jaxsparse
