// The heads of a loss: what warps do beside the first pass. The rows of a team's tiles are dealt to
// its blocks and their warps. As soon as a row's state is there, a warp makes its logits and their
// softmax, and publishes the gradient by the logits. A few tiles later each block takes these, of
// all rows of the tile, and makes the gradient by the states of its own units, which the second
// pass reads.
#pragma once

#include "dynamic/kernels/loss_sizes.h"
#include "dynamic/kernels/loss_sums.cuh"
#include "dynamic/kernels/ring.cuh"
#include "dynamic/kernels/team_items.cuh"
#include "dynamic/kernels/tiles_of_team.cuh"
#include "dynamic/loss_problem.h"
#include "persistent/delay.cuh"
#include "persistent/exchange.cuh"

namespace jaxsparse {

// 16 bytes of states or weights as numbers.
template <typename State>
__device__ __forceinline__ void NumbersOf(State, Words4 words, float (&x)[8]) {
  const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = ToAccumulator(State{static_cast<uint16_t>(pairs[i])});
    x[2 * i + 1] = ToAccumulator(State{static_cast<uint16_t>(pairs[i] >> 16)});
  }
}
__device__ __forceinline__ void NumbersOf(float, Words4 words, float (&x)[4]) {
  x[0] = __uint_as_float(words.x);
  x[1] = __uint_as_float(words.y);
  x[2] = __uint_as_float(words.z);
  x[3] = __uint_as_float(words.w);
}

// Plan: that of the first pass. Loss::kSizes: what a block has.
template <typename Plan, typename Loss>
class LossHeads {
  using State = typename Plan::State;
  using Tiles = TilesOfTeam<Plan>;
  static constexpr TeamSizes kSizes = Plan::kSizes;
  static constexpr LossSizes kLoss = Loss::kSizes;
  static constexpr int kClasses = kLoss.classes, kWarps = kLoss.head_warps;
  static constexpr int kRows = kLoss.rows, kRowLanes = kWarp / kRows;
  static constexpr int kClassLanes = kLoss.class_lanes, kLaneClasses = kLoss.lane_classes;
  static constexpr int kNumbers = kSizes.states_per_load;
  static constexpr int kColumns = kNumbers * kWarp;  // that a warp loads at once
  static constexpr int kLoads = kLoss.row_loads;
  static constexpr int kUnrolled = kClasses <= kClassLanes ? kClassLanes : 2;  // classes
  // Tiles between a row's head and the gradient by its state: the time of an exchange.
  static constexpr int kBehind = 4;
  static constexpr uint32_t kPollNanoseconds = 100;  // from a look in vain to the next one
  static constexpr int kMeeting = 5;                 // a named barrier, of these warps alone

 public:
  __device__ __forceinline__ LossHeads(const GraphLossProblem& p, Words4* shared,
                                       volatile uint32_t* stop)
      : warp_((static_cast<int>(threadIdx.x) - kFirstThread) / kWarp),
        lane_(threadIdx.x % kWarp),
        weights_(shared + kLoss.head_at / 16),
        bias_(reinterpret_cast<float*>(shared) + kLoss.bias_at / 4),
        received_(reinterpret_cast<float*>(shared) +
                  (kLoss.received_at + warp_ * kLoss.warp_received) / 4),
        watchdog_(p.gather.wait_limits),
        stop_(stop) {
    const int thread = static_cast<int>(threadIdx.x) - kFirstThread;
    auto* weights = reinterpret_cast<State*>(weights_);
    const auto* from = static_cast<const State*>(p.head_weights);
#pragma unroll 8
    for (int i = thread; i < kClasses * kSizes.hidden; i += kLoss.head_threads) {
      weights[i % kClasses * kSizes.hidden + i / kClasses] = from[i];
    }
    const auto* bias = static_cast<const typename Loss::Bias*>(p.head_bias);
    for (int i = thread; i < kClasses; i += kLoss.head_threads) bias_[i] = ToAccumulator(bias[i]);
    MeetSome<Plan, kLoss.head_threads>(kMeeting);
  }

