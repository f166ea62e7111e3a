// Stored values of a CSR matrix to a dense one, for kernels that keep a sparse matrix on chip as a
// dense one (densify_problem.h). A block makes one row after another, in parts that shared memory
// holds.
#include "cuda/device.cuh"
#include "persistent/densify_problem.h"

namespace jaxsparse {

template <typename T, typename Index>
__global__ void __launch_bounds__(kDensifyThreads)
    Densify(const __grid_constant__ DensifyProblem p) {
  constexpr int kPart = 4096;
  static __shared__ float part[kPart];
  const auto* values = static_cast<const T*>(p.values);
  const auto* columns = static_cast<const Index*>(p.column_indices);
  for (int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const RowBounds entries(p.row_offsets, row, p.nse);
    for (int64_t first = 0; first < p.columns; first += kPart) {
      const int64_t size = p.columns - first < kPart ? p.columns - first : kPart;
      for (int64_t i = threadIdx.x; i < size; i += blockDim.x) part[i] = 0.0f;
      __syncthreads();
      // Entries of one place add up, as in a product. A pattern has them only where it was traced
      // and is not in order.
      for (int64_t e = entries.begin + threadIdx.x; e < entries.end; e += blockDim.x) {
        const int64_t i = static_cast<int64_t>(columns[e]) - first;
        if (i >= 0 && i < size) atomicAdd(&part[i], ToAccumulator(values[e]));
      }
      __syncthreads();
      T* to = static_cast<T*>(p.dense) + row * p.columns + first;
      for (int64_t i = threadIdx.x; i < size; i += blockDim.x) FromAccumulator(part[i], to + i);
      __syncthreads();
    }
  }
}

}  // namespace jaxsparse
