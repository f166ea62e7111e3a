// Reductions of rows by lanes that own a row: a part of a warp, a warp or, where rows are few and
// long, a block. They read it once, by wide loads, several of which are on their way at once.
//
// Floor: the values once. Of 6.6 M numbers of float32, as weights of 8192 rows of 800 have, 6.4 us
// at 4.1 TB/s, and the start of a kernel.
#include "cuda/vector_access.cuh"
#include "reduce_rows/kernels/reduced.cuh"
#include "reduce_rows/kernels/rows.h"

namespace jaxsparse {

// A lane's part of a row: vectors as many apart as lanes own it. The first one begins in front of
// the row, where a load is aligned, and the last one may reach into the next row: what does not
// belong to the row counts nothing.
template <typename T, ReduceRowsConfig kConfig>
__device__ __forceinline__ Reduced<Accumulator<T>, kConfig.reduction> ReducePart(
    const T* values, uint32_t begin, uint32_t end, uint32_t nse, int lane) {
  using Acc = Accumulator<T>;
  constexpr int kCount = 16 / static_cast<int>(sizeof(T)), kLoads = kConfig.Loads(sizeof(T));
  constexpr int kStep = kConfig.lanes * kCount;
  using Wide = Vector<T, kCount>;
  const bool aligned = IsAligned<Wide>(values);
  auto part = Reduced<Acc, kConfig.reduction>::Nothing();
#pragma unroll 1
  for (uint32_t place = begin / kCount * kCount + lane * kCount; place < end;
       place += kLoads * kStep) {
    Wide vectors[kLoads];
#pragma unroll
    for (int r = 0; r < kLoads; ++r) {
      const uint32_t at = place + r * kStep;
      if (at < end)
        vectors[r] = LoadVector<kCount>(values + at, aligned, static_cast<int>(nse - at));
    }
    Acc x[kLoads * kCount];
#pragma unroll
    for (int i = 0; i < kLoads * kCount; ++i) {
      const uint32_t at = place + i / kCount * kStep + i % kCount;
      const bool is_stored = at >= begin && at < end;
      x[i] = is_stored ? ToAccumulator(vectors[i / kCount].elements[i % kCount]) : -kInfinity<Acc>;
    }
    part.Add(x);
  }
  return part;
}

template <typename T, ReduceRowsConfig kConfig>
__global__ void __launch_bounds__(kConfig.Threads(), kConfig.Blocks(sizeof(T)))
    ReduceRows(const __grid_constant__ ReduceRowsProblem p) {
  constexpr int kLanes = kConfig.lanes, kOwners = kConfig.Owners();
  constexpr int kWarps = kLanes > kWarp ? kLanes / kWarp : 1;  // that own a row together
  using Part = Reduced<Accumulator<T>, kConfig.reduction>;
  static __shared__ Part parts[kWarps];
  const int64_t rows = p.pattern.rows, all = p.batch.count * rows;
  const int lane = threadIdx.x % kLanes;
  // All threads of a block take as many turns.
  for (int64_t first = int64_t{blockIdx.x} * kOwners; first < all;
       first += int64_t{gridDim.x} * kOwners) {
    const int64_t unit = first + threadIdx.x / kLanes;
    const bool exists = unit < all;
    const int64_t entry = exists && p.batch.rank > 0 ? unit / rows : 0;
    const int64_t place = exists ? unit - entry * rows : 0;
    // Rows are in the order of their lengths, so that those of a warp are about as long.
    const int64_t row = Within(p.pattern.row_order.At<const int32_t>(p.batch, entry)[place], rows);
    const RowBounds bounds(p.pattern.row_offsets.At<const int32_t>(p.batch, entry), row,
                           p.pattern.nse);
    const auto begin = static_cast<uint32_t>(bounds.begin);
    const auto end = exists ? static_cast<uint32_t>(bounds.end) : begin;
    Part part = ReducePart<T, kConfig>(p.values.At<const T>(p.batch, entry), begin, end,
                                       static_cast<uint32_t>(p.pattern.nse), lane);
    part.AddOverLanes(kLanes < kWarp ? kLanes : kWarp);
    if constexpr (kWarps > 1) {
      __syncthreads();  // the last row's parts have been read
      if (lane % kWarp == 0) parts[lane / kWarp] = part;
      __syncthreads();
      part = lane < kWarps ? parts[lane] : Part::Nothing();
      part.AddOverLanes(kWarp);
    }
    if (lane == 0 && exists) FromAccumulator(part.Result(), &p.out.At<T>(p.batch, entry)[row]);
  }
}

}  // namespace jaxsparse
