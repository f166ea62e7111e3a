// The prologue of the product by a packed matrix (packed/kernels/packed_mma.cu), which begins
// meanwhile.
#include "cuda/instructions.cuh"
#include "packed/kernels/packed_mma.h"

namespace jaxsparse {

// No block has left its sums yet.
__global__ void PackedMmaPrologue(const __grid_constant__ PackedProblem p) {
  LetNextKernelBegin();
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at < PackedCountsBytes(p) / 16) reinterpret_cast<Words4*>(p.workspace.data)[at] = {};
}

}  // namespace jaxsparse
