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
  static constexpr int kLaneClasses = LossSums<Plan, Loss>::kLaneClasses;
  static constexpr int kNumbers = kSizes.states_per_load;
  static constexpr int kColumns = kNumbers * kWarp;  // that a warp loads at once
  static constexpr int kLoads = (kSizes.hidden + kColumns - 1) / kColumns;
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
    for (int i = thread; i < kClasses * kSizes.hidden; i += kLoss.head_threads) {
      weights[i % kClasses * kSizes.hidden + i / kClasses] = from[i];
    }
    for (int i = thread; i < kClasses; i += kLoss.head_threads) bias_[i] = p.head_bias[i];
    MeetSome<Plan, kLoss.head_threads>(kMeeting);
  }

  __device__ __forceinline__ void Run(const GraphLossProblem& p) {
    WaitForPrologue();  // it fills gradients by logits, and parts of sums
    ClearUnused(p);
    Leaves(p);
    Tiles tiles(p.gather), behind(p.gather);
    for (int number = 0;; ++number) {
      const TeamTile tile = tiles.Next(p.gather);
      if (tile.exists) {
        MeetBeside<Plan>(p.gather, number);
        HeadsOf(p, tile, number);
      }
      if (number < kBehind) continue;
      const TeamTile done = behind.Next(p.gather);
      if (!done.exists) break;
      if ((number - kBehind) % kWarps == warp_) GradientsOf(p, done);
    }
    sums_.Publish(p, warp_);
    if (watchdog_.timed_out()) *stop_ = 1;
  }

 private:
  static constexpr int kFirstThread = kSizes.product_threads + kSizes.pointwise_threads;

  // Those of all rows that no team makes.
  __device__ __forceinline__ void ClearUnused(const GraphLossProblem& p) const {
    using Items = TeamItems<Plan, kLoss.head_threads>;
    const Items items(static_cast<int>(threadIdx.x) - kFirstThread);
    const UnusedRows unused = items.Unused(p.gather, Tiles::Used(p.gather));
    unused.Clear(p.of_logits + int64_t{p.gather.leaves} * kClasses, kClasses * sizeof(float));
  }

  __device__ __forceinline__ void Leaves(const GraphLossProblem& p) {
    const int64_t warp = int64_t{blockIdx.x} * kWarps + warp_;
    constexpr int64_t kEvery = Plan::kScans * Plan::kBlocks * kWarps;
    for (int64_t leaf = warp; leaf < p.gather.leaves; leaf += kEvery) {
      const auto* states = static_cast<const State*>(p.gather.leaf_states);
      float of_logits[kLaneClasses];
      Head(p, leaf, states + leaf * kSizes.hidden, of_logits);
      GradientOfLeaf(p, leaf, of_logits);
    }
  }

  // Those of the tile's rows that are this warp's.
  __device__ __forceinline__ void HeadsOf(const GraphLossProblem& p, const TeamTile& tile,
                                          int number) {
    Delay<Plan::kMostDelay>(number);
    for (int row = 0; row < kTileRows; ++row) {
      const int turn = number * kTileRows + row;
      if (turn % Plan::kBlocks != BlockOfScan<Plan>() || turn / Plan::kBlocks % kWarps != warp_) {
        continue;
      }
      const int64_t computed = int64_t{tile.number} * kTileRows + row;
      const auto* states = static_cast<const State*>(p.gather.states);
      float of_logits[kLaneClasses];
      Head(p, p.gather.leaves + computed, states + computed * kSizes.hidden, of_logits);
    }
  }

  // Adds the loss of a row, and publishes its gradient by the logits, of which each lane has some.
  __device__ __forceinline__ void Head(const GraphLossProblem& p, int64_t row, const State* state,
                                       float (&logits)[kLaneClasses]) {
    Words4 x[kLoads];
    LookFor(state, false, x);  // beside the label
    const int label = p.labels[row];
    if (label == -1) {
#pragma unroll
      for (int i = 0; i < kLaneClasses; ++i) logits[i] = 0;
      Publish(p, row, logits);
      return;
    }
    if (row >= p.gather.leaves) Await(state, x);
    const float least = __uint_as_float(0xff800000u);  // of lanes without a class
    float largest = least;
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) {
      logits[i] = least;
      const int end = kClasses - i * kWarp < kWarp ? kClasses - i * kWarp : kWarp;
      for (int c = 0; c < end; ++c) {
        const float logit = Logit(x, i * kWarp + c);
        if (lane_ == c) logits[i] = logit;
      }
      largest = fmaxf(largest, logits[i]);
    }
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    }
    float chosen = __uint_as_float(0x7fffffffu), sum = 0;  // NaN, unless the label is a class
    float powers[kLaneClasses];
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) {
      const float logit = __shfl_sync(kAllLanes, logits[i], static_cast<uint32_t>(label) % kWarp);
      if (label >= 0 && label < kClasses && label / kWarp == i) chosen = logit;
      powers[i] = expf(logits[i] - largest);
      sum += powers[i];
    }
    sum = SumOverLanes(sum, kWarp);
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) {
      logits[i] = powers[i] / sum - (label == i * kWarp + lane_ ? 1.f : 0.f);
    }
    Publish(p, row, logits);
    sums_.Add(logits, largest + logf(sum) - chosen);
  }

  // Loads a row's state, of which each lane takes columns, or again what was not written.
  __device__ __forceinline__ void LookFor(const State* state, bool again,
                                          Words4 (&x)[kLoads]) const {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int column = j * kColumns + lane_ * kNumbers;
      if (!again) x[j] = {0, 0, 0, 0};
      const bool asks = column < kSizes.hidden && (!again || !IsWritten(x[j]));
      LoadRelaxedIf(asks, reinterpret_cast<const Words4*>(state + column), &x[j]);
    }
  }

  // Waits for the state of a computed row. What comes too late is NaN. States of leaves are there,
  // and may be any words, those that stand for unwritten ones among them.
  __device__ __forceinline__ void Await(const State* state, Words4 (&x)[kLoads]) {
    watchdog_.Begin();
    for (;;) {
      bool missing = false;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) missing |= !IsWritten(x[j]);
      if (!__any_sync(kAllLanes, missing)) return;
      if (__any_sync(kAllLanes, watchdog_.TimesOut())) return;
      Sleep(kPollNanoseconds);
      LookFor(state, true, x);
    }
  }

  // In all lanes.
  __device__ __forceinline__ float Logit(const Words4 (&x)[kLoads], int c) const {
    const auto* weights = reinterpret_cast<const State*>(weights_) + c * kSizes.hidden;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int column = j * kColumns + lane_ * kNumbers;
      if (column >= kSizes.hidden) continue;
      float a[kNumbers], b[kNumbers];
      NumbersOf(State(), x[j], a);
      NumbersOf(State(), *reinterpret_cast<const Words4*>(weights + column), b);
#pragma unroll
      for (int n = 0; n < kNumbers; ++n) sum = fmaf(a[n], b[n], sum);
    }
    return SumOverLanes(sum, kWarp) + bias_[c];
  }

  __device__ __forceinline__ void Publish(const GraphLossProblem& p, int64_t row,
                                          const float (&of_logits)[kLaneClasses]) const {
    auto* to = reinterpret_cast<uint32_t*>(p.of_logits + row * kClasses);
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) {
      const int c = i * kWarp + lane_;
      if (c < kClasses) StoreRelaxed(to + c, ToWord(of_logits[i]));
    }
  }

  // By the state of a leaf.
  __device__ __forceinline__ void GradientOfLeaf(const GraphLossProblem& p, int64_t leaf,
                                                 const float (&of_logits)[kLaneClasses]) const {
    constexpr int kTogether = 8;  // units of a lane
    const auto* weights = reinterpret_cast<const State*>(weights_);
    for (int first = lane_; first - lane_ < kSizes.hidden; first += kTogether * kWarp) {
      float sums[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kLaneClasses; ++i) {
        const int end = kClasses - i * kWarp < kWarp ? kClasses - i * kWarp : kWarp;
        for (int c = 0; c < end; ++c) {
          const float of_logit = __shfl_sync(kAllLanes, of_logits[i], c);
          const State* row = weights + (i * kWarp + c) * kSizes.hidden;
#pragma unroll
          for (int n = 0; n < kTogether; ++n) {
            const int unit = first + n * kWarp;
            if (unit < kSizes.hidden) sums[n] = fmaf(of_logit, ToAccumulator(row[unit]), sums[n]);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kTogether; ++n) {
        const int unit = first + n * kWarp;
        if (unit < kSizes.hidden) p.of_leaves[leaf * kSizes.hidden + unit] = sums[n];
      }
    }
  }

  // By the states of a tile's rows, of the block's own units.
  __device__ __forceinline__ void GradientsOf(const GraphLossProblem& p, const TeamTile& tile) {
    const int64_t first = int64_t{tile.number} * kTileRows;
    const auto* from =
        reinterpret_cast<const uint32_t*>(p.of_logits + (p.gather.leaves + first) * kClasses);
    __syncwarp();  // all lanes are done with the last tile's
    for (int at = 0; at < kTileRows * kClasses; at += kWarp) {
      const int i = at + lane_;
      uint32_t word = 0;
      watchdog_.Begin();
      for (;;) {
        if (i < kTileRows * kClasses) word = LoadRelaxed(from + i);
        if (!__any_sync(kAllLanes, !IsWritten(word))) break;
        if (__any_sync(kAllLanes, watchdog_.TimesOut())) break;
        Sleep(kPollNanoseconds);
      }
      if (i < kTileRows * kClasses) received_[i] = __uint_as_float(word);
    }
    __syncwarp();
    const auto* weights = reinterpret_cast<const State*>(weights_);
    const int first_unit = BlockOfScan<Plan>() * kSizes.units;
    for (int i = lane_; i < kTileRows * kSizes.units; i += kWarp) {
      const int row = i / kSizes.units, unit = first_unit + i % kSizes.units;
      if (unit >= kSizes.hidden) continue;
      float sum = 0;
#pragma unroll 4
      for (int c = 0; c < kClasses; ++c) {
        sum = fmaf(received_[row * kClasses + c], ToAccumulator(weights[c * kSizes.hidden + unit]),
                   sum);
      }
      p.of_states[(first + row) * kSizes.hidden + unit] = sum;
    }
  }

  const int warp_, lane_;
  Words4* const weights_;
  float* const bias_;
  float* const received_;
  LossSums<Plan, Loss> sums_;
  Watchdog watchdog_;
  volatile uint32_t* const stop_;
};

}  // namespace jaxsparse
