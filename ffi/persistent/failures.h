// How the host hears of a kernel that timed out (watchdog.cuh). By then the handler that launched
// it has returned, and a replayed graph has no handler: so the kernel writes to a word of host
// memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxsparse {

// The word of a device, in host memory that the device can write; null with the reason in `error`.
// The first call for a device allocates, so it must not come while a graph is captured.
uint32_t* FailureWord(int device, std::string* error);

// Whether a kernel on that device has timed out since this was last asked. Does not wait.
bool TakeFailure(int device);

// Waits for all work of the devices that ran persistent kernels, and returns those on which one has
// timed out.
std::vector<int> WaitForFailures(std::string* error);

}  // namespace jaxsparse
