// A barrier of the blocks of a launch: the other way to exchange what a step computes. It costs two
// more trips through the L2 cache than flags in the data (exchange.cuh), and is there to measure
// those and to check them by.
#pragma once

#include "persistent/watchdog.cuh"

namespace jaxsparse {

constexpr uint32_t kNoArrivals = 0xffffffffu;  // in *arrivals before the launch; it wraps around

// Meets kBlocks blocks for the step-th time. Called by one thread, after the block's other threads
// have published and met it, and before they read what the other blocks published.
template <int kBlocks>
__device__ __forceinline__ void MeetOtherBlocks(uint32_t* arrivals, int64_t step,
                                                Watchdog* watchdog) {
  FenceOfGpu();
  AddRelaxed(arrivals, 1);
  const uint32_t all = kNoArrivals + static_cast<uint32_t>(step + 1) * kBlocks;
  watchdog->Begin();
  while (static_cast<int32_t>(LoadRelaxed(arrivals) - all) < 0 && !watchdog->TimesOut()) {
  }
  FenceOfGpu();
}

}  // namespace jaxsparse
