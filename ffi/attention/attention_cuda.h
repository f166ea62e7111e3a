// The CUDA variants of attention over a block mask, each defined with its kernel in kernels/.
#pragma once

#include "attention/problem.h"
#include "host/variant.h"

namespace jaxsparse {

// kernels/tiles.cc
extern const CudaVariant<AttentionProblem> kAttentionTiles;
// kernels/tiles_mma.cc
extern const CudaVariant<AttentionProblem> kAttentionTilesMma;
// kernels/tangent_mma.cc
extern const CudaVariant<AttentionTangentProblem> kAttentionTangentMma;
// kernels/keys.cc
extern const CudaVariant<AttentionCotangentProblem> kAttentionCotangentTiles;
// kernels/cotangent_mma.cc
extern const CudaVariant<AttentionCotangentProblem> kAttentionCotangentTilesMma;

}  // namespace jaxsparse
