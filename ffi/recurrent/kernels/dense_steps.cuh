// What blocks of dense recurrent scans do beside products: pointwise warps sum the product warps'
// parts in a fixed order, make the pointwise step and publish the new state. A named barrier a step
// joins the two; product warps only arrive at it and go on to wait for the next state.
#pragma once

#include "persistent/delay.cuh"
#include "persistent/exchange.cuh"
#include "recurrent/arrays.cuh"
#include "recurrent/kernels/dense_shape.cuh"

namespace jaxsparse {

// Buffers and barriers alternate between steps. Two are enough: a block that has received part of a
// state knows that every block had received all of the state before it.
__device__ __forceinline__ int BarrierOf(int64_t step) { return 1 + static_cast<int>(step & 1); }

// What a product warp does when its part of a step's products is there, or missing. A warp that
// timed out waits for the pointwise warps: no data from other blocks keep it from running ahead of
// them. With barriers between blocks all product warps wait, since tools that look for races don't
// know arrivals.
template <typename Plan>
__device__ __forceinline__ void HandOver(int64_t step, bool timed_out) {
  constexpr int kThreads = Plan::kSizes.threads;
  if (Plan::kBarrier || timed_out) {
    WaitAt<kThreads>(BarrierOf(step));
  } else {
    ArriveAt<kThreads>(BarrierOf(step));
  }
}

template <typename Plan>
__device__ __forceinline__ const typename Plan::State* SlotBefore(const RecurrentScanProblem& p,
                                                                  int64_t step, int64_t slot) {
  return static_cast<const typename Plan::State*>(ExchangeOf<Plan>(p)) +
         (IsReversed<Plan>(p) ? p.steps - step : step - 1) * slot;
}

// The items (unit, batch entry) of one thread: inputs a step ahead, carries in registers.
template <typename Step, typename Plan>
class PointwiseStep {
  static constexpr auto kSizes = Plan::kSizes;
  using State = typename Plan::State;
  static constexpr bool kPairs = sizeof(State) == 2;  // two units make a word
  static constexpr int kAllItems = kSizes.units * kSizes.batch_slots;
  static constexpr int kItems =
      (kAllItems + kSizes.pointwise_threads - 1) / kSizes.pointwise_threads;
  using Arrays = ScanArrays<Step, Plan>;
  static_assert(!kPairs || kSizes.units % 2 == 0);

 public:
  __device__ __forceinline__ explicit PointwiseStep(const RecurrentScanProblem& p)
      : thread_(threadIdx.x - kSizes.product_threads) {
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const Item item = At(n);
      if (item.real) Arrays::LoadCarry(p, item.b, item.unit, carry_[n]);
    }
    LoadInputs(p, 0);
  }

