// Products with 16-bit weights and states on tensor cores. The weights are the stationary operand A
// (16 rows by 16 columns), the batch is the N = 8 of B. Warps take columns in chunks of 32.
// The order of columns within a product is free, so a lane takes as its part of B whatever 16 bytes
// it receives: state[b = lane / 4][8 columns from chunk * 32 + lane % 4 * 8], straight from the
// exchange buffer to the tensor core, without shared memory or a barrier. The weights are arranged
// to match.
//
// Where a slot is large, a warp multiplies by what has come while more is on its way, so that the
// state takes few registers. Of a step of the adjoint of an LSTM of 1024 units, 64 batch entries in
// 4 scans side by side, on one multiprocessor:
//
//   bytes: 128 KB received, 1.1 us at 64 bytes a clock cycle; where blocks only exchange as much, a
//     step takes 1.86 us. 180 KB of weights from shared memory, 0.74 us
//   operations: 1024 products of 16 x 16 x 8, 256 on each tensor core, about 1.2 us
#pragma once

#include "persistent/exchange.cuh"
#include "recurrent/kernels/dense_shape.cuh"

namespace jaxsparse {

// Sums of a warp: of a block's rows and the batch, in some independent chains.
template <typename Plan>
using MmaSums = float[Plan::kSizes.chains][Plan::kSizes.row_tiles][Plan::kSizes.batch_tiles][4];

// Places for chunks of states that are on their way to a warp, or have come.
template <typename Plan>
using MmaStates = Words4[Plan::kSizes.ahead][Plan::kSizes.batch_tiles];

// The weights of two rows in 4 columns, as a lane has them for a k16 step, whose columns are
// assigned so that each lane's are neighbours.
template <typename Row>
__device__ __forceinline__ Words4 MmaFragment(const Row& upper, const Row& lower, int column) {
  typename Row::Weight a[4], b[4];
  upper.Load(column, a);
  lower.Load(column, b);
  const auto pair = [](auto low, auto high) {
    return static_cast<uint32_t>(low.bits) | static_cast<uint32_t>(high.bits) << 16;
  };
  return {pair(a[0], a[1]), pair(b[0], b[1]), pair(a[2], a[3]), pair(b[2], b[3])};
}

// A warp's chunks of a matrix. It receives the states for them in places that others may use before
// and after it, of which it takes Matrix::kAhead.
template <typename Plan, typename Matrix>
class MmaChunks {
  using State = typename Plan::State;
  using Row = DenseRow<Plan, Matrix>;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kLoads = Matrix::kLoads, kRegisterChunks = Matrix::kRegisterChunks,
                       kRowTiles = Matrix::kRowTiles, kAhead = Matrix::kAhead;

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

  // Asks for the first states of a slot, or for one of them.
  __device__ __forceinline__ void Ask(const State* slot, MmaStates<Plan>& x) const {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) AskForChunk(slot, x, j);
  }
  __device__ __forceinline__ void AskAt(int place, const State* slot, MmaStates<Plan>& x) const {
    if (place < kAhead) AskForChunk(slot, x, place);
  }

