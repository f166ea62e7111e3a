// How a block's product warps hand their parts of the products of tiles to its pointwise warps, or
// where rows emit both of them what they have to the warps that sum. In a recurrent scan two
// buffers do, since a state that came proves that all blocks are done with the one before.
// Neighbouring tiles of a graph may have nothing to do with each other, so nothing is proved: a
// ring of stages says when each is full and when it is empty again. Pointwise warps may be several
// sets, which take stages in turn.
//
// Plan::kBarrier: all threads of a block meet instead, those that have no part in the pass as well,
// and all blocks of a team meet before each tile. Tools that look for races know that best. Where
// some threads of a block had met without the others, racecheck missed later meetings of all.
#pragma once

#include "cuda/pipeline.cuh"
#include "dynamic/problem.h"
#include "persistent/grid_barrier.cuh"

namespace jaxsparse {

// For warps that take every kSteps-th tile.
template <typename Plan, uint32_t kSteps = 1>
class Ring {
  static constexpr auto kSizes = Plan::kSizes;
  using State = PipelineState<kSizes.stages>;
  static constexpr bool kSums = kSizes.sum_warps > 0;
  static constexpr uint32_t kProducers = kSizes.warps + (kSums ? kSizes.set_warps : 0);
  static constexpr uint32_t kConsumers = kSums ? kSizes.sum_warps : kSizes.set_warps;
  static_assert(kSizes.sets == 1 || !Plan::kBarrier);
  static_assert(kSizes.sets <= kSizes.stages && kSizes.pointwise_warps % kSizes.sets == 0);

 public:
  // From the tile with that number on.
  __device__ __forceinline__ explicit Ring(Words4* shared, uint32_t first = 0)
      : shared_(reinterpret_cast<char*>(shared)), at_({first, 0}) {}

  // By one thread, before all of the block meet.
  __device__ __forceinline__ void Init() const {
    for (uint32_t stage = 0; stage < kSizes.stages; ++stage) {
      StageAt({stage, 0}).Init(kProducers, kConsumers);
    }
    FenceShared();
  }

  // Where the parts of the tile lie.
  __device__ __forceinline__ float* partials() const {
    return reinterpret_cast<float*>(shared_) + at_.stage * kSizes.partials;
  }

  // Whole warps of producers.
  __device__ __forceinline__ void WaitUntilEmpty() const {
    if constexpr (!Plan::kBarrier) StageAt(at_).WaitUntilEmpty();
  }
  __device__ __forceinline__ void Fill() {
    __syncwarp();
    if constexpr (Plan::kBarrier) {
      WaitAt<kSizes.all_threads>(kAllThreads);
    } else if (threadIdx.x % kWarp == 0) {
      StageAt(at_).Filled();
    }
    Advance();
  }

  // Whole warps of consumers.
  __device__ __forceinline__ void WaitUntilFull() const {
    if constexpr (Plan::kBarrier) {
      WaitAt<kSizes.all_threads>(kAllThreads);
    } else {
      StageAt(at_).WaitUntilFull();
    }
  }
  __device__ __forceinline__ void Empty() {
    __syncwarp();
    if (!Plan::kBarrier && threadIdx.x % kWarp == 0) StageAt(at_).Emptied();
    Advance();
  }

  // Producers wait until consumers have read the tile that came so many before this one, that with
  // the number. Its stage is not emptied for a later tile meanwhile, since consumers take tiles in
  // order: they need this one first, which the warp has not filled.
  __device__ __forceinline__ void WaitUntilRead(int64_t number, int before) const {
    if (Plan::kBarrier || before > kSizes.stages) return;  // then its stage has been emptied since
    const State at = State::Of(static_cast<uint32_t>(number - before));
    WaitForPhase(StageAt(at).empty, at.phase);
  }

 private:
  __device__ __forceinline__ void Advance() {
    if constexpr (kSteps == 1) at_.Advance();
    else at_.Advance(kSteps);
  }
  __device__ __forceinline__ PipelineStage StageAt(State at) const {
    auto* barriers = reinterpret_cast<uint64_t*>(shared_ + kSizes.barriers_at) + 2 * at.stage;
    return {barriers, barriers + 1, at.phase};
  }

  char* const shared_;
  State at_;
};

// A team meets for the tile with that number among its own: product warps, and others without a
// watchdog.
template <typename Plan>
__device__ __forceinline__ void MeetTeam(const GraphScanProblem& p, int64_t number,
                                         Watchdog* watchdog) {
  if constexpr (Plan::kBarrier) {
    constexpr int kWords = kScanFlagBytes / sizeof(uint32_t);
    WaitAt<Plan::kSizes.all_threads>(kAllThreads);
    if (watchdog != nullptr && threadIdx.x == 0) {
      MeetOtherBlocks<Plan::kBlocks>(p.arrivals + blockIdx.x / Plan::kBlocks * kWords, number,
                                     watchdog);
    }
    WaitAt<Plan::kSizes.all_threads>(kAllThreads);
  }
}

// All of a block meet, where tools look for races.
template <typename Plan>
__device__ __forceinline__ void MeetBlock() {
  if constexpr (Plan::kBarrier) WaitAt<Plan::kSizes.all_threads>(kAllThreads);
}

// The meetings for a tile of warps that have no part in it: before it, and when its stage is full.
template <typename Plan>
__device__ __forceinline__ void MeetBeside(const GraphScanProblem& p, int64_t number) {
  MeetTeam<Plan>(p, number, nullptr);
  MeetBlock<Plan>();
}

// Some warps of a block meet, kThreads threads, at a named barrier of theirs. All of the block meet
// where tools look for races.
template <typename Plan, int kThreads>
__device__ __forceinline__ void MeetSome(int barrier) {
  if constexpr (Plan::kBarrier) MeetBlock<Plan>();
  else WaitAt<kThreads>(barrier);
}

// Warps of one kind meet by themselves, kThreads threads: what some have written before others may
// read behind it.
template <typename Plan, int kThreads>
__device__ __forceinline__ void MeetOwnKind() {
  constexpr int kOwnKind = 1;  // a named barrier: of the kinds of warps only one meets
  if constexpr (!Plan::kBarrier) WaitAt<kThreads>(kOwnKind);
}

}  // namespace jaxsparse
