// When a warp polls for what other blocks publish.
#pragma once

#include "cuda/device.cuh"
#include "persistent/problem.h"

namespace jaxsparse {

__device__ __forceinline__ void WaitCycles(uint32_t start, uint32_t cycles) {
  while (static_cast<uint32_t>(clock()) - start < cycles) {
  }
}

// A poll in vain costs another trip to the L2 cache and holds up the stores there that it waits
// for, so that a late first poll is better than an early one: it comes so many cycles after Start
// as PollDelays says. With an increase and decrease that are not 0 it moves later with each poll in
// vain, and earlier, much slower, with each in time.
class Backoff {
 public:
  __device__ explicit Backoff(const PollDelays& delays)
      : cycles_(delays.first), increase_(delays.increase), decrease_(delays.decrease) {}

  __device__ __forceinline__ void Start() { start_ = static_cast<uint32_t>(clock()); }
  __device__ __forceinline__ void Wait() const { WaitCycles(start_, cycles_); }
  __device__ __forceinline__ void Adapt(bool was_in_vain) {
    if (was_in_vain) {
      cycles_ = cycles_ + increase_ < kMost ? cycles_ + increase_ : kMost;
    } else {
      cycles_ -= cycles_ < decrease_ ? cycles_ : decrease_;
    }
  }

 private:
  static constexpr uint32_t kMost = 4096;  // a block that was held up once mustn't slow the rest

  uint32_t start_ = 0;
  uint32_t cycles_, increase_, decrease_;
};

}  // namespace jaxsparse
