// Products of a tile's 8 rows with 16-bit weights and states on tensor cores. The weights are the
// stationary operand A (16 rows by 16 columns), the tile's rows are the N = 8 of B. Warps take
// columns in chunks of 32.
// The order of columns within a product is free, so a lane takes as its part of B whatever 16 bytes
// it receives: 8 columns of the tile's row lane / 4, straight from where the states lie to the
// tensor core, without shared memory. The weights are arranged to match.
// Registers have no addresses: where several kinds have weights in them, each has code of its own.
#pragma once

#include "dynamic/kernels/team_weights.cuh"
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

// The matrix of rows of a kind.
__device__ __forceinline__ DenseWeights WeightsOf(const GraphScanProblem& p, int kind) {
  const char* values = static_cast<const char*>(p.weights.values) + kind * p.weight_kind_bytes;
  return {values, p.weights.row_stride, p.weights.column_stride};
}

// Loads: of team_weights.cuh.
template <typename Plan, typename Loads>
class TeamMma {
  using State = typename Plan::State;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kLoads = kSizes.loads, kRowTiles = kSizes.row_tiles;
  static constexpr int kRegisterChunks = kSizes.register_chunks;
  static constexpr int kRegisterKinds = kRegisterChunks > 0 ? kSizes.kinds : 1;

 public:
  // The lane's part of a tile's states.
  using States = Words4[kLoads];

  __device__ __forceinline__ explicit TeamMma(Words4* shared)
      : warp_(threadIdx.x / kWarp),
        lane_(threadIdx.x % kWarp),
        place_(warp_ * kSizes.warp_part + PlaceOfProduct(TileRow(), lane_ % 4 * 2)),
        shared_(shared + threadIdx.x) {
    KeepInRegister(place_);  // or it is found for every tile
  }

  // What Multiply multiplies by.
  __device__ __forceinline__ void LoadWeights(const GraphScanProblem& p) {
    // Those in shared memory first, while registers are free.
#pragma unroll 1  // which the compiler takes less time for
    for (int kind = 0; kRegisterChunks < kLoads && kind < kSizes.kinds; ++kind) {
      const Loads loads = LoadsOf(p, kind);
      typename Loads::Asked next;
      loads.Ask(FirstColumn(kRegisterChunks), &next);
#pragma unroll 1
      for (int j = kRegisterChunks; j < kLoads; ++j) {
        const typename Loads::Asked asked = next;
        if (j + 1 < kLoads) loads.Ask(FirstColumn(j + 1), &next);
        ChunkWeights<Plan> weights;
        loads.Arrange(asked, weights);
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            SharedWeights(kind, j, m, half) = weights[m][half];
          }
        }
      }
    }
#pragma unroll
    for (int kind = 0; kRegisterChunks > 0 && kind < kRegisterKinds; ++kind) {
      const Loads loads = LoadsOf(p, kind);
      // One behind the other in turn: a copy of what is on its way would wait for it.
      typename Loads::Asked asked[2];
      loads.Ask(FirstColumn(0), &asked[0]);
#pragma unroll
      for (int j = 0; j < kRegisterChunks; ++j) {
        if (j + 1 < kRegisterChunks) loads.Ask(FirstColumn(j + 1), &asked[(j + 1) % 2]);
        loads.Arrange(asked[j % 2], weights_[kind][j]);
      }
    }
    if constexpr (Loads::kStages && !Plan::kBarrier) {
      WaitAt<kSizes.product_threads>(kProductWarps);
    }
  }

  // The row of the tile whose states the lane loads, and the first of their columns.
  __device__ __forceinline__ int TileRow() const { return lane_ / 4; }
  __device__ __forceinline__ int Column(int j) const { return FirstColumn(j) + lane_ % 4 * 8; }
  __device__ __forceinline__ bool HasColumn(int j) const {
    return (j + 1) * kSizes.warps * kSizes.load_columns <= kSizes.columns ||
           Column(j) < kSizes.columns;
  }

  // Leaves this warp's part of the products, by the matrix of a kind.
  __device__ __forceinline__ void Multiply(int kind, const States& x, float* partials) const {
    float sums[kSizes.chains][kRowTiles][4] = {};
    AddProducts<0>(kind, x, sums);
    const int behind = PlaceBehind(8, place_) - place_;
    const uint32_t part = AddressOfShared(partials) + place_ * 4;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kSizes.chains > 1) sums[0][m][i] += sums[1][m][i];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        StoreShared(part + (m * 16 * kTileRows + half * behind) * 4,
                    __float_as_uint(sums[0][m][2 * half]),
                    __float_as_uint(sums[0][m][2 * half + 1]));
      }
    }
  }

 private:
  static constexpr int kProductWarps = 2;  // a named barrier

  // How this warp brings a kind's weights from memory.
  __device__ __forceinline__ Loads LoadsOf(const GraphScanProblem& p, int kind) const {
    return Loads(WeightsOf(p, kind), shared_ - threadIdx.x - kSizes.weights_at / 16);
  }
  // Of the warp's chunk.
  __device__ __forceinline__ int FirstColumn(int j) const {
    return (j * kSizes.warps + warp_) * kSizes.load_columns;
  }

  // By the registers of kKind, or of a later one.
  template <int kKind>
  __device__ __forceinline__ void AddProducts(int kind, const States& x,
                                              float (&sums)[kSizes.chains][kRowTiles][4]) const {
    if constexpr (kKind + 1 < kRegisterKinds) {
      if (kind != kKind) return AddProducts<kKind + 1>(kind, x, sums);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const Words4 a = j < kRegisterChunks
                               ? weights_[kKind][j < kRegisterChunks ? j : 0][m][half]
                               : SharedWeights(kind, j, m, half);
          MultiplyAdd(State(), sums[half % kSizes.chains][m], {a.x, a.y, a.z, a.w},
                      half == 0 ? x[j].x : x[j].z, half == 0 ? x[j].y : x[j].w);
        }
      }
    }
  }

  __device__ __forceinline__ Words4& SharedWeights(int kind, int j, int m, int half) const {
    const int chunk = kind * (kLoads - kRegisterChunks) + j - kRegisterChunks;
    return shared_[((chunk * kRowTiles + m) * 2 + half) * kSizes.product_threads];
  }

  const int warp_, lane_;
  int place_;  // of the first products that the lane leaves
  Words4* const shared_;
  ChunkWeights<Plan> weights_[kRegisterKinds][kRegisterChunks > 0 ? kRegisterChunks : 1];
};

}  // namespace jaxsparse
