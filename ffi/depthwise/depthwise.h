// Kernel variants of depthwise convolutions and their transposes; see problem.h for what they
// compute.
#pragma once

#include "cpu/isa.h"
#include "depthwise/problem.h"
#include "host/table.h"
#include "host/variant.h"

namespace jaxsparse {

struct DepthwiseCpuTables {
  Table<CpuVariant<DepthwiseProblem>> forward, input, kernel;
};

// depthwise_cpu.cc, once for each instruction set.
namespace portable {
extern const DepthwiseCpuTables kDepthwiseCpuVariants;
}
#ifdef JAXSPARSE_X86
namespace avx2 {
extern const DepthwiseCpuTables kDepthwiseCpuVariants;
}
namespace avx512 {
extern const DepthwiseCpuTables kDepthwiseCpuVariants;
}
#endif

extern const Table<CudaVariant<DepthwiseProblem>> kDepthwiseCudaVariants;
extern const Table<CudaVariant<DepthwiseProblem>> kDepthwiseInputCudaVariants;
extern const Table<CudaVariant<DepthwiseProblem>> kDepthwiseKernelCudaVariants;

}  // namespace jaxsparse
