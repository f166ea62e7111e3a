// Products of a tile's 8 rows with 16-bit weights and states on tensor cores. The weights are the
// stationary operand A (16 rows by 16 columns), the tile's rows are the N = 8 of B. Warps take
// columns in chunks of 32.
// The order of columns within a product is free, so a lane takes as its part of B whatever 16 bytes
// it receives: 8 columns of the tile's row lane / 4, straight from where the states lie to the
// tensor core, without shared memory. The weights are arranged to match.
#pragma once

#include "persistent/exchange.cuh"
#include "recurrent/kernels/dense_mma.cuh"

namespace jaxsparse {

// Where a warp's part of the products has a row of the matrix and a row of the tile. A tensor
// core's tiles are written without conflicts of banks, and units beside each other read without.
__device__ __forceinline__ int PlaceOfProduct(int row, int tile_row) {
  const auto group = static_cast<uint32_t>(row) / 4;
  return row * kTileRows + (tile_row ^ static_cast<int>(group % 4 * 2));
}
// The place so many rows behind one, a multiple of 8.
__device__ __forceinline__ int PlaceBehind(int rows, int place) {
  return (place ^ rows / 4 % 4 * 2) + rows * kTileRows;
}

template <typename Plan, typename Matrix>
class TeamMma {
  using State = typename Plan::State;
  using Row = DenseRow<Plan, Matrix>;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kLoads = kSizes.loads, kRowTiles = kSizes.row_tiles;
  static constexpr int kRegisterChunks = kSizes.register_chunks;

 public:
  // The lane's part of a tile's states.
  using States = Words4[kLoads];

  template <typename Problem>
  __device__ __forceinline__ TeamMma(const Problem& p, Words4* shared)
      : warp_(threadIdx.x / kWarp), lane_(threadIdx.x % kWarp), shared_(shared + threadIdx.x) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const Row upper(p, m * 16 + TileRow()), lower(p, m * 16 + 8 + TileRow());
#pragma unroll
      for (int j = 0; j < kRegisterChunks; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          weights_[j][m][half] = MmaFragment(upper, lower, Column(j) + 4 * half);
        }
      }
#pragma unroll 1  // which the compiler takes less time for
      for (int j = kRegisterChunks; j < kLoads; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          SharedWeights(j, m, half) = MmaFragment(upper, lower, Column(j) + 4 * half);
        }
      }
    }
  }

  // The row of the tile whose states the lane loads, and the first of their columns.
  __device__ __forceinline__ int TileRow() const { return lane_ / 4; }
  __device__ __forceinline__ int Column(int j) const {
    return (j * kSizes.warps + warp_) * kSizes.load_columns + lane_ % 4 * 8;
  }
  __device__ __forceinline__ bool HasColumn(int j) const {
    return (j + 1) * kSizes.warps * kSizes.load_columns <= kSizes.columns ||
           Column(j) < kSizes.columns;
  }

  // Leaves this warp's part of the products.
  __device__ __forceinline__ void Multiply(const States& x, float* partials) const {
    float sums[kSizes.chains][kRowTiles][4] = {};
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const Words4 a = j < kRegisterChunks ? weights_[j < kRegisterChunks ? j : 0][m][half]
                                               : SharedWeights(j, m, half);
          MultiplyAdd(State(), sums[half % kSizes.chains][m], {a.x, a.y, a.z, a.w},
                      half == 0 ? x[j].x : x[j].z, half == 0 ? x[j].y : x[j].w);
        }
      }
    }
    const uint32_t part = AddressOfShared(partials + warp_ * kSizes.warp_part);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kSizes.chains > 1) sums[0][m][i] += sums[1][m][i];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8 + TileRow();
        StoreShared(part + PlaceOfProduct(row, lane_ % 4 * 2) * 4,
                    __float_as_uint(sums[0][m][2 * half]),
                    __float_as_uint(sums[0][m][2 * half + 1]));
      }
    }
  }

 private:
  __device__ __forceinline__ Words4& SharedWeights(int j, int m, int half) const {
    return shared_[(((j - kRegisterChunks) * kRowTiles + m) * 2 + half) * kSizes.product_threads];
  }

  const int warp_, lane_;
  Words4* const shared_;
  Words4 weights_[kRegisterChunks > 0 ? kRegisterChunks : 1][kRowTiles][2];
};

}  // namespace jaxsparse