  __device__ __forceinline__ void Run(const RecurrentScanProblem& p, int64_t step,
                                      const float* partials, bool stopped) {
    const int64_t t = Arrays::TimeOf(p, step);
    float states[kItems][Step::kStates], outputs[kItems][Arrays::kOutputSlots];
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const Item item = At(n);
      float product[kSizes.gate_slots] = {}, input[Arrays::kInputSlots];
#pragma unroll
      for (int warp = 0; warp < kSizes.warps; ++warp) {
        const float* part = partials + warp * kSizes.warp_part + item.partial;
        if constexpr (kSizes.rotated) {
          const float4 v = *reinterpret_cast<const float4*>(part);
          product[0] += v.x;
          product[1] += v.y;
          product[2] += v.z;
          product[3] += v.w;
        } else {
#pragma unroll
          for (int g = 0; g < Step::kProducts; ++g) product[g] += part[g];
        }
      }
      if constexpr (kSizes.rotated) {
        RotateIf<1>(item.b / 2 % 2 != 0, product);
        RotateIf<2>(item.b / 4 % 2 != 0, product);
      }
      Arrays::ConvertInputs(input_[n], input);
      Step::Apply(product, carry_[n], input, states[n], outputs[n]);
      if (stopped) {
#pragma unroll
        for (int s = 0; s < Step::kStates; ++s) states[n][s] = __uint_as_float(0x7fffffffu);
#pragma unroll
        for (int o = 0; o < Step::kOutputs; ++o) outputs[n][o] = __uint_as_float(0x7fffffffu);
#pragma unroll
        for (int c = 0; c < Step::kCarries; ++c) carry_[n][c] = __uint_as_float(0x7fffffffu);
      }
      // Nothing is published that doesn't stem from all of the last state: two buffers are enough
      // only as long as that holds. The other blocks time out by themselves.
      Publish(p, t, item, states[n], stopped);
    }
    // What no warp waits for comes after what all wait for.
    if (step + 1 < p.steps) LoadInputs(p, step + 1);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const Item item = At(n);
      if (!item.real) continue;
      Arrays::StoreResults(p, t, item.b, item.unit, states[n], outputs[n]);
    }
    if (Plan::kPrefetch && step + kStepsAhead < p.steps) {
      PrefetchSlot(p, Arrays::TimeOf(p, step + kStepsAhead));
    }
  }

  __device__ __forceinline__ void Finish(const RecurrentScanProblem& p) {
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const Item item = At(n);
      if (item.real) Arrays::StoreCarry(p, item.b, item.unit, carry_[n]);
    }
  }

 private:
  struct Item {
    int unit, b;     // of the layer, of the batch
    int partial;     // where the products' parts lie
    bool real;       // else padding
    bool published;  // padding too, up to whole sectors
  };

  template <int kBy>
  __device__ __forceinline__ static void RotateIf(bool wanted, float (&v)[4]) {
    const float old[4] = {v[0], v[1], v[2], v[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = wanted ? old[(i + kBy) % 4] : old[i];
  }

  // In the order of the exchange buffer, so that a warp publishes whole cache lines.
  __device__ __forceinline__ Item At(int n) const {
    constexpr int kTogether = kSizes.units % kSizes.states_per_load == 0 ? kSizes.states_per_load
                              : kPairs                                   ? 2
                                                                         : 1;
    constexpr int kBatch = kSizes.batch_slots;
    const int index = n * kSizes.pointwise_threads + thread_;
    const int unit = index / (kTogether * kBatch) * kTogether + index % kTogether;
    Item item;
    item.unit = BlockOfScan<Plan>() * kSizes.units + unit;
    item.b = index / kTogether % kBatch;
    const bool exists = index < kAllItems && item.b < kSizes.batch;
    item.real = exists && item.unit < kSizes.hidden;
    item.published = index < kAllItems && item.b < kSizes.exchange_batch && item.unit < kSizes.part;
    item.partial = exists ? item.b * kSizes.row_slots + unit * kSizes.gate_slots : 0;
    return item;
  }

  __device__ __forceinline__ void Publish(const RecurrentScanProblem& p, int64_t t, Item item,
                                          const float* states, bool stopped) {
    State* slot = static_cast<State*>(ExchangeOf<Plan>(p)) + t * kSizes.slot;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) {
      const float state = item.real ? states[s] : 0.f;
      uint32_t* to =
          reinterpret_cast<uint32_t*>(slot + SlotOffset<Plan>(item.b, s * kSizes.part + item.unit));
      if constexpr (kPairs) {
        const float next = __shfl_xor_sync(kAllLanes, state, 1);
        if (item.published && !stopped && thread_ % 2 == 0) {
          StoreRelaxed(to, ToWord<State>(state, next));
        }
      } else {
        if (item.published && !stopped) StoreRelaxed(to, ToWord(state));
      }
    }
  }

  // A long scan's exchange buffer does not stay in the L2 cache from when it was cleared.
  __device__ __forceinline__ void PrefetchSlot(const RecurrentScanProblem& p, int64_t t) const {
    const State* slot = static_cast<const State*>(ExchangeOf<Plan>(p)) + t * kSizes.slot;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const Item item = At(n);
      if (!item.published) continue;
#pragma unroll
      for (int s = 0; s < Step::kStates; ++s) {
        const State* at = slot + SlotOffset<Plan>(item.b, s * kSizes.part + item.unit);
        PrefetchToL2(at);
      }
    }
  }

  __device__ __forceinline__ void LoadInputs(const RecurrentScanProblem& p, int64_t step) {
    if (Step::kInputs == 0) return;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const Item item = At(n);
      if (!item.real) continue;
      Arrays::LoadInputs(p, Arrays::TimeOf(p, step), item.b, item.unit, input_[n]);
      if (step + kStepsAhead < p.steps) {
        Arrays::PrefetchInputs(p, Arrays::TimeOf(p, step + kStepsAhead), item.b, item.unit);
      }
    }
  }

  const int thread_;
  float carry_[kItems][Arrays::kCarrySlots] = {};
  uint32_t input_[kItems][Arrays::kInputSlots] = {};
};

template <typename Step, typename Plan>
__device__ __forceinline__ void MakeSteps(const RecurrentScanProblem& p, const float* partials,
                                          volatile const uint32_t* stop) {
  constexpr auto kSizes = Plan::kSizes;
  PointwiseStep<Step, Plan> pointwise(p);
  bool stopped = false;
  for (int64_t step = 0; step < p.steps; ++step) {
    WaitAt<kSizes.threads>(BarrierOf(step));
    stopped = stopped || __any_sync(kAllLanes, *stop != 0);
    Delay<Plan::kMostDelay>(step);
    pointwise.Run(p, step, partials + (step & 1) * kSizes.partials, stopped);
    if (Plan::kBarrier && step + 1 < p.steps) {
      WaitAt<kSizes.threads>(kAllThreads);
      WaitAt<kSizes.threads>(kAllThreads);
    }
  }
  pointwise.Finish(p);
}

}  // namespace jaxsparse
