// The tables of CUDA variants of attention over a block mask or a pattern.
#include "attention/attention_cuda.h"

#include "attention/attention.h"

namespace jaxsparse {
namespace {

// The rows are constant-initialised in their files, so they can be copied here at start-up, in
// whatever order files are initialised.
const CudaVariant<AttentionProblem> kVariants[] = {kAttentionTiles, kAttentionTilesMma,
                                                   kAttentionDecode, kAttentionCsr};
const CudaVariant<PagedAttentionProblem> kPagedVariants[] = {kPagedAttentionDecode};
const CudaVariant<AttentionTangentProblem> kTangentVariants[] = {kAttentionTangentMma};
const CudaVariant<AttentionCotangentProblem> kCotangentVariants[] = {
    kAttentionCotangentTiles, kAttentionCotangentTilesMma, kAttentionCotangentCsr};

}  // namespace

extern constinit const Table<CudaVariant<AttentionProblem>> kAttentionCudaVariants =
    MakeTable(kVariants);
extern constinit const Table<CudaVariant<AttentionTangentProblem>> kAttentionTangentCudaVariants =
    MakeTable(kTangentVariants);
extern constinit const Table<CudaVariant<PagedAttentionProblem>> kPagedAttentionCudaVariants =
    MakeTable(kPagedVariants);
extern constinit const Table<CudaVariant<AttentionCotangentProblem>>
    kAttentionCotangentCudaVariants = MakeTable(kCotangentVariants);

}  // namespace jaxsparse
