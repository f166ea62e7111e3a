// Generic kernels of the softmax over stored entries and its derivative (sparse_softmax/problem.h):
// a warp a row, and one more warp for the padding of each batch entry.
#include "sparse_softmax/kernels/generic.h"
#include "sparse_softmax/kernels/rows.cuh"

namespace jaxsparse {

template <typename T, SparseSoftmaxGenericConfig kConfig>
__global__ void SparseSoftmaxRows(const __grid_constant__ SparseSoftmaxProblem p) {
  using Acc = Accumulator<T>;
  const int64_t rows = p.pattern.rows, nse = p.pattern.nse;
  const int64_t units = p.batch.count * (rows + 1);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
  const Acc scale = static_cast<Acc>(p.scale);
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
       unit < units; unit += warps) {
    const int64_t entry = unit / (rows + 1), place = unit % (rows + 1);
    const int32_t* row_offsets = p.pattern.row_offsets.At<const int32_t>(p.batch, entry);
    T* out = p.out.At<T>(p.batch, entry);
    if (place == rows) {
      ClearPadding(out, row_offsets, rows, nse);
      continue;
    }
    const int64_t row = Within(p.pattern.row_order.At<const int32_t>(p.batch, entry)[place], rows);
    const RowBounds bounds(row_offsets, row, nse);
    const T* values = p.values.At<const T>(p.batch, entry);
    if constexpr (kConfig.backward) {
      BackwardRow(values, p.tangent.At<const T>(p.batch, entry), out, bounds, scale);
    } else {
      ForwardRow(values, out, bounds, scale);
    }
  }
}

}  // namespace jaxsparse
