// What heads add up over all rows: the gradient by the head's bias, the sum of losses, and how many
// rows have labels. Each warp that makes heads adds up its own rows and publishes that; one block
// adds those of all warps, in their order, when it has nothing else to do.
#pragma once

#include "dynamic/kernels/loss_sizes.h"
#include "dynamic/loss_problem.h"
#include "persistent/exchange.cuh"

namespace jaxsparse {

// Plan: of either pass. Loss::kSizes: what a block has.
template <typename Plan, typename Loss>
class LossSums {
  static constexpr LossSizes kLoss = Loss::kSizes;
  static constexpr int kClasses = kLoss.classes, kSums = kClasses + kLossTotals;
  static constexpr int kClassLanes = kLoss.class_lanes, kLaneClasses = kLoss.lane_classes;
  static constexpr int kRowLanes = kWarp / kLoss.rows;
  static constexpr int kParts = Plan::kScans * Plan::kBlocks * kLoss.head_warps;

 public:
  // Adds a row that has a label. Each of its lanes has the gradient by some of its logits, and one
  // of them adds the loss.
  __device__ __forceinline__ void Add(const float (&of_logits)[kLaneClasses], bool adds_loss,
                                      float loss) {
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) of_logits_[i] += of_logits[i];
    if (!adds_loss) return;
    loss_ += loss;
    rows_ += 1;
  }

  // By a warp of those that make heads, with that number in its block.
  __device__ __forceinline__ void Publish(const GraphLossProblem& p, int warp) const {
    KeepInRegister(warp);  // so that the place of its part takes no register before
    const int part = static_cast<int>(blockIdx.x) * kLoss.head_warps + warp;
    const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
    for (int i = 0; i < kLaneClasses; ++i) {
      float sum = of_logits_[i];  // of one row's lanes of several
#pragma unroll
      for (int distance = kWarp / 2; distance >= kRowLanes; distance /= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, distance);
      }
      const int at = i * kClassLanes + lane;
      if (lane < kClassLanes && at < kClasses) {
        StoreRelaxed(p.parts + at * kParts + part, ToWord(sum));
      }
    }
    const float loss = SumOverLanes(loss_, kWarp), rows = SumOverLanes(rows_, kWarp);
    if (lane < kLossTotals) {
      StoreRelaxed(p.parts + (kClasses + lane) * kParts + part, ToWord(lane == 0 ? loss : rows));
    }
  }

  // By the first kThreads threads of a block. What comes too late is NaN.
  template <int kThreads>
  __device__ __forceinline__ static void AddParts(const GraphLossProblem& p) {
    static_assert(kParts % 4 == 0);  // warps that make heads are whole quarters of a block
    constexpr int kLoads = (kParts / 4 + kWarp - 1) / kWarp;  // of a lane
    const int lane = threadIdx.x % kWarp;
    Watchdog watchdog(p.gather.wait_limits);
    WaitForPrologue();  // it fills parts, and a team without tiles comes here at once
#pragma unroll 1
    for (int at = threadIdx.x / kWarp; at < kSums; at += kThreads / kWarp) {
      const auto* const parts = reinterpret_cast<const Words4*>(p.parts + at * kParts);
      Words4 x[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int own = j * kWarp + lane;
        x[j] = {0, 0, 0, 0};
        LoadRelaxedIf(own < kParts / 4, parts + own, &x[j]);
      }
      Await<kLoads>(x, [&](int j) { return parts + j * kWarp + lane; }, &watchdog);
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        sum += (__uint_as_float(x[j].x) + __uint_as_float(x[j].y)) +
               (__uint_as_float(x[j].z) + __uint_as_float(x[j].w));
      }
      sum = SumOverLanes(sum, kWarp);
      float* const to = at < kClasses ? p.of_bias + at : p.totals + (at - kClasses);
      if (lane == 0) *to = sum;
    }
  }

 private:
  float of_logits_[kLaneClasses] = {};  // of the lane's row and classes
  float loss_ = 0, rows_ = 0;
};

}  // namespace jaxsparse
