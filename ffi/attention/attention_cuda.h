// The CUDA variants of attention over a block mask, each defined with its kernel in kernels/.
#pragma once

#include "attention/problem.h"
#include "host/variant.h"

namespace jaxsparse {

// kernels/tiles.cc
extern const CudaVariant<AttentionProblem> kAttentionTiles;
// kernels/decode.cc
extern const CudaVariant<AttentionProblem> kAttentionDecode;
extern const CudaVariant<AttentionProblem> kAttentionDecodeWide, kAttentionDecodeSingle;
extern const CudaVariant<PagedAttentionProblem> kPagedAttentionDecode;
// kernels/keys.cc
extern const CudaVariant<AttentionCotangentProblem> kAttentionCotangentTiles;

}  // namespace jaxsparse
