// A thread a row; the first bad row of the batch is reported.
#include "check_topology/problem.h"
#include "cuda/device.cuh"

namespace jaxsparse {

template <typename Index>
__global__ void CheckTopologyRows(const __grid_constant__ CheckTopologyProblem p) {
  const Pattern& a = p.pattern;
  const int64_t units = p.batch.count * (a.rows + 1);
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; unit < units;
       unit += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t entry = unit / (a.rows + 1), row = unit % (a.rows + 1);
    const int32_t* row_offsets = a.row_offsets.At<const int32_t>(p.batch, entry);
    p.checked_offsets.At<int32_t>(p.batch, entry)[row] = row_offsets[row];
    const int32_t* permutation =
        a.permutation.data == nullptr ? nullptr : a.permutation.At<const int32_t>(p.batch, entry);
    if (!RowIsValid(row_offsets, a.column_indices.At<const Index>(p.batch, entry),
                    a.row_order.At<const int32_t>(p.batch, entry), permutation, a.rows, a.columns,
                    a.nse, row)) {
      atomicMin(p.bad_row, static_cast<unsigned long long>(unit));
    }
  }
}

}  // namespace jaxsparse
