// Kernel variants of the sampled dense-dense product; see problem.h for what it computes.
#pragma once

#include "cpu/isa.h"
#include "host/table.h"
#include "host/variant.h"
#include "sddmm/problem.h"

namespace jaxsparse {

// sddmm_cpu.cc, once for each instruction set.
namespace portable {
extern const Table<CpuVariant<SddmmProblem>> kSddmmCpuVariants;
}
#ifdef JAXSPARSE_X86
namespace avx2 {
extern const Table<CpuVariant<SddmmProblem>> kSddmmCpuVariants;
}
namespace avx512 {
extern const Table<CpuVariant<SddmmProblem>> kSddmmCpuVariants;
}
#endif

extern const Table<CudaVariant<SddmmProblem>> kSddmmCudaVariants;

}  // namespace jaxsparse
