// What a block of a launch that makes a loss and its gradient has in shared memory, and what its
// warps do: both passes of team.h, and the heads between them.
#pragma once

#include "dynamic/kernels/team.h"

namespace jaxsparse {

struct LossSizes {
  // Passes of as many product warps, and of as many warps in all.
  JAXSPARSE_INLINE constexpr LossSizes(const TeamSizes& gather, const TeamSizes& emit, int classes)
      : gather(gather), emit(emit), classes(classes) {}

  TeamSizes gather, emit;
  int classes;

  // Warps that have no part in the first pass make heads.
  int head_warps = gather.all_warps - gather.warps - gather.pointwise_warps;
  int head_threads = head_warps * kWarp;
  int threads = gather.all_threads;

  // A warp makes heads of two rows together, if a lane has registers for its columns of both. Lanes
  // share a row's classes.
  int row_loads = Ceil(gather.hidden, kWarp* gather.states_per_load);
  int rows = row_loads * gather.states_per_load <= 8 ? 2 : 1;
  int class_lanes = 8;
  int lane_classes = Ceil(classes, class_lanes);

  // Each pass has shared memory of its own, so that product warps take the second one's weights
  // while heads are still made; only its window may lie where the first one's ring was. Behind it:
  // the head's weights (class, unit) and biases, and of each of its warps what it has received of a
  // tile's logits.
  int emit_at = EmitAt(gather);
  int head_at = emit_at + RoundUp(emit.shared_bytes);
  int bias_at = head_at + RoundUp(classes * gather.hidden * gather.state_bytes);
  int received_at = bias_at + RoundUp(classes * 4);
  int warp_received = RoundUp(classes * 8 * 4);
  int shared_bytes = received_at + head_warps * warp_received;

  JAXSPARSE_INLINE static constexpr int EmitAt(const TeamSizes& gather) {
    return RoundUp(gather.shared_bytes);
  }

 private:
  JAXSPARSE_INLINE static constexpr int Ceil(int a, int b) { return (a + b - 1) / b; }
  JAXSPARSE_INLINE static constexpr int RoundUp(int bytes) { return Ceil(bytes, 16) * 16; }
};

}  // namespace jaxsparse
