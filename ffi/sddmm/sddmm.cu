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

// A group of lanes, one for each element of d up to a warp, owns a run of entries. The row is
// looked up where one ends, and kTogether entries are read at once, so that their loads overlap.
template <typename T, typename Out, typename Index>
__global__ void SddmmEntries(const __grid_constant__ SddmmProblem p) {
  constexpr int kTogether = 4;
  static_assert(kSddmmEntriesPerGroup % kTogether == 0);
  const int lanes = LanesFor(p.d);
  const int64_t nse = p.pattern.nse, rows = p.pattern.rows;
  const int64_t runs = CeilDivide(nse, kSddmmEntriesPerGroup);
  const int64_t units = p.batch.count * runs;
  const int groups = kWarp / lanes;  // in a warp
  const int64_t stride = static_cast<int64_t>(gridDim.x) * (blockDim.x / lanes);
  const int lane = threadIdx.x % lanes;
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  // The bound is the warp's, not the group's: all lanes take part in the sums.
  for (int64_t first = warp * groups; first < units; first += stride) {
    const int64_t unit = first + threadIdx.x % kWarp / lanes;
    const int64_t batch_entry = unit < units ? unit / runs : 0;
    const int64_t begin = unit % runs * kSddmmEntriesPerGroup;
    const int64_t whole = begin + kSddmmEntriesPerGroup;
    const int64_t end = unit >= units ? begin : whole < nse ? whole : nse;
    const int32_t* row_offsets = p.pattern.row_offsets.At<const int32_t>(p.batch, batch_entry);
    const Index* columns = p.pattern.column_indices.At<const Index>(p.batch, batch_entry);
    const T* x = p.x.At<const T>(p.batch, batch_entry);
    const T* y = p.y.At<const T>(p.batch, batch_entry);
    const int64_t stored_end = rows > 0 ? row_offsets[rows] : 0;
    int64_t row = 0, row_end = begin;
    for (int offset = 0; offset < kSddmmEntriesPerGroup; offset += kTogether) {
      const T* x_row[kTogether] = {};
      const T* y_row[kTogether] = {};
      Accumulator<T> sums[kTogether] = {};
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int64_t i = begin + offset + j;
        if (i >= end || i >= stored_end) continue;
        if (i >= row_end) {
          row = RowOf(row_offsets, rows, i);
          row_end = row_offsets[row + 1];
        }
        x_row[j] = x + row * p.d;
        y_row[j] = y + columns[i] * p.d;
      }
      for (int64_t d = lane; d < p.d; d += lanes) {
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          if (y_row[j] != nullptr)
            sums[j] += ToAccumulator(x_row[j][d]) * ToAccumulator(y_row[j][d]);
        }
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int64_t i = begin + offset + j;
        Accumulator<T> sum = SumOverLanes(sums[j], lanes);
        if (i >= end || lane != 0) continue;
        if (p.scale_by.data != nullptr && y_row[j] != nullptr) {
          sum *= ToAccumulator(p.scale_by.At<const T>(p.batch, batch_entry)[i]);
        }
        FromAccumulator(sum, &p.out.At<Out>(p.batch, batch_entry)[i]);
      }
    }
  }
}

}  // namespace jaxsparse
