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
  static constexpr int kLaneSums = (kSums + kWarp - 1) / kWarp;
  static constexpr int kParts = Plan::kScans * Plan::kBlocks * kLoss.head_warps;

 public:
  static constexpr int kLaneClasses = (kClasses + kWarp - 1) / kWarp;

  // Adds a row that has a label. Each lane has the gradient by some of its logits.
  __device__ __forceinline__ void Add(const float (&of_logits)[kLaneClasses], float loss) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kLaneSums; ++i) {
      const int at = i * kWarp + lane;
      float value = at == kClasses ? loss : 1.f;
      if (i < kLaneClasses && at < kClasses) value = of_logits[i < kLaneClasses ? i : 0];
      sums_[i] += value;
    }
  }

  // By a warp of those that make heads, with that number in its block.
  __device__ __forceinline__ void Publish(const GraphLossProblem& p, int warp) const {
    const int part = static_cast<int>(blockIdx.x) * kLoss.head_warps + warp;
#pragma unroll
    for (int i = 0; i < kLaneSums; ++i) {
      const int at = i * kWarp + static_cast<int>(threadIdx.x % kWarp);
      if (at < kSums) StoreRelaxed(p.parts + at * kParts + part, ToWord(sums_[i]));
    }
  }

  // By the first kThreads threads of a block. What comes too late is NaN.
  template <int kThreads>
  __device__ __forceinline__ static void AddParts(const GraphLossProblem& p) {
    constexpr int kTogether = 16;  // loads of a lane that are on their way at once
    const int lane = threadIdx.x % kWarp;
    Watchdog watchdog(p.gather.wait_limits);
#pragma unroll 1
    for (int at = threadIdx.x / kWarp; at < kSums; at += kThreads / kWarp) {
      const uint32_t* const parts = p.parts + at * kParts;
      float sum = 0;
#pragma unroll 1
      for (int first = lane; first - lane < kParts; first += kTogether * kWarp) {
        uint32_t words[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int part = first + i * kWarp;
          words[i] = part < kParts ? LoadRelaxed(parts + part) : 0;
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const int part = first + i * kWarp;
          watchdog.Begin();
          while (__any_sync(kAllLanes, !IsWritten(words[i]))) {
            if (__any_sync(kAllLanes, watchdog.TimesOut())) break;
            if (part < kParts) words[i] = LoadRelaxed(parts + part);
          }
          sum += __uint_as_float(words[i]);
        }
      }
      sum = SumOverLanes(sum, kWarp);
      float* const to = at < kClasses ? p.of_bias + at : p.totals + (at - kClasses);
      if (lane == 0) *to = sum;
    }
  }

 private:
  float sums_[kLaneSums] = {};
};

}  // namespace jaxsparse
