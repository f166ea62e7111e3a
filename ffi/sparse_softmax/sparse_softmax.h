// Kernel variants of the softmax over stored entries; see problem.h for what it computes.
#pragma once

#include "cpu/isa.h"
#include "host/table.h"
#include "host/variant.h"
#include "sparse_softmax/problem.h"

namespace jaxsparse {

// sparse_softmax_cpu.cc, once for each instruction set.
namespace portable {
extern const Table<CpuVariant<SparseSoftmaxProblem>> kSparseSoftmaxCpuVariants;
}
#ifdef JAXSPARSE_X86
namespace avx2 {
extern const Table<CpuVariant<SparseSoftmaxProblem>> kSparseSoftmaxCpuVariants;
}
namespace avx512 {
extern const Table<CpuVariant<SparseSoftmaxProblem>> kSparseSoftmaxCpuVariants;
}
#endif

extern const Table<CudaVariant<SparseSoftmaxProblem>> kSparseSoftmaxCudaVariants;

}  // namespace jaxsparse
