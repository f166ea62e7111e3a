// What a kernel that times out (watchdog.cuh) leaves behind: its handler has returned
// by then, and a replayed graph has none, so it writes to a word of host memory instead.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace jaxsparse {

// The word of a device, in host memory that the device can write; null with the reason in `error`.
// The first call for a device allocates, so it must not come while a graph is captured.
uint32_t* FailureWord(int device, std::string* error);

// Whether a scan on that device has failed since the last time this was asked. Does not wait.
bool TakeFailure(int device);

// Waits for all work of the devices that run scans, and says which of them have failed scans.
std::vector<int> WaitForFailures(std::string* error);

}  // namespace jaxsparse
