// What kernels of dense recurrent scans share: where the state and the products lie, how a warp
// waits for the state, and where a block's weights come from.
//
// Plan, of a dense scan:
//   State, Weight          element types
//   kSizes                 kernels/dense.h, kernels/wave.h
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
  constexpr auto kSizes = Plan::kSizes;
  return (column / kSizes.states_per_load * kSizes.exchange_batch + b) * kSizes.states_per_load +
         column % kSizes.states_per_load;
}

// Where a warp's part of the products has a row's. Neighbouring rows are units, because these lie
// together in the weights of a forward pass.
template <typename Plan>
__device__ __forceinline__ int SlotOfRow(int row, int b) {
  constexpr auto kSizes = Plan::kSizes;
  const int gate = row / kSizes.units;
  return row % kSizes.units * kSizes.gate_slots + (kSizes.rotated ? (gate + b / 2) % 4 : gate);
}

// What a scan multiplies by: a matrix with all products of a unit, and all parts of its state.
template <typename Plan>
struct OwnMatrix {
  static constexpr int kColumns = Plan::kSizes.columns, kLoads = Plan::kSizes.loads,
                       kRegisterChunks = Plan::kSizes.register_chunks,
                       kRowTiles = Plan::kSizes.row_tiles, kAhead = Plan::kSizes.ahead;

  __device__ __forceinline__ static DenseWeights Of(const RecurrentScanProblem& p) {
    return {static_cast<const typename Plan::Weight*>(p.weights) +
                DirectionOf<Plan>(p) * p.weights_size,
            p.weight_row_stride, p.weight_column_stride};
  }
  // Of the slot, for a column of the matrix with its padding.
  __device__ __forceinline__ static int SlotColumn(int column) { return column; }
  // A product's place among the matrix's.
  __device__ __forceinline__ static int PlaceOf(int product) { return product; }
  // Of the block, for a tile of the matrix's rows.
  __device__ __forceinline__ static int RowTile(int tile) { return tile; }
};

// The weights of one row of a block, zero where the matrix has none.
template <typename Plan, typename Matrix>
struct DenseRow {
  static constexpr auto kSizes = Plan::kSizes;
  using Weight = typename Plan::Weight;

  const char* values;     // null: no such row
  uint32_t column_bytes;  // apart; the handlers bound the rows of a matrix

  // `row`: gate * units + unit of the block.
  template <typename Problem>
  __device__ __forceinline__ DenseRow(const Problem& p, int row)
      : column_bytes(static_cast<uint32_t>(Matrix::Of(p).column_stride * sizeof(Weight))) {
    const int unit = BlockOfScan<Plan>() * kSizes.units + row % kSizes.units;
    const bool exists = row < kSizes.rows && unit < kSizes.hidden;
    const int64_t at = (Matrix::PlaceOf(row / kSizes.units) * kSizes.hidden + unit) *
                       Matrix::Of(p).row_stride * int64_t{sizeof(Weight)};
    values = exists ? static_cast<const char*>(Matrix::Of(p).values) + at : nullptr;
  }

  // kCount neighbours; `column`, with padding, is a multiple of 4. Conditions and divisions that
  // the sizes rule out, and products of 64 bits for addresses, would take the compiler seconds:
  // there are so many of these loads.
  template <int kCount>
  __device__ __forceinline__ void Load(int column, Weight (&to)[kCount]) const {
    constexpr bool kPadded = kSizes.part != kSizes.hidden;
    const int part = kPadded ? column / kSizes.part : 0;
    const int k = column - part * kSizes.part;
    const bool exists = values != nullptr && column < Matrix::kColumns;
    const int first = part * kSizes.hidden + k;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = Weight{};
      if (exists && (!kPadded || k + i < kSizes.hidden)) {
        const uint64_t at = uint64_t{column_bytes} * static_cast<uint32_t>(first + i);
        to[i] = *reinterpret_cast<const Weight*>(values + at);
      }
    }
  }
};

}  // namespace jaxsparse
