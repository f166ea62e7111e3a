// Ends waits for other blocks that last too long, so that a launch never hangs.
#pragma once

#include "cuda/device.cuh"
#include "persistent/problem.h"

namespace jaxsparse {

constexpr uint32_t kNoError = 0xffffffffu;  // in *error until some thread times out

// The watchdog of one thread. When it times out it says so in *error, which the watchdogs of all
// blocks poll now and then, and they time out, too. A thread that timed out doesn't leave the
// kernel but goes on without waiting, so that no other thread waits for it; the results are NaN.
class Watchdog {
 public:
  __device__ explicit Watchdog(const WaitLimits& limits)
      : error_(limits.error),
        report_(limits.report),
        limit_(static_cast<uint64_t>(limits.limit_ns)) {}

  __device__ bool timed_out() const { return timed_out_; }
  // A new wait begins.
  __device__ void Begin() { polls_ = 0; }

  // Whether a poll was in vain since this was last asked.
  __device__ bool TakeHasWaited() {
    const bool has_waited = has_waited_;
    has_waited_ = false;
    return has_waited;
  }

  // Called after every poll in vain.
  __device__ bool TimesOut() {
    has_waited_ = true;
    if (timed_out_) return true;
    if (++polls_ % kPollsPerCheck == 0) Check();
    return timed_out_;
  }

 private:
  static constexpr uint32_t kPollsPerCheck = 256;

  __device__ void Check() {
    const uint64_t now = GlobalTimer();
    if (polls_ == kPollsPerCheck) start_ = now;
    if (now - start_ > limit_) {
      StoreRelaxed(error_, 0u);
      SetFlagOfHost(report_);
    }
    timed_out_ = now - start_ > limit_ || LoadRelaxed(error_) != kNoError;
  }

  uint32_t* error_;
  uint32_t* report_;
  uint64_t limit_;
  uint64_t start_ = 0;
  uint32_t polls_ = 0;
  bool timed_out_ = false;
  bool has_waited_ = false;
};

}  // namespace jaxsparse
