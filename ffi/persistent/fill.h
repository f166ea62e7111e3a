// The kernel that fills several regions of memory, in one launch where each of them would take one
// of cudaMemsetAsync.
#pragma once

#include <string>

#include "host/variant.h"
#include "nvrtc/kernel.h"
#include "persistent/fill_problem.h"

namespace jaxsparse {

KernelSource FillSource();

// Adds a region, at a multiple of 4 bytes and of so many, perhaps in parts; none where there are no
// bytes. There may be kMostFilledRegions. Those that have parts come last: what others take to fill
// hides the load of the number of parts.
void AddRegion(void* at, int64_t bytes, uint32_t value, FillProblem* problem,
               int64_t part_bytes = 0);

// Fills, and launches a kernel. That may begin before all is filled, though not before what came in
// front of the fill is done. It waits itself before it reads or writes what is filled, and so does
// each of its blocks before it ends (WaitForPrologue). Returns the reason of a failure, or an empty
// string.
std::string LaunchFilled(const FillProblem& fill, const CudaLaunch& launch, void* problem);

}  // namespace jaxsparse
