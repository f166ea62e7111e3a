// Stored values of a CSR matrix to a dense one, for scans that keep a sparse matrix on chip as a
// dense one (problem.h): a block for each row, which it clears and then fills.
#include "common/device.cuh"
#include "recurrent/problem.h"

namespace jaxsparse {

template <typename T, typename Index>
__global__ void __launch_bounds__(kDensifyThreads)
    Densify(const __grid_constant__ DensifyProblem p) {
  const auto* values = static_cast<const T*>(p.values);
  const auto* columns = static_cast<const Index*>(p.column_indices);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    auto* to = static_cast<T*>(p.dense) + row * p.columns;
    for (int64_t i = threadIdx.x; i < p.columns; i += blockDim.x) to[i] = T{};
    __syncthreads();
    const int32_t end = p.row_offsets[row + 1];
    for (int32_t e = p.row_offsets[row] + static_cast<int32_t>(threadIdx.x); e < end;
         e += static_cast<int32_t>(blockDim.x)) {
      to[columns[e]] = values[e];
    }
    __syncthreads();
  }
}

}  // namespace jaxsparse
