// The kernel that writes a sparse matrix out as a dense one, for kernels that keep it on chip so.
#pragma once

#include <string>

#include "nvrtc/kernel.h"
#include "persistent/densify_problem.h"

namespace jaxsparse {

KernelSource DensifySource(DType dtype, IndexType index_type);

// Launches on `stream`; returns the reason of a failure, or an empty string.
std::string Densify(const DensifyProblem& problem, DType dtype, IndexType index_type, int device,
                    void* stream);

}  // namespace jaxsparse
