// A pipeline of stages in shared memory, which producers fill and consumers empty, in turn. Each
// stage has two barriers: one tells when it is full, the other when it is empty again.
//
// A warp has a PipelineState for each pipeline that it takes part in. A kernel says where barriers
// lie, by a function from a PipelineState to a PipelineStage: which place takes the fewest
// registers depends on what else lies beside them.
#pragma once

#include "cuda/device.cuh"
#include "cuda/pipeline.h"

namespace jaxsparse {

// Where a warp is in a pipeline: at a stage, in an even round (phase 0) or in an odd one (phase 1).
// Producers and consumers count alike.
template <int kStages>
struct PipelineState {
  uint32_t stage = 0, phase = 0;

  // The state for what comes with this number, where all that passes is numbered.
  __device__ __forceinline__ static PipelineState Of(uint32_t number) {
    return {number % kStages, number / kStages % 2};
  }

  __device__ __forceinline__ void Advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  // By no more than there are.
  __device__ __forceinline__ void Advance(int stages) {
    stage += stages;
    if (stage >= kStages) {
      stage -= kStages;
      phase ^= 1;
    }
  }
};

// A stage as a warp meets it: its barriers, and the phase of the warp's state.
struct PipelineStage {
  uint64_t* full;
  uint64_t* empty;
  uint32_t phase;

  // Called by one thread, before FenceShared and a barrier of the block. So many threads of the
  // producers arrive in each round, and so many of the consumers.
  __device__ __forceinline__ void Init(uint32_t producers, uint32_t consumers) const {
    InitBarrier(full, producers);
    InitBarrier(empty, consumers);
  }

  // Producers wait until consumers have read what came in the round before. Then each thread writes
  // its part and arrives, or arrives first and has so many bytes copied, which `full` counts.
  __device__ __forceinline__ void WaitUntilEmpty() const { WaitForPhase(empty, phase ^ 1); }
  __device__ __forceinline__ void Filled() const { Arrive(full); }
  __device__ __forceinline__ void Expect(uint32_t bytes) const { ArriveAndExpect(full, bytes); }

  // Consumers wait until all of that is there, read it and arrive.
  __device__ __forceinline__ void WaitUntilFull() const { WaitForPhase(full, phase); }
  __device__ __forceinline__ void Emptied() const { Arrive(empty); }
};

}  // namespace jaxsparse