  // Warps take turns at tiles. In its turn, a warp makes heads of some leaves, which wait for
  // nothing, and the gradient by the states of a tile some tiles back. So leaves are done beside
  // the first tiles, and the second pass waits for none of them.
  __device__ __forceinline__ void Run(const GraphLossProblem& p) {
    WaitForPrologue();  // it fills gradients by logits, and parts of sums
    ClearUnused(p);
    constexpr int kEvery = Plan::kScans * Plan::kBlocks * kWarps * kRows;
    int leaf = (static_cast<int>(blockIdx.x) * kWarps + warp_) * kRows;  // less than 2^31 - kEvery
    Tiles tiles(p.gather), behind(p.gather);
    for (int number = 0;; ++number) {
      // What follows from the lane takes no registers between tiles.
      KeepInRegister(lane_);
      lane_ = static_cast<int>(static_cast<uint32_t>(lane_) % kWarp);  // or it could be any number
      const TeamTile tile = tiles.Next(p.gather);
      const bool is_turn = number % kWarps == warp_;
      const TeamTile done = number < kBehind ? TeamTile{0, 0, 0, true} : behind.Next(p.gather);
      const bool has_leaves = leaf < p.gather.leaves;
      if (!done.exists && !has_leaves) break;
      if (has_leaves && (is_turn || !done.exists)) {
        HeadsOfLeaves(p, leaf);
        leaf += kEvery;
      }
      if (done.exists && is_turn && number >= kBehind) GradientsOf(p, done.number * kTileRows);
      if (!tile.exists) continue;
      MeetBeside<Plan>(p.gather, number);
      HeadsOf(p, tile, number);
    }
    sums_.Publish(p, warp_);
    if (watchdog_.timed_out()) *stop_ = 1;
  }

 private:
  static constexpr int kFirstThread = kSizes.product_threads + kSizes.pointwise_threads;

  // Of the rows that a warp makes together, that of the lane, and its first class.
  __device__ __forceinline__ int OwnRow() const { return lane_ / kRowLanes; }
  __device__ __forceinline__ int OwnClass() const { return lane_ % kClassLanes; }
  // Or else another lane has the same class of the same row, too.
  __device__ __forceinline__ bool IsFirst() const { return lane_ % kRowLanes < kClassLanes; }

  // Those of all rows that no team makes.
  __device__ __forceinline__ void ClearUnused(const GraphLossProblem& p) const {
    using Items = TeamItems<Plan, kLoss.head_threads>;
    const Items items(static_cast<int>(threadIdx.x) - kFirstThread);
    const UnusedRows unused = items.Unused(p.gather, Tiles::Used(p.gather));
    unused.Clear(p.of_logits + int64_t{p.gather.leaves} * kClasses, kClasses * sizeof(float));
  }

  __device__ __forceinline__ void HeadsOfLeaves(const GraphLossProblem& p, int first) {
    const int left = p.gather.leaves - first, rows = left < kRows ? left : kRows;
    const auto* states = static_cast<const State*>(p.gather.leaf_states);
    float of_logits[kLaneClasses];
    Heads<true>(p, first, states + int64_t{first} * kSizes.hidden, rows, of_logits);
    GradientsOfLeaves(p, first, rows, of_logits);
  }

  // Those of the tile's rows that are this warp's.
  __device__ __forceinline__ void HeadsOf(const GraphLossProblem& p, const TeamTile& tile,
                                          int number) {
    Delay<Plan::kMostDelay>(number);
    constexpr int kTurns = kTileRows / kRows;
#pragma unroll 1
    for (int i = 0; i < kTurns; ++i) {
      const int turn = number * kTurns + i;
      if (turn % Plan::kBlocks != BlockOfScan<Plan>() || turn / Plan::kBlocks % kWarps != warp_) {
        continue;
      }
      const int computed = tile.number * kTileRows + i * kRows;
      const auto* states = static_cast<const State*>(p.gather.states);
      float of_logits[kLaneClasses];
      Heads<false>(p, p.gather.leaves + computed, states + int64_t{computed} * kSizes.hidden, kRows,
                   of_logits);
    }
  }

