// The CUDA variants of products by packed matrices, and of writing these out, each defined beside
// its kernel in kernels/.
#pragma once

#include "host/variant.h"
#include "packed/problem.h"

namespace jaxsparse {

using PackedVariant = CudaVariant<PackedProblem>;

// kernels/packed_gaps.cc
extern const PackedVariant kPackedGaps;
// kernels/packed_gaps_mma.cc
extern const PackedVariant kPackedGapsMma;
// kernels/packed_mma.cc
extern const PackedVariant kPackedMma;
// kernels/packed_wgmma.cc
extern const PackedVariant kPackedWgmma;
// kernels/packed_unpack.cc
extern const PackedVariant kPackedUnpack;
// kernels/packed_unpack_gaps.cc
extern const PackedVariant kPackedUnpackGaps;

}  // namespace jaxsparse
