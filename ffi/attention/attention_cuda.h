// The CUDA variants of attention over a block mask or a pattern, each defined with its kernel in
// kernels/.
#pragma once

#include "attention/problem.h"
#include "host/variant.h"

namespace jaxsparse {

// kernels/tiles.cc
extern const CudaVariant<AttentionProblem> kAttentionTiles;
// kernels/decode.cc
extern const CudaVariant<AttentionProblem> kAttentionDecode;
extern const CudaVariant<PagedAttentionProblem> kPagedAttentionDecode;
// kernels/tiles_mma.cc
extern const CudaVariant<AttentionProblem> kAttentionTilesMma;
// kernels/tangent_mma.cc
extern const CudaVariant<AttentionTangentProblem> kAttentionTangentMma;
// kernels/csr.cc
extern const CudaVariant<AttentionProblem> kAttentionCsr;
// kernels/keys.cc
extern const CudaVariant<AttentionCotangentProblem> kAttentionCotangentTiles;
// kernels/csr_cotangent.cc
extern const CudaVariant<AttentionCotangentProblem> kAttentionCotangentCsr;
// kernels/cotangent_mma.cc
extern const CudaVariant<AttentionCotangentProblem> kAttentionCotangentTilesMma;

}  // namespace jaxsparse
