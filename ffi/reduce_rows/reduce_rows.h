// Kernel variants of reductions of rows; see problem.h for what they compute.
#pragma once

#include "cpu/isa.h"
#include "host/table.h"
#include "host/variant.h"
#include "reduce_rows/problem.h"

namespace jaxsparse {

// reduce_rows_cpu.cc, once for each instruction set.
namespace portable {
extern const Table<CpuVariant<ReduceRowsProblem>> kReduceRowsCpuVariants;
}
#ifdef JAXSPARSE_X86
namespace avx2 {
extern const Table<CpuVariant<ReduceRowsProblem>> kReduceRowsCpuVariants;
}
namespace avx512 {
extern const Table<CpuVariant<ReduceRowsProblem>> kReduceRowsCpuVariants;
}
#endif

extern const Table<CudaVariant<ReduceRowsProblem>> kReduceRowsCudaVariants;

}  // namespace jaxsparse
