// How blocks of a cluster that share a scan (resident.cu) come to have all of its state: each sends
// what its warps have made to the shared memory of the others, where a barrier counts the bytes.
// That takes less time than by way of the L2 cache, and no exchange buffer.
//
// Two slots and two barriers are enough: a block sends the states before step s + 1 when it has
// made step s, for which it has received what all warps of all blocks sent after they had
// multiplied by the states before step s - 1, which lie in the same slot.
#pragma once

#include "persistent/watchdog.cuh"
#include "recurrent/kernels/resident.h"
#include "recurrent/kernels/resident_exchange.cuh"
#include "recurrent/scan_of_block.cuh"

namespace jaxsparse {

template <typename Plan>
class ResidentExchange<Plan, true> {
  static constexpr ResidentSizes kSizes = Plan::kSizes;
  static constexpr int kGroups = kSizes.part / 8, kOwnGroups = kSizes.block_units / 8;
  static constexpr uint32_t kReceivedBytes =
      kSizes.state_parts * (kGroups - kOwnGroups) * kSizes.batch * 16;

 public:
  // `shared`: the block's, of which all threads call this before a barrier.
  __device__ __forceinline__ ResidentExchange(const RecurrentScanProblem& p, Words4* shared)
      : shared_(shared),
        steps_(static_cast<int>(p.steps)),
        came_(reinterpret_cast<uint64_t*>(shared + kSizes.came_at)),
        stop_(&shared[kSizes.stop_at].x),
        watchdog_(p.wait_limits) {
    if (threadIdx.x != 0) return;
    *stop_ = 0;
    for (int slot = 0; slot < 2; ++slot) InitBarrier(&came_[slot], 1);
    FenceInitsOfBarriers();
  }

  // When the block's slots are ready, before anything is sent.
  __device__ __forceinline__ void Begin() {
    Expect(1);
    Expect(2);
    ClusterBarrier();
  }

  // Whether a part of the last state never came, for all lanes of a warp. Behind the barrier at
  // which a step begins.
  __device__ __forceinline__ bool HasStopped() const { return __any_sync(kAllLanes, *stop_ != 0); }

  // Sends the states before a step that lanes of this warp have left in a slot.
  __device__ __forceinline__ void Send(int, int slot) const {
    constexpr int kWarpGroups = kSizes.unit_groups;
    const int lane = threadIdx.x % kWarp, own = BlockOfScan<Plan>();
    const int first = own * kOwnGroups + threadIdx.x / kWarp * kWarpGroups;
    const uint32_t came = AddressOfShared(&came_[slot]);
#pragma unroll
    for (int i = lane; i < kSizes.state_parts * kWarpGroups * kSizes.batch; i += kWarp) {
      const int group = i / kSizes.batch, entry = i % kSizes.batch;
      const int place = group / kWarpGroups * kGroups + first + group % kWarpGroups;
      const Words4* at = shared_ + slot * kSizes.slot + place * kSizes.group_distance + entry;
      const Words4 words = *at;
      const uint32_t address = AddressOfShared(at);
#pragma unroll
      for (int away = 1; away < kSizes.blocks; ++away) {
        const uint32_t rank = static_cast<uint32_t>((own + away) % kSizes.blocks);
        StoreAsync(AddressOfRank(address, rank), {words.x, words.y, words.z, words.w},
                   AddressOfRank(came, rank));
      }
    }
  }

  // Waits until the other blocks' states are in the slot. If they never come it has all of them
  // stop.
  __device__ __forceinline__ void Receive(int step, int slot) {
    watchdog_.Begin();
    while (!TryWaitOfCluster(&came_[slot], static_cast<uint32_t>((step - 1) / 2 % 2))) {
      if (!watchdog_.TimesOut()) continue;
      *stop_ = 1;
      return;  // and expects nothing more: the barrier's phase is not over
    }
    Expect(step + 2);
  }

  // When the block sends nothing more: its memory has to be there until nothing comes.
  __device__ __forceinline__ void Finish() const { ClusterBarrier(); }

 private:
  // The barrier takes part in the count of a step's bytes.
  __device__ __forceinline__ void Expect(int step) const {
    if (threadIdx.x == 0 && step < steps_) ArriveAndExpect(&came_[step % 2], kReceivedBytes);
  }

  Words4* const shared_;
  const int steps_;
  uint64_t* const came_;  // of each slot
  volatile uint32_t* const stop_;
  Watchdog watchdog_;
};

}  // namespace jaxsparse