  // Adds the losses of rows side by side, and publishes their gradients by the logits, of which
  // each lane has some of one row.
  template <bool kAreLeaves>
  __device__ __forceinline__ void Heads(const GraphLossProblem& p, int first, const State* states,
                                        int rows, float (&logits)[kLaneClasses]) {
    Words4 x[kRows][kLoads];
    LookFor(states, rows, false, x);  // beside the labels
    const int row = first + OwnRow();
    const int label = !kAreLeaves || OwnRow() < rows ? p.labels[row] : -1;
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) logits[i] = 0;
    if (__any_sync(kAllLanes, label != -1)) {
      if (!kAreLeaves) Await(states, x);
#pragma unroll 1
      for (int i = 0; i < kLaneClasses; ++i) {
        const float logit = Logit(x, i * kClassLanes);
#pragma unroll
        for (int j = 0; j < kLaneClasses; ++j) logits[j] = j == i ? logit : logits[j];
      }
      Softmax(label, logits);
    }
    auto* to = reinterpret_cast<uint32_t*>(p.of_logits + int64_t{row} * kClasses);
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) {
      const int c = i * kClassLanes + OwnClass();
      if (c < kClasses && IsFirst() && OwnRow() < rows) StoreRelaxed(to + c, ToWord(logits[i]));
    }
  }

  // Loads rows' states, of which each lane takes columns, or again what was not written.
  __device__ __forceinline__ void LookFor(const State* states, int rows, bool again,
                                          Words4 (&x)[kRows][kLoads]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int column = j * kColumns + lane_ * kNumbers;
        if (!again) x[r][j] = {0, 0, 0, 0};
        const bool asks = column < kSizes.hidden && r < rows && (!again || !IsWritten(x[r][j]));
        const State* from = states + r * kSizes.hidden + column;
        LoadRelaxedIf(asks, reinterpret_cast<const Words4*>(from), &x[r][j]);
      }
    }
  }

  // Waits for the states of computed rows. What comes too late is NaN. States of leaves are there,
  // and may be any words, those that stand for unwritten ones among them.
  __device__ __forceinline__ void Await(const State* states, Words4 (&x)[kRows][kLoads]) {
    watchdog_.Begin();
    for (;;) {
      bool missing = false;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kLoads; ++j) missing |= !IsWritten(x[r][j]);
      }
      if (!__any_sync(kAllLanes, missing)) return;
      if (__any_sync(kAllLanes, watchdog_.TimesOut())) return;
      Sleep(kPollNanoseconds);
      LookFor(states, kRows, true, x);
    }
  }

  // Of the lane's row, for its class among those from `first` on.
  __device__ __forceinline__ float Logit(const Words4 (&x)[kRows][kLoads], int first) const {
    float sums[kClassLanes] = {};
#pragma unroll
    for (int c = 0; c < kClassLanes; ++c) {
      if (first + c >= kClasses) continue;
      const auto* weights = reinterpret_cast<const State*>(weights_) + (first + c) * kSizes.hidden;
      float of_rows[kRows] = {};
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int column = j * kColumns + lane_ * kNumbers;
        if (column >= kSizes.hidden) continue;
        float w[kNumbers];
        NumbersOf(State(), *reinterpret_cast<const Words4*>(weights + column), w);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          float a[kNumbers];
          NumbersOf(State(), x[r][j], a);
#pragma unroll
          for (int n = 0; n < kNumbers; ++n) of_rows[r] = fmaf(a[n], w[n], of_rows[r]);
        }
      }
      sums[c] = SumOfOwnRow(of_rows);
    }
    const int own = first + OwnClass();
    return ExchangeSums(sums) + (own < kClasses ? bias_[own] : 0.f);
  }

  // Over all lanes that are the same ones of class_lanes.
  __device__ __forceinline__ float SumOfOwnRow(const float (&x)[kRows]) const {
    float sum = x[0];
    if constexpr (kRows == 2) {
      const bool is_second = OwnRow() != 0;
      const float own = is_second ? x[1] : x[0], other = is_second ? x[0] : x[1];
      sum = own + __shfl_xor_sync(kAllLanes, other, kRowLanes);
    }
#pragma unroll
    for (int distance = kRowLanes / 2; distance >= kClassLanes; distance /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, distance);
    }
    return sum;
  }

  // Of the lane's row, less the one of its label; its loss is added. Zeros if it has no label.
  __device__ __forceinline__ void Softmax(int label, float (&logits)[kLaneClasses]) {
    const float least = __uint_as_float(0xff800000u);  // in place of those that are no classes
    float largest = least, sum = 0;
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) {
      if (i * kClassLanes + OwnClass() >= kClasses) logits[i] = least;
      largest = fmaxf(largest, logits[i]);
    }
