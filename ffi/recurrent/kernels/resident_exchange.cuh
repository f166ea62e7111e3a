// How blocks that share a scan (resident.cu) come to have all of its state: each sends what its
// warps have made to the exchange buffer, and receives the rest into its own shared memory.
#pragma once

#include "persistent/backoff.cuh"
#include "persistent/exchange.cuh"
#include "recurrent/arrays.cuh"
#include "recurrent/kernels/resident.h"
#include "recurrent/scan_of_block.cuh"

namespace jaxsparse {

template <typename Plan>
class ResidentExchange {
  static constexpr ResidentSizes kSizes = Plan::kSizes;
  static constexpr bool kNeeded = kSizes.blocks > 1;
  static constexpr int kGroups = kSizes.part / 8, kOwnGroups = kSizes.block_units / 8;

 public:
  // `shared`: the block's, of which all threads call this before a barrier.
  __device__ __forceinline__ ResidentExchange(const RecurrentScanProblem& p, Words4* shared)
      : shared_(shared),
        steps_(static_cast<int>(p.steps)),
        watchdog_(p.wait_limits),
        backoff_(p.poll_delays) {
    if constexpr (kNeeded) {
      buffer_ = static_cast<Words4*>(ExchangeOf<Plan>(p));
      stop_ = &shared[kSizes.stop_at].x;
      if (threadIdx.x == 0) *stop_ = 0;
    }
  }

  // Whether a part of the last state never came, for all lanes of a warp. Behind the barrier at
  // which a step begins.
  __device__ __forceinline__ bool HasStopped() const {
    return kNeeded && __any_sync(kAllLanes, *stop_ != 0);
  }

  // Sends the states before a step that lanes of this warp have left in a slot.
  __device__ __forceinline__ void Send(int step, int slot) {
    constexpr int kWarpGroups = kSizes.unit_groups;
    const int lane = threadIdx.x % kWarp;
    const int first = BlockOfScan<Plan>() * kOwnGroups + threadIdx.x / kWarp * kWarpGroups;
    Words4* to = At(step);
#pragma unroll
    for (int i = lane; i < kSizes.state_parts * kWarpGroups * kSizes.batch; i += kWarp) {
      const int group = i / kSizes.batch, entry = i % kSizes.batch;
      const int place = group / kWarpGroups * kGroups + first + group % kWarpGroups;
      const Words4 words = shared_[slot * kSizes.slot + place * kSizes.group_distance + entry];
      Words4* at = to + place * kSizes.batch + entry;
      StoreRelaxed(&at->x, {words.x, words.y, words.z, words.w});
      // A long scan's exchange buffer does not stay in the L2 cache from when it was cleared.
      if (Plan::kPrefetch && step + kStepsAhead < steps_) {
        PrefetchToL2(at + kStepsAhead * kSizes.exchange_slot);
      }
    }
    backoff_.Start();
  }

  // Brings the other blocks' states to the slot. If they never come it has all of them stop.
  __device__ __forceinline__ void Receive(int step, int slot) {
    constexpr int kOthers = kGroups - kOwnGroups;
    const int own = BlockOfScan<Plan>() * kOwnGroups;
    const auto place_of = [&](int i) {
      const int group = i / kSizes.batch % kOthers;
      return i / kSizes.batch / kOthers * kGroups + (group < own ? group : group + kOwnGroups);
    };
    const Words4* from = At(step);
    backoff_.Wait();
    const bool came =
        jaxsparse::Receive<kSizes.threads, kSizes.state_parts * kOthers * kSizes.batch>(
            static_cast<int>(threadIdx.x), &watchdog_,
            [&](int i) { return from + place_of(i) * kSizes.batch + i % kSizes.batch; },
            [&](int i, Words4 words) {
              shared_[slot * kSizes.slot + place_of(i) * kSizes.group_distance + i % kSizes.batch] =
                  words;
            });
    if (!came) *stop_ = 1;
    backoff_.Adapt(watchdog_.TakeHasWaited());
  }

 private:
  __device__ __forceinline__ Words4* At(int step) const {
    return buffer_ + static_cast<int64_t>(step) * kSizes.exchange_slot;
  }

  Words4* const shared_;
  const int steps_;
  Words4* buffer_ = nullptr;
  volatile uint32_t* stop_ = nullptr;
  Watchdog watchdog_;
  Backoff backoff_;
};

}  // namespace jaxsparse
