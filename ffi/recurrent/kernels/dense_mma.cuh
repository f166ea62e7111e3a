// Products with 16-bit weights and states on tensor cores. The weights are the stationary operand A
// (16 rows by 16 columns), the batch is the N = 8 of B. Warps take columns in chunks of 32.
// The order of columns within a product is free, so a lane takes as its part of B whatever 16 bytes
// it receives: state[b = lane / 4][8 columns from chunk * 32 + lane % 4 * 8], straight from the
// exchange buffer to the tensor core, without shared memory or a barrier. The weights are arranged
// to match.
#pragma once

#include "persistent/exchange.cuh"
#include "recurrent/kernels/dense_shape.cuh"

namespace jaxsparse {

// Sums of a warp: of a block's rows and the batch, in some independent chains.
template <typename Plan>
using MmaSums = float[Plan::kSizes.chains][Plan::kSizes.row_tiles][Plan::kSizes.batch_tiles][4];

// A warp's chunks of a matrix, and the states that it receives for them.
template <typename Plan, typename Matrix>
class MmaChunks {
  using State = typename Plan::State;
  using Row = DenseRow<Plan, Matrix>;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kLoads = Matrix::kLoads, kRegisterChunks = Matrix::kRegisterChunks,
                       kRowTiles = Matrix::kRowTiles;

 public:
  template <typename Problem>
  __device__ __forceinline__ MmaChunks(const Problem& p, Words4* shared)
      : warp_(threadIdx.x / kWarp),
        g_(threadIdx.x % kWarp / 4),
        q_(threadIdx.x % 4),
        shared_(shared + threadIdx.x) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int row = Matrix::RowTile(m) * 16 + g_;
      const Row upper(p, row), lower(p, row + 8);
#pragma unroll
      for (int j = 0; j < kRegisterChunks; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          weights_[j][m][half] = Fragment(upper, lower, Column(j) + 4 * half);
        }
      }
#pragma unroll 1  // which the compiler takes less time for
      for (int j = kRegisterChunks; j < kLoads; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          SharedWeights(j, m, half) = Fragment(upper, lower, Column(j) + 4 * half);
        }
      }
    }
  }

  __device__ __forceinline__ void Start(const RecurrentScanProblem& p) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int n = 0; n < kSizes.batch_tiles; ++n) {
        x_[j][n] = Active(j, n) ? LoadInitialState<Plan>(p, n * 8 + g_, SlotColumn(j))
                                : Words4{0, 0, 0, 0};
      }
    }
  }

  // Asks for the states of a slot,
  __device__ __forceinline__ void Ask(const State* slot) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int n = 0; n < kSizes.batch_tiles; ++n) {
        x_[j][n] = {0, 0, 0, 0};
        LoadRelaxedIf(Active(j, n), From(slot, j, n), &x_[j][n]);
      }
    }
  }
  // and waits for them.
  __device__ __forceinline__ void Await(const State* slot, Watchdog* watchdog) {
    jaxsparse::Await<kLoads * kSizes.batch_tiles>(
        &x_[0][0],
        [&](int i) { return From(slot, i / kSizes.batch_tiles, i % kSizes.batch_tiles); },
        watchdog);
  }

  // Adds the products of what was received.
  __device__ __forceinline__ void Multiply(MmaSums<Plan>& sums) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const Words4 a = j < kRegisterChunks ? weights_[j < kRegisterChunks ? j : 0][m][half]
                                               : SharedWeights(j, m, half);
