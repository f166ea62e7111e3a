// CPU kernels of attention over a block mask.
#include "attention/attention.h"

namespace jaxsparse::JAXSPARSE_ISA {

extern constinit const Table<CpuVariant<AttentionProblem>> kAttentionCpuVariants = {nullptr, 0};
extern constinit const Table<CpuVariant<AttentionCotangentProblem>> kAttentionCotangentCpuVariants =
    {nullptr, 0};

}  // namespace jaxsparse::JAXSPARSE_ISA
