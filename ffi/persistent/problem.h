// What the host tells persistent kernels, whose blocks wait for one another within a launch: their
// problems contain these.
#pragma once

#include "types.h"

namespace jaxsparse {

// Clock cycles between the end of a block's product and its first poll for what the product after
// it takes, and by how many that grows after a poll in vain and falls after one in time
// (backoff.cuh).
struct PollDelays {
  uint32_t first = 0;
  uint32_t increase = 0;
  uint32_t decrease = 0;
};

// A wait for other blocks longer than limit_ns sets *error to 0 and *report, in the host's memory,
// to 1, and turns what depends on it to NaN (watchdog.cuh). Every byte of *error is 0xff before the
// launch.
struct WaitLimits {
  int64_t limit_ns = 0;
  uint32_t* error = nullptr;
  uint32_t* report = nullptr;
};

}  // namespace jaxsparse
