// Generic kernels of the sparse-dense product (problem.h): right for every shape, type, batch and
// alignment. Bytes: every stored entry reads a row of x from cache, so they are bound by L1 and L2.
#include "common/device.cuh"
#include "spmm/problem.h"

namespace jaxsparse {

template <typename Acc>
__device__ __forceinline__ Acc Activate(Activation activation, Acc x) {
  if (activation == Activation::kRelu) return x < Acc(0) ? Acc(0) : x;  // keeps NaN
  if (activation == Activation::kGelu) {
    // x * (1 + tanh(u)) / 2 as x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3)
    return x / (Acc(1) + exp(-x * (Acc(1.5957691216057308) + Acc(0.071354816272600245) * x * x)));
  }
  return x;
}

// The arrays of one batch entry.
template <typename T, typename Out, typename Index>
struct Matrices {
  const T* values;
  const int32_t* row_offsets;
  const Index* column_indices;
  const int32_t* row_order;
  const int32_t* permutation;
  const T* x;
  const T* bias;
  Out* out;
  Out* preactivation;

  __device__ Matrices(const SpmmProblem& p, int64_t entry)
      : values(p.values.At<const T>(p.batch, entry)),
        row_offsets(p.pattern.row_offsets.At<const int32_t>(p.batch, entry)),
        column_indices(p.pattern.column_indices.At<const Index>(p.batch, entry)),
        row_order(p.pattern.row_order.At<const int32_t>(p.batch, entry)),
        permutation(p.pattern.permutation.data == nullptr
                        ? nullptr
                        : p.pattern.permutation.At<const int32_t>(p.batch, entry)),
        x(p.x.At<const T>(p.batch, entry)),
        bias(p.bias.data == nullptr ? nullptr : p.bias.At<const T>(p.batch, entry)),
        out(p.out.At<Out>(p.batch, entry)),
        preactivation(p.preactivation.data == nullptr ? nullptr
                                                      : p.preactivation.At<Out>(p.batch, entry)) {}

  __device__ Accumulator<T> Value(int64_t i) const {
    return ToAccumulator(values[permutation == nullptr ? i : permutation[i]]);
  }

  __device__ void Write(Activation activation, int64_t row, int64_t at, Accumulator<T> z) const {
    if (bias != nullptr) z += ToAccumulator(bias[row]);
    if (preactivation != nullptr) FromAccumulator(z, &preactivation[at]);
    FromAccumulator(Activate(activation, z), &out[at]);
  }
};

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
    const int64_t row = m.row_order[unit % rows];
    const int64_t first = unit / rows % tiles * tile + lane;
    const RowBounds bounds(m.row_offsets, row, p.pattern.nse);
    Accumulator<T> sums[kSpmmColumnsPerLane] = {};
#pragma unroll 8  // so that their loads overlap
    for (int64_t i = bounds.begin; i < bounds.end; ++i) {
      const Accumulator<T> value = m.Value(i);
      const T* x = m.x + m.column_indices[i] * p.n;
#pragma unroll
      for (int c = 0; c < kSpmmColumnsPerLane; ++c) {
        const int64_t column = first + c * lanes;
        if (column < p.n) sums[c] += value * ToAccumulator(x[column]);
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
    const int64_t row = m.row_order[unit % rows];
    const int64_t n = unit / rows % p.n;
    const RowBounds bounds(m.row_offsets, row, p.pattern.nse);
    const T* x = m.x + n * p.pattern.columns;
    Accumulator<T> sum = 0;
    for (int64_t i = bounds.begin + lane; i < bounds.end; i += kWarp) {
      sum += m.Value(i) * ToAccumulator(x[m.column_indices[i]]);
    }
    sum = SumOverLanes(sum, kWarp);
    if (lane == 0) m.Write(p.activation, row, n * rows + row, sum);
  }
}

}  // namespace jaxsparse