#pragma unroll
    for (int distance = kClassLanes / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    // The lane that has the label adds the loss: NaN, unless the label is a class.
    const bool is_class = label >= 0 && label < kClasses;
    float chosen = __uint_as_float(0x7fffffffu);
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) {
      if (label == i * kClassLanes + OwnClass() && is_class) chosen = logits[i];
      logits[i] = expf(logits[i] - largest);
      sum += logits[i];
    }
    sum = SumOverLanes(sum, kClassLanes);
    const bool adds = IsFirst() && (is_class ? label : 0) % kClassLanes == OwnClass();
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) {
      const float one = label == i * kClassLanes + OwnClass() ? 1.f : 0.f;
      logits[i] = label == -1 ? 0.f : logits[i] / sum - one;
    }
    if (label != -1) sums_.Add(logits, adds, largest + logf(sum) - chosen);
  }

  // By the states of leaves. The warp's gradients by logits lie in shared memory, rows side by
  // side.
  __device__ __forceinline__ void GradientsOfLeaves(const GraphLossProblem& p, int first, int rows,
                                                    const float (&of_logits)[kLaneClasses]) const {
    constexpr int kUnits = 4;  // of a lane, side by side
    __syncwarp();              // all lanes are done with what was there
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) {
      const int c = i * kClassLanes + OwnClass();
      if (c < kClasses && IsFirst()) received_[c * kTileRows + OwnRow()] = of_logits[i];
    }
    __syncwarp();
    const auto* weights = reinterpret_cast<const State*>(weights_);
