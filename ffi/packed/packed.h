// Kernel variants of the product by a packed matrix; see problem.h for what it computes.
#pragma once

#include "host/table.h"
#include "host/variant.h"
#include "packed/problem.h"

namespace jaxsparse {

extern const Table<CudaVariant<PackedProblem>> kPackedCudaVariants;
// out (m, k) is the matrix itself; nothing else is dense.
extern const Table<CudaVariant<PackedProblem>> kUnpackCudaVariants;

}  // namespace jaxsparse
