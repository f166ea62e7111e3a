// Products with 16-bit weights and states on tensor cores. The weights are the stationary operand A
// (16 rows by 16 columns), the batch is the N = 8 of B. Columns are dealt to warps in chunks of 32.
// The order of columns within a product is free, so a lane takes as its part of B whatever 16 bytes
// it receives: state[b = lane / 4][8 columns from chunk * 32 + lane % 4 * 8], straight from the
// exchange buffer to the tensor core, without shared memory or a barrier. The weights are arranged
// to match.
#pragma once

#include "persistent/exchange.cuh"
#include "recurrent/dense_shape.cuh"

namespace jaxsparse {

template <typename Step, typename Plan>
class DenseMma {
  using Shape = DenseShape<Step, Plan>;
  using State = typename Plan::State;
  static constexpr int kChunk = 32;  // columns: two k16 steps, 16 bytes a lane
  static constexpr int kChunks = Shape::Ceil(Shape::kColumns, kChunk);
  static constexpr int kLoads = Shape::Ceil(kChunks, Plan::kWarps);  // chunks of a warp
  static constexpr int kInRegisters =
      Plan::kRegisterChunks < kLoads ? Plan::kRegisterChunks : kLoads;
  static constexpr int kTiles = Shape::Ceil(Shape::kRows, 16);
  // A warp that waits for nobody would run ahead of the others.
  static_assert(kChunks >= Plan::kWarps);
  // Independent sums hide the latency of an mma.
  static constexpr int kChains = kTiles * Shape::kBatchTiles >= 4 ? 1 : 2;

 public:
  static constexpr int kSharedBytes =
      (kLoads - kInRegisters) * kTiles * 2 * Shape::kProductThreads * 16;

  __device__ __forceinline__ DenseMma(const RecurrentScanProblem& p, Words4* shared)
      : warp_(threadIdx.x / kWarp),
        g_(threadIdx.x % kWarp / 4),
        q_(threadIdx.x % 4),
        shared_(shared + threadIdx.x) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const DenseRow<Step, Plan> upper(p, m * 16 + g_), lower(p, m * 16 + g_ + 8);
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Words4 fragment = Fragment(upper, lower, Column(j) + 4 * half);
          if (j < kInRegisters) {
            weights_[j < kInRegisters ? j : 0][m][half] = fragment;
          } else {
            SharedWeights(j, m, half) = fragment;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void Start(const RecurrentScanProblem& p) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int n = 0; n < Shape::kBatchTiles; ++n) {
        x_[j][n] = Active(j, n) ? LoadInitialState<Step, Plan>(p, n * 8 + g_, Column(j))
                                : Words4{0, 0, 0, 0};
      }
    }
  }

  __device__ __forceinline__ void Receive(const State* slot, Watchdog* watchdog) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int n = 0; n < Shape::kBatchTiles; ++n) {
        x_[j][n] = {0, 0, 0, 0};
        LoadRelaxedIf(Active(j, n), From(slot, j, n), &x_[j][n]);
      }
    }
    Await<kLoads * Shape::kBatchTiles>(
        &x_[0][0],
        [&](int i) { return From(slot, i / Shape::kBatchTiles, i % Shape::kBatchTiles); },
        watchdog);
  }

  // Adds what was received and writes this warp's part of the products.
  __device__ __forceinline__ void Multiply(float* partials) {
    float sums[kChains][kTiles][Shape::kBatchTiles][4] = {};
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const Words4 a = j < kInRegisters ? weights_[j < kInRegisters ? j : 0][m][half]
                                            : SharedWeights(j, m, half);
#pragma unroll
          for (int n = 0; n < Shape::kBatchTiles; ++n) {
            const Words4 x = x_[j][n];
            MultiplyAdd(State(), sums[(2 * j + half) % kChains][m][n], {a.x, a.y, a.z, a.w},
                        half == 0 ? x.x : x.z, half == 0 ? x.y : x.w);
          }
        }
      }
    }
#pragma unroll
    for (int c = kChains / 2; c > 0; c /= 2) {
#pragma unroll
      for (int i = 0; i < c; ++i) {
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
#pragma unroll
          for (int n = 0; n < Shape::kBatchTiles; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) sums[i][m][n][e] += sums[i + c][m][n][e];
          }
        }
      }
    }
    float* part = partials + warp_ * Shape::kWarpPart + 2 * q_ * Shape::kRowSlots;
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = m * 16 + r * 8 + g_;
        if (row >= Shape::kRows || 2 * q_ >= Shape::kTileBatch) continue;
#pragma unroll
        for (int n = 0; n < Shape::kBatchTiles; ++n) {
          float* to = part + n * 8 * Shape::kRowSlots + Shape::SlotOfRow(row, 2 * q_);
          to[0] = sums[0][m][n][2 * r];
          to[Shape::kRowSlots] = sums[0][m][n][2 * r + 1];
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int Column(int j) const {
    return (j * Plan::kWarps + warp_) * kChunk + q_ * 8;
  }
  __device__ __forceinline__ bool Active(int j, int n) const {
    return n * 8 + g_ < Plan::kBatch &&
           ((j + 1) * Plan::kWarps * kChunk <= Shape::kColumns || Column(j) < Shape::kColumns);
  }
  __device__ __forceinline__ const Words4* From(const State* slot, int j, int n) const {
    return reinterpret_cast<const Words4*>(slot + Shape::Offset(n * 8 + g_, Column(j)));
  }
  __device__ __forceinline__ Words4& SharedWeights(int j, int m, int half) const {
    return shared_[(((j - kInRegisters) * kTiles + m) * 2 + half) * Shape::kProductThreads];
  }

  // Two rows by 4 columns: a k16 step's columns are dealt so that each lane's are neighbours.
  __device__ __forceinline__ static Words4 Fragment(const DenseRow<Step, Plan>& upper,
                                                    const DenseRow<Step, Plan>& lower, int column) {
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
  Words4 weights_[kInRegisters > 0 ? kInRegisters : 1][kTiles][2];
  Words4 x_[kLoads][Shape::kBatchTiles];
};

}  // namespace jaxsparse