  // Adds the products of a slot's states, of which the first were asked for. A warp that times out
  // adds something else. left(place) as soon as a place is needed no more. What has come is seen
  // (the first of 8 columns, tile of the batch, 8 of a row).
  template <typename Left, typename Seen>
  __device__ __forceinline__ void Multiply(const State* slot, MmaStates<Plan>& x,
                                           Watchdog* watchdog, MmaSums<Plan>& sums, Left left,
                                           Seen seen) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      Weights weights;
      if (!kAllAhead) LoadWeights(j, weights);  // while the chunk is on its way
      if (j % kLooks == 0) AwaitChunks(slot, x, j, watchdog);
      if (kAllAhead) LoadWeights(j, weights);
      AddChunk(weights, x[j % kAhead], 2 * j % kSizes.chains, sums);
#pragma unroll
      for (int n = 0; n < kSizes.batch_tiles; ++n) seen(Column(j), n, x[j % kAhead][n]);
      if (j + kAhead < kLoads) {
        AskForChunk(slot, x, j + kAhead);
      } else {
        left(j % kAhead);
      }
    }
  }

  // Adds the last products of a step and writes this warp's part of them. A warp that timed out in
  // the step doesn't, and returns true: what it would overwrite may still be read.
  template <typename Left>
  __device__ __forceinline__ bool MultiplyLast(const State* slot, MmaStates<Plan>& x,
                                               float* partials, Watchdog* watchdog,
                                               MmaSums<Plan>& sums, Left left) {
    Multiply(slot, x, watchdog, sums, left, [](int, int, const Words4&) {});
    const bool timed_out = __any_sync(kAllLanes, watchdog->timed_out());
    if (!timed_out) WriteSums(sums, partials);
    return timed_out;
  }

 private:
  static constexpr bool kAllAhead = kAhead >= kLoads;
  // Loads that a warp waits for together.
  static constexpr int kLooks = kAllAhead ? kAhead : (kAhead + 1) / 2;

  using Weights = Words4[kRowTiles][2];  // of a chunk: tiles of rows, k16 steps

  // Adds up the chains and leaves this warp's part of the products to the pointwise warps.
  __device__ __forceinline__ void WriteSums(MmaSums<Plan>& sums, float* partials) {
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

  __device__ __forceinline__ void AskForChunk(const State* slot, MmaStates<Plan>& x, int j) const {
#pragma unroll
    for (int n = 0; n < kSizes.batch_tiles; ++n) {
      x[j % kAhead][n] = {0, 0, 0, 0};
      LoadRelaxedIf(Active(j, n), From(slot, j, n), &x[j % kAhead][n]);
    }
  }

  // Waits for chunks j to j + kLooks. What came too early is asked for again, of all chunks that
  // are on their way: those behind them hardly came in time, either.
  __device__ __forceinline__ void AwaitChunks(const State* slot, MmaStates<Plan>& x, int j,
                                              Watchdog* watchdog) const {
    watchdog->Begin();
    for (;;) {
      bool missing = false;
#pragma unroll
      for (int i = j; i < j + kLooks && i < kLoads; ++i) {
#pragma unroll
        for (int n = 0; n < kSizes.batch_tiles; ++n) missing |= !IsWritten(x[i % kAhead][n]);
      }
      if (!__any_sync(kAllLanes, missing)) return;
#pragma unroll
      for (int i = j; i < j + kAhead && i < kLoads; ++i) {
#pragma unroll
        for (int n = 0; n < kSizes.batch_tiles; ++n) {
          Words4& words = x[i % kAhead][n];
          LoadRelaxedIf(!IsWritten(words), From(slot, i, n), &words);
        }
      }
      if (__any_sync(kAllLanes, watchdog->TimesOut())) return;
    }
  }

  __device__ __forceinline__ void LoadWeights(int j, Weights& to) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to[m][half] = j < kRegisterChunks ? weights_[j < kRegisterChunks ? j : 0][m][half]
                                          : SharedWeights(j, m, half);
      }
    }
  }

  __device__ __forceinline__ static void AddChunk(const Weights& weights,
                                                  const Words4 (&x)[kSizes.batch_tiles], int chain,
                                                  MmaSums<Plan>& sums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const Words4 a = weights[m][half];
#pragma unroll
        for (int n = 0; n < kSizes.batch_tiles; ++n) {
          MultiplyAdd(State(), sums[(chain + half) % kSizes.chains][Matrix::RowTile(m)][n],
                      {a.x, a.y, a.z, a.w}, half == 0 ? x[n].x : x[n].z,
                      half == 0 ? x[n].y : x[n].w);
        }
      }
    }
  }

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

  const int warp_, g_, q_;
  Words4* const shared_;
  Words4 weights_[kRegisterChunks > 0 ? kRegisterChunks : 1][kRowTiles][2];
};

// What the product warps of a scan on its own do in a step.
template <typename Plan>
class DenseMma {
  using State = typename Plan::State;
  static_assert(!Plan::kSizes.has_idle_warps);

 public:
  __device__ __forceinline__ DenseMma(const RecurrentScanProblem& p, Words4* shared)
      : own_(p, shared) {}

  // Multiplies the state that a slot of the exchange buffer comes to hold. True: it timed out.
  __device__ __forceinline__ bool Multiply(const State* slot, float* partials, Watchdog* watchdog) {
    MmaSums<Plan> sums = {};
    MmaStates<Plan> x;
    own_.Ask(slot, x);
    return own_.MultiplyLast(slot, x, partials, watchdog, sums, [](int) {});
  }

 private:
  MmaChunks<Plan, OwnMatrix<Plan>> own_;
};

}  // namespace jaxsparse
