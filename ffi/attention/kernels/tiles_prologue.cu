// The prologue of attention by tiles (attention/kernels/tiles.cu), which begins meanwhile.
#include "attention/problem.h"
#include "cuda/instructions.cuh"

namespace jaxsparse {

// No block has taken an item from the counter yet.
__global__ void AttentionTilesPrologue(const __grid_constant__ AttentionProblem p) {
  LetNextKernelBegin();
  *reinterpret_cast<uint32_t*>(p.workspace.data) = 0;
}

}  // namespace jaxsparse
