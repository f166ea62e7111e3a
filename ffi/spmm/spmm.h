// Kernel variants of the sparse-dense product; see problem.h for what it computes.
#pragma once

#include "cpu/isa.h"
#include "host/table.h"
#include "host/variant.h"
#include "spmm/problem.h"

namespace jaxsparse {

// spmm_cpu.cc, once for each instruction set.
namespace portable {
extern const Table<CpuVariant<SpmmProblem>> kSpmmCpuVariants;
}
#ifdef JAXSPARSE_X86
namespace avx2 {
extern const Table<CpuVariant<SpmmProblem>> kSpmmCpuVariants;
}
namespace avx512 {
extern const Table<CpuVariant<SpmmProblem>> kSpmmCpuVariants;
}
#endif

extern const Table<CudaVariant<SpmmProblem>> kSpmmCudaVariants;

}  // namespace jaxsparse
