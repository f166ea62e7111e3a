// Generic kernel of the sampled dense-dense product (sddmm/problem.h): right for every shape, type,
// batch and alignment. Work is cut by stored entries, so rows of any length balance and none is
// empty.
#include "cuda/device.cuh"
#include "sddmm/kernels/generic.h"

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

// Occupancy, which bounds the registers: the loads are long, so more warps bring more than
// registers do.
constexpr int kBlocksPerSm = 8;

// A group of lanes, one for each element of d up to a warp, owns a run of entries, no more than it
// has lanes. Each lane looks up the row and the column of one of them; then all take the dot
// products one after another, kTogether at once, so that their loads overlap.
template <typename T, typename Out, typename Index>
__global__ void __launch_bounds__(kSddmmGenericThreads, kBlocksPerSm)
    SddmmEntries(const __grid_constant__ SddmmProblem p) {
  constexpr int kTogether = kSddmmGenericEntriesAtOnce;
  const int lanes = LanesFor(p.d), run = SddmmEntriesOfGroup(p);
  const int64_t nse = p.pattern.nse, rows = p.pattern.rows;
  const int64_t runs = CeilDivide(nse, run);
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
    const int64_t i = unit % runs * run + lane;
    const int32_t* row_offsets = p.pattern.row_offsets.At<const int32_t>(p.batch, batch_entry);
    const bool valid = unit < units && lane < run && i < nse;
    const bool stored = valid && rows > 0 && i < row_offsets[rows];
    int64_t row = 0, column = -1;
    if (stored) {
      row = RowOf(row_offsets, rows, i);
      column = Within(p.pattern.column_indices.At<const Index>(p.batch, batch_entry)[i],
                      p.pattern.columns);
    }
    const T* x = p.x.At<const T>(p.batch, batch_entry);
    const T* y = p.y.At<const T>(p.batch, batch_entry);
    const int64_t first_row = __shfl_sync(kAllLanes, row, 0, lanes);
    const int64_t first_column = __shfl_sync(kAllLanes, column, 0, lanes);
    // Padding is behind what is stored: a run with any entry has its first.
    const int64_t size = first_column < 0 ? 0 : p.d;
    if (!stored) {
      row = first_row;
      column = first_column;
    }
    Accumulator<T> own = 0;
    for (int j = 0; j < run; j += kTogether) {
      const T* x_row[kTogether];
      const T* y_row[kTogether];
      Accumulator<T> sums[kTogether] = {};
#pragma unroll
      for (int e = 0; e < kTogether; ++e) {  // past a narrow group's end, it wraps around
        x_row[e] = x + __shfl_sync(kAllLanes, row, j + e, lanes) * p.d;
        y_row[e] = y + __shfl_sync(kAllLanes, column, j + e, lanes) * p.d;
      }
#pragma unroll 4
      for (int64_t d = lane; d < size; d += lanes) {
#pragma unroll
        for (int e = 0; e < kTogether; ++e) {
          if (e < lanes) sums[e] += ToAccumulator(x_row[e][d]) * ToAccumulator(y_row[e][d]);
        }
      }
#pragma unroll
      for (int e = 0; e < kTogether; ++e) {
        const Accumulator<T> sum = SumOverLanes(sums[e], lanes);
        if (lane == j + e) own = sum;
      }
    }
    if (!valid) continue;
    if (!stored) own = 0;
    else if (p.scale_by.data != nullptr) {
      own *= ToAccumulator(p.scale_by.At<const T>(p.batch, batch_entry)[i]);
    }
    FromAccumulator(own, &p.out.At<Out>(p.batch, batch_entry)[i]);
  }
}

}  // namespace jaxsparse