#pragma unroll
          for (int n = 0; n < kSizes.batch_tiles; ++n) {
            const Words4 x = x_[j][n];
            MultiplyAdd(State(), sums[(2 * j + half) % kSizes.chains][Matrix::RowTile(m)][n],
                        {a.x, a.y, a.z, a.w}, half == 0 ? x.x : x.z, half == 0 ? x.y : x.w);
          }
        }
      }
    }
  }

  // Writes a warp's part of the products.
  __device__ __forceinline__ void WritePartials(MmaSums<Plan>& sums, float* partials) {
#pragma unroll
    for (int c = kSizes.chains / 2; c > 0; c /= 2) {
#pragma unroll
      for (int i = 0; i < c; ++i) {
#pragma unroll
        for (int m = 0; m < kSizes.row_tiles; ++m) {
#pragma unroll
          for (int n = 0; n < kSizes.batch_tiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][m][n][e] += sums[i + c][m][n][e];
          }
        }
      }
    }
    float* part = partials + warp_ * kSizes.warp_part + 2 * q_ * kSizes.row_slots;
#pragma unroll
    for (int m = 0; m < kSizes.row_tiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = m * 16 + r * 8 + g_;
        if (row >= kSizes.rows || 2 * q_ >= kSizes.tile_batch) continue;
#pragma unroll
        for (int n = 0; n < kSizes.batch_tiles; ++n) {
          float* to = part + n * 8 * kSizes.row_slots + SlotOfRow<Plan>(row, 2 * q_);
          to[0] = sums[0][m][n][2 * r];
          to[kSizes.row_slots] = sums[0][m][n][2 * r + 1];
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int Column(int j) const {
    return (j * kSizes.warps + warp_) * kSizes.chunk + q_ * 8;
  }
  __device__ __forceinline__ int SlotColumn(int j) const { return Matrix::SlotColumn(Column(j)); }
  __device__ __forceinline__ bool Active(int j, int n) const {
    return n * 8 + g_ < kSizes.batch &&
           ((j + 1) * kSizes.warps * kSizes.chunk <= Matrix::kColumns ||
            Column(j) < Matrix::kColumns);
  }
  __device__ __forceinline__ const Words4* From(const State* slot, int j, int n) const {
    return reinterpret_cast<const Words4*>(slot + SlotOffset<Plan>(n * 8 + g_, SlotColumn(j)));
  }
  __device__ __forceinline__ Words4& SharedWeights(int j, int m, int half) const {
    return shared_[(((j - kRegisterChunks) * kRowTiles + m) * 2 + half) * kSizes.product_threads];
  }

  // Two rows by 4 columns: a k16 step's columns are assigned so that each lane's are neighbours.
  __device__ __forceinline__ static Words4 Fragment(const Row& upper, const Row& lower,
                                                    int column) {
    typename Plan::Weight a[4], b[4];
    upper.Load(column, a);
    lower.Load(column, b);
    return {Pair(a[0], a[1]), Pair(b[0], b[1]), Pair(a[2], a[3]), Pair(b[2], b[3])};
  }
  __device__ __forceinline__ static uint32_t Pair(State low, State high) {
    return static_cast<uint32_t>(low.bits) | static_cast<uint32_t>(high.bits) << 16;
  }

  const int warp_, g_, q_;
  Words4* const shared_;
  Words4 weights_[kRegisterChunks > 0 ? kRegisterChunks : 1][kRowTiles][2];
  Words4 x_[kLoads][kSizes.batch_tiles];
};

// What the product warps of a scan on its own do in a step.
template <typename Plan>
class DenseMma {
  using State = typename Plan::State;
  static_assert(!Plan::kSizes.has_idle_warps);

 public:
  __device__ __forceinline__ DenseMma(const RecurrentScanProblem& p, Words4* shared)
      : own_(p, shared) {}

  __device__ __forceinline__ void Start(const RecurrentScanProblem& p) { own_.Start(p); }

  __device__ __forceinline__ void Receive(const State* slot, Watchdog* watchdog) {
    own_.Ask(slot);
    own_.Await(slot, watchdog);
  }

  // Adds what was received and writes this warp's part of the products.
  __device__ __forceinline__ void Multiply(float* partials) {
    MmaSums<Plan> sums = {};
    own_.Multiply(sums);
    own_.WritePartials(sums, partials);
  }

 private:
  MmaChunks<Plan, OwnMatrix<Plan>> own_;
};

}  // namespace jaxsparse
