// Generic kernel of the sampled dense-dense product (problem.h): right for every shape, type, batch
// and alignment. Work is cut by stored entries, so rows of any length balance and none is empty.
#include "common/device.cuh"
#include "sddmm/problem.h"

namespace jaxsparse {

// The row of a stored entry: the last one that begins at or before it.
__device__ __forceinline__ int64_t RowOf(const int32_t* row_offsets, int64_t rows, int64_t entry) {
  int64_t low = 0, high = rows;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (row_offsets[middle] <= entry) low = middle;
    else high = middle;
  }
  return low;
}

// A group of lanes, one for each element of d up to a warp, owns an entry.
template <typename T, typename Out, typename Index>
__global__ void SddmmEntries(const __grid_constant__ SddmmProblem p) {
  const int lanes = LanesFor(p.d);
  const int64_t nse = p.pattern.nse, rows = p.pattern.rows;
  const int64_t units = p.batch.count * nse;
  const int groups = kWarp / lanes;  // in a warp
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (blockDim.x / lanes);
  const int lane = threadIdx.x % lanes;
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  // The bound is the warp's, not the group's: all lanes take part in the sum.
  for (int64_t first = warp * groups; first < units; first += stride) {
    const int64_t unit = first + threadIdx.x % kWarp / lanes;
    Accumulator<T> sum = 0;
    int64_t batch_entry = 0, i = 0;
    bool stored = false;
    if (unit < units) {
      batch_entry = unit / nse;
      i = unit % nse;
      const int32_t* row_offsets = p.pattern.row_offsets.At<const int32_t>(p.batch, batch_entry);
      stored = i < row_offsets[rows] && rows > 0;
      if (stored) {
        const int64_t row = RowOf(row_offsets, rows, i);
        const int64_t column = p.pattern.column_indices.At<const Index>(p.batch, batch_entry)[i];
        const T* x = p.x.At<const T>(p.batch, batch_entry) + row * p.d;
        const T* y = p.y.At<const T>(p.batch, batch_entry) + column * p.d;
        for (int64_t d = lane; d < p.d; d += lanes)
          sum += ToAccumulator(x[d]) * ToAccumulator(y[d]);
      }
    }
    sum = SumOverLanes(sum, lanes);
    if (unit < units && lane == 0) {
      if (p.scale_by.data != nullptr && stored) {
        sum *= ToAccumulator(p.scale_by.At<const T>(p.batch, batch_entry)[i]);
      }
      FromAccumulator(sum, &p.out.At<Out>(p.batch, batch_entry)[i]);
    }
  }
}

}  // namespace jaxsparse
