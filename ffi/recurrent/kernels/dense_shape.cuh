// What kernels of dense recurrent scans share: where the state and the products lie, how a warp
// waits for the state, and where a block's weights come from.
//
// Plan, of a dense scan:
//   State, Weight          element types
//   kSizes                 kernels/dense.h
//   kScans, kBlocks, ...   recurrent/scan_of_block.cuh
//   kBarrier               blocks meet at a barrier after each step, instead of polling for data
//   kPrefetch              the scan is so long that its exchange buffer leaves the L2 cache
//   kMostDelay             clock cycles by which warps are held up, in tests
#pragma once

#include "recurrent/kernels/dense.h"
#include "recurrent/scan_of_block.cuh"

namespace jaxsparse {

// Where a slot of the exchange buffer has an element of the state.
template <typename Plan>
__device__ __forceinline__ int SlotOffset(int b, int column) {
  constexpr DenseSizes kSizes = Plan::kSizes;
  return (column / kSizes.states_per_load * kSizes.exchange_batch + b) * kSizes.states_per_load +
         column % kSizes.states_per_load;
}

// Where a warp's part of the products has a row's. Neighbouring rows are units, because these lie
// together in the weights of a forward pass.
template <typename Plan>
__device__ __forceinline__ int SlotOfRow(int row, int b) {
  constexpr DenseSizes kSizes = Plan::kSizes;
  const int gate = row / kSizes.units;
  return row % kSizes.units * kSizes.gate_slots + (kSizes.rotated ? (gate + b / 2) % 4 : gate);
}

// The weights of one row of a block, zero where the matrix has none.
template <typename Plan>
struct DenseRow {
  static constexpr DenseSizes kSizes = Plan::kSizes;
  using Weight = typename Plan::Weight;

  const Weight* values;  // null: no such row
  int64_t column_stride;

  // `row`: gate * units + unit of the block.
  __device__ __forceinline__ DenseRow(const RecurrentScanProblem& p, int row)
      : column_stride(p.weight_column_stride) {
    const int unit = BlockOfScan<Plan>() * kSizes.units + row % kSizes.units;
    const bool exists = row < kSizes.rows && unit < kSizes.hidden;
    values = exists
                 ? static_cast<const Weight*>(p.weights) + DirectionOf<Plan>(p) * p.weights_size +
                       (row / kSizes.units * kSizes.hidden + unit) * p.weight_row_stride
                 : nullptr;
  }

  // kCount neighbours; `column`, of the exchange buffer, is a multiple of 4. Conditions and
  // divisions that the sizes rule out would take the compiler seconds, there are so many of these
  // loads.
  template <int kCount>
  __device__ __forceinline__ void Load(int column, Weight (&to)[kCount]) const {
    constexpr bool kPadded = kSizes.part != kSizes.hidden;
    const int part = kPadded ? column / kSizes.part : 0;
    const int k = column - part * kSizes.part;
    const bool exists = values != nullptr && column < kSizes.columns;
    const Weight* from = values + (part * kSizes.hidden + k) * column_stride;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = Weight{};
      if (exists && (!kPadded || k + i < kSizes.hidden)) to[i] = from[i * column_stride];
    }
  }
};

}  // namespace jaxsparse
