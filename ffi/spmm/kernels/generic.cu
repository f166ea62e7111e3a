// Generic kernels of the sparse-dense product (problem.h): right for every shape, type, batch and
// alignment. Bytes: every stored entry reads a row of x from cache, so they are bound by L1 and L2.
#include "spmm/kernels/generic.h"
#include "spmm/matrices.cuh"

namespace jaxsparse {

// A group of lanes, one for each column up to a warp, owns a row and kSpmmColumnsPerLane times as
// many columns; neighbouring lanes read neighbouring columns of x.
template <typename T, typename Out, typename Index>
__global__ void SpmmRows(const __grid_constant__ SpmmProblem p) {
  const int lanes = LanesFor(p.n);
  const int64_t tile = static_cast<int64_t>(lanes) * kSpmmColumnsPerLane;
  const int64_t tiles = CeilDivide(p.n, tile);
  const int64_t rows = p.pattern.rows;
  const int64_t units = p.batch.count * tiles * rows;
  const int64_t groups = static_cast<int64_t>(gridDim.x) * (blockDim.x / lanes);
  const int lane = threadIdx.x % lanes;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * (blockDim.x / lanes) + threadIdx.x / lanes;
       unit < units; unit += groups) {
    const Matrices<T, Out, Index> m(p, unit / (tiles * rows));
    const int64_t row = m.RowAt(unit % rows);
    const int64_t first = unit / rows % tiles * tile + lane;
    const RowBounds bounds(m.row_offsets, row, p.pattern.nse);
    const T* first_x = m.x + first;
    KeepInRegister(first_x);           // or it is computed again for every entry
    const int64_t left = p.n - first;  // columns, or fewer than 0
    Accumulator<T> sums[kSpmmColumnsPerLane] = {};
#pragma unroll 8  // so that their loads overlap
    for (int64_t i = bounds.begin; i < bounds.end; ++i) {
      const Accumulator<T> value = m.Value(i);
      const T* x = first_x + m.Column(i) * p.n;
#pragma unroll
      for (int c = 0; c < kSpmmColumnsPerLane; ++c) {
        if (c * lanes < left) sums[c] += value * ToAccumulator(x[c * lanes]);
      }
    }
#pragma unroll
    for (int c = 0; c < kSpmmColumnsPerLane; ++c) {
      const int64_t column = first + c * lanes;
      if (column < p.n) m.Write(p.activation, row, row * p.n + column, sums[c]);
    }
  }
}

// Dense matrix on the left: a warp owns one output, its lanes share the row's entries.
template <typename T, typename Out, typename Index>
__global__ void SpmmDots(const __grid_constant__ SpmmProblem p) {
  const int64_t rows = p.pattern.rows;
  const int64_t units = p.batch.count * p.n * rows;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
  const int lane = threadIdx.x % kWarp;
  for (int64_t unit = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
       unit < units; unit += warps) {
    const Matrices<T, Out, Index> m(p, unit / (p.n * rows));
    const int64_t row = m.RowAt(unit % rows);
    const int64_t n = unit / rows % p.n;
    const RowBounds bounds(m.row_offsets, row, p.pattern.nse);
    const T* x = m.x + n * p.pattern.columns;
    Accumulator<T> sum = 0;
    for (int64_t i = bounds.begin + lane; i < bounds.end; i += kWarp) {
      sum += m.Value(i) * ToAccumulator(x[m.Column(i)]);
    }
    sum = SumOverLanes(sum, kWarp);
    if (lane == 0) m.Write(p.activation, row, n * rows + row, sum);
  }
}

}  // namespace jaxsparse
