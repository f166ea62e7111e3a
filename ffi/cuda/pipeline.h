// The size of what a pipeline (cuda/pipeline.cuh) has in shared memory beside what passes through
// it, for host and device.
#pragma once

namespace jaxsparse {

constexpr int kPipelineBarrierBytes = 16;  // of a stage: two barriers

}  // namespace jaxsparse