#pragma unroll
    for (int unit = lane_ * kUnits; unit < kSizes.hidden; unit += kUnits * kWarp) {
      float sums[kRows][kUnits] = {};
#pragma unroll kUnrolled
      for (int c = 0; c < kClasses; ++c) {
        float w[kUnits], g[4];
        WeightsAt(weights + c * kSizes.hidden + unit, w);
        RowsAt(c * kTileRows, g);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int n = 0; n < kUnits; ++n) sums[r][n] = fmaf(g[r], w[n], sums[r][n]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float* to = p.of_leaves + int64_t{first + r} * kSizes.hidden + unit;
        const float (&of)[kUnits] = sums[r];
        if (r < rows) {
          *reinterpret_cast<Words4*>(to) = {__float_as_uint(of[0]), __float_as_uint(of[1]),
                                            __float_as_uint(of[2]), __float_as_uint(of[3])};
        }
      }
    }
  }

  // Of four units side by side.
  __device__ __forceinline__ static void WeightsAt(const State* from, float (&w)[4]) {
    if constexpr (sizeof(State) == 2) {
      const Words2 pairs = *reinterpret_cast<const Words2*>(from);
      w[0] = ToAccumulator(State{static_cast<uint16_t>(pairs.x)});
      w[1] = ToAccumulator(State{static_cast<uint16_t>(pairs.x >> 16)});
      w[2] = ToAccumulator(State{static_cast<uint16_t>(pairs.y)});
      w[3] = ToAccumulator(State{static_cast<uint16_t>(pairs.y >> 16)});
    } else {
      NumbersOf(0.f, *reinterpret_cast<const Words4*>(from), w);
    }
  }
  // Four rows' gradients by a logit.
  __device__ __forceinline__ void RowsAt(int place, float (&g)[4]) const {
    NumbersOf(0.f, *reinterpret_cast<const Words4*>(received_ + place), g);
  }

  // By the states of a tile's rows from the first one on, of the block's own units.
  __device__ __forceinline__ void GradientsOf(const GraphLossProblem& p, int first) {
    __syncwarp();  // all lanes are done with what was there
    const float* of_logits = p.of_logits + int64_t{p.gather.leaves + first} * kClasses;
    ReceiveGradients(reinterpret_cast<const uint32_t*>(of_logits));
    __syncwarp();
    const auto* weights = reinterpret_cast<const State*>(weights_);
    const int first_unit = BlockOfScan<Plan>() * kSizes.units;
#pragma unroll
    for (int i = lane_; i < kTileRows / 4 * kSizes.units; i += kWarp) {
      const int row = i / kSizes.units * 4, unit = first_unit + i % kSizes.units;
      if (unit >= kSizes.hidden) continue;
      float sums[4] = {};
#pragma unroll kUnrolled
      for (int c = 0; c < kClasses; ++c) {
        const float w = ToAccumulator(weights[c * kSizes.hidden + unit]);
        float g[4];
        RowsAt(c * kTileRows + row, g);
#pragma unroll
        for (int r = 0; r < 4; ++r) sums[r] = fmaf(g[r], w, sums[r]);
      }
      float* to = p.of_states + int64_t{first + row} * kSizes.hidden + unit;
#pragma unroll
      for (int r = 0; r < 4; ++r) to[r * kSizes.hidden] = sums[r];
    }
  }

  // Waits for a tile's gradients by logits, several words of a lane at once. What comes too late
  // is NaN.
  __device__ __forceinline__ void ReceiveGradients(const uint32_t* from) {
    constexpr int kCount = kTileRows * kClasses, kMost = 4;
    constexpr int kTogether = kCount <= (kMost - 1) * kWarp ? (kCount + kWarp - 1) / kWarp : kMost;
#pragma unroll 1
    for (int at = lane_; at - lane_ < kCount; at += kTogether * kWarp) {
      uint32_t words[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        words[j] = 0;
        if (at + j * kWarp < kCount) words[j] = LoadRelaxed(from + at + j * kWarp);
      }
      watchdog_.Begin();
      for (;;) {
        bool missing = false;
#pragma unroll
        for (int j = 0; j < kTogether; ++j) missing |= !IsWritten(words[j]);
        if (!__any_sync(kAllLanes, missing)) break;
        if (__any_sync(kAllLanes, watchdog_.TimesOut())) break;
        Sleep(kPollNanoseconds);
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          if (!IsWritten(words[j])) words[j] = LoadRelaxed(from + at + j * kWarp);
        }
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int i = at + j * kWarp;
        if (i >= kCount) continue;
        received_[i % kClasses * kTileRows + i / kClasses] = __uint_as_float(words[j]);
      }
    }
  }

  const int warp_;
  int lane_;
  Words4* const weights_;
  float* const bias_;
  float* const received_;  // (class, row of a tile)
  LossSums<Plan, Loss> sums_;
  Watchdog watchdog_;
  volatile uint32_t* const stop_;
};

}  // namespace jaxsparse
