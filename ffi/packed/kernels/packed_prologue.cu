// The prologue of products by packed matrices, which begin meanwhile.
#include "cuda/instructions.cuh"
#include "packed/kernels/packed_parts.h"

namespace jaxsparse {

// No block has left its sums yet.
__global__ void PackedPrologue(const __grid_constant__ PackedProblem p) {
  LetNextKernelBegin();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < PackedCountsBytes(p) / 16) reinterpret_cast<Words4*>(p.workspace.data)[at] = {};
}

}  // namespace jaxsparse
