// Kernel variants of attention over a block mask or a pattern; see problem.h for what they compute.
#pragma once

#include "attention/problem.h"
#include "cpu/isa.h"
#include "host/table.h"
#include "host/variant.h"

namespace jaxsparse {

// attention_cpu.cc, once for each instruction set.
namespace portable {
extern const Table<CpuVariant<AttentionProblem>> kAttentionCpuVariants;
extern const Table<CpuVariant<AttentionCotangentProblem>> kAttentionCotangentCpuVariants;
}  // namespace portable
#ifdef JAXSPARSE_X86
namespace avx2 {
extern const Table<CpuVariant<AttentionProblem>> kAttentionCpuVariants;
extern const Table<CpuVariant<AttentionCotangentProblem>> kAttentionCotangentCpuVariants;
}  // namespace avx2
namespace avx512 {
extern const Table<CpuVariant<AttentionProblem>> kAttentionCpuVariants;
extern const Table<CpuVariant<AttentionCotangentProblem>> kAttentionCotangentCpuVariants;
}  // namespace avx512
#endif

extern const Table<CudaVariant<AttentionProblem>> kAttentionCudaVariants;
extern const Table<CudaVariant<AttentionTangentProblem>> kAttentionTangentCudaVariants;
extern const Table<CudaVariant<PagedAttentionProblem>> kPagedAttentionCudaVariants;
extern const Table<CudaVariant<AttentionCotangentProblem>> kAttentionCotangentCudaVariants;

}  // namespace jaxsparse
