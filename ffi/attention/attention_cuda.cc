// The tables of CUDA variants of attention over a block mask.
#include "attention/attention_cuda.h"

#include "attention/attention.h"

namespace jaxsparse {

extern constinit const Table<CudaVariant<AttentionProblem>> kAttentionCudaVariants = {nullptr, 0};
extern constinit const Table<CudaVariant<AttentionCotangentProblem>>
    kAttentionCotangentCudaVariants = {nullptr, 0};

}  // namespace jaxsparse
