// What blocks of dense recurrent scans do beside products: pointwise warps sum the product warps'
// parts in a fixed order, make the pointwise step and publish the new state. A named barrier a step
// joins the two; product warps only arrive at it and go on to wait for the next state.
#pragma once

#include "persistent/backoff.cuh"
#include "persistent/delay.cuh"
#include "persistent/exchange.cuh"
#include "persistent/grid_barrier.cuh"
#include "recurrent/arrays.cuh"
#include "recurrent/kernels/dense_shape.cuh"

namespace jaxsparse {

// Buffers and barriers alternate between steps. Two are enough: a block that has received part of a
// state knows that every block had received all of the state before it.
__device__ __forceinline__ int BarrierOf(int64_t step) { return 1 + static_cast<int>(step & 1); }

// What a product warp does before it asks for the state of a step.
template <typename Plan>
__device__ __forceinline__ void BeginStep(const RecurrentScanProblem& p, int64_t step,
                                          const Backoff& backoff, Watchdog* watchdog) {
  constexpr int kThreads = Plan::kSizes.threads;
  if constexpr (Plan::kBarrier) {
    WaitAt<kThreads>(kAllThreads);
    if (threadIdx.x == 0) MeetOtherBlocks<Plan::kBlocks>(ArrivalsOf<Plan>(p), step, watchdog);
    WaitAt<kThreads>(kAllThreads);
  } else {
    backoff.Wait();
  }
  Delay<Plan::kMostDelay>(step);
}

// What it does when its part of the step's products is there, or missing. A warp that timed out
// waits for the pointwise warps: no data from other blocks keep it from running ahead of them. With
// barriers between blocks all product warps wait, since tools that look for races don't know
// arrivals.
template <typename Plan>
__device__ __forceinline__ void HandOver(int64_t step, bool timed_out, volatile uint32_t* stop,
                                         Backoff* backoff, Watchdog* watchdog) {
  constexpr int kThreads = Plan::kSizes.threads;
  if (timed_out) *stop = 1;
  __syncwarp();
  if (Plan::kBarrier || timed_out) {
    WaitAt<kThreads>(BarrierOf(step));
  } else {
    ArriveAt<kThreads>(BarrierOf(step));
  }
  backoff->Start();
  backoff->Adapt(watchdog->TakeHasWaited());
}

// The product warps meet. With barriers between blocks the pointwise warps come, too, as often as
// the plan's sizes say, since tools that look for races don't know meetings of some of the warps.
template <typename Plan>
__device__ __forceinline__ void MeetOtherProductWarps() {
  constexpr int kProductWarps = 3;  // a barrier beside those of steps
  if constexpr (Plan::kBarrier) {
    WaitAt<Plan::kSizes.threads>(kAllThreads);
  } else {
    WaitAt<Plan::kSizes.product_threads>(kProductWarps);
  }
}

// Where the exchange buffer has the state before a step. A wave's has the last one, too.
template <typename Plan>
__device__ __forceinline__ typename Plan::State* SlotOf(const RecurrentScanProblem& p,
                                                        int64_t step) {
  return static_cast<typename Plan::State*>(ExchangeOf<Plan>(p)) + step * Plan::kSizes.slot;
}

// What comes to the products of a step beside those of matrices: nothing, in a scan. In a wave it
// is AddedByLayers (wave_added.cuh).
struct NothingAdded {
  __device__ __forceinline__ void Ask(int64_t, int, bool, int, int) {}
  template <typename PlaceOf>
  __device__ __forceinline__ bool Await(int64_t, PlaceOf) {
    return true;
  }
  template <typename Products>
  __device__ __forceinline__ void AddTo(int64_t, int, int, int, Products&) const {}
};

// The items (unit, batch entry) of one thread, in groups of kNear units: inputs a step ahead,
// carries in registers.
template <typename Step, typename Plan, typename Added>
class PointwiseStep {
  static constexpr auto kSizes = Plan::kSizes;
  using State = typename Plan::State;
  static constexpr bool kPairs = sizeof(State) == 2;  // two units make a word
  static constexpr int kNear = kSizes.near;
  static constexpr int kGroups = kSizes.items / kNear;
  static constexpr int kProductSlots =
      Step::kProducts > kSizes.gate_slots ? Step::kProducts : kSizes.gate_slots;
  static constexpr bool kPublishesLast = Plan::kLayers > 1;  // to the layer above
  using Arrays = ScanArrays<Step, Plan, kNear>;
  static_assert(!kPairs || kSizes.units % 2 == 0);

 public:
  __device__ __forceinline__ PointwiseStep(const RecurrentScanProblem& p, const Added& added)
      : thread_(threadIdx.x - kSizes.product_threads), added_(added) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const Group group = At(n);
      float states[kNear][Step::kStates] = {};
#pragma unroll
      for (int i = 0; i < kNear; ++i) {
        if (!group.real) continue;
        Arrays::LoadCarry(p, group.b, group.unit + i, carry_[n][i]);
        Arrays::LoadState(p, group.b, group.unit + i, states[i]);
      }
      Publish(p, 0, group, true, states);
    }
    LoadInputs(p, 0);
  }

  // Waits for what is added to the products of a step. False if the warp timed out.
  __device__ __forceinline__ bool Await(int64_t step) {
    return added_.Await(step, [&](int n) { return At(n); });
  }

  __device__ __forceinline__ void Run(const RecurrentScanProblem& p, int64_t step,
                                      const float* partials, bool stopped) {
    const int64_t t = Arrays::TimeOf(p, step);
    // Nothing is published that doesn't stem from all of the last state: two buffers are enough
    // only as long as that holds. The other blocks time out by themselves.
    const bool publishes = !stopped && (kPublishesLast || step + 1 < p.steps);
    float states[kGroups][kNear][Step::kStates], outputs[kGroups][kNear][Arrays::kOutputSlots];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const Group group = At(n);
      float sums[kNear][kSizes.gate_slots] = {}, products[kNear][kProductSlots] = {};
      SumProducts(partials + group.partial, sums);
#pragma unroll
      for (int i = 0; i < kNear; ++i) {
        if constexpr (kSizes.rotated) {
          RotateIf<1>(group.b / 2 % 2 != 0, sums[i]);
          RotateIf<2>(group.b / 4 % 2 != 0, sums[i]);
        }
#pragma unroll
        for (int g = 0; g < kSizes.products; ++g) products[i][g] = sums[i][g];
      }
      added_.AddTo(step, n, group.b, group.unit, products);
#pragma unroll
      for (int i = 0; i < kNear; ++i) {
        float input[Arrays::kInputSlots];
        Arrays::ConvertInputs(input_[n], i, input);
        Step::Apply(products[i], carry_[n][i], input, states[n][i], outputs[n][i]);
        if (stopped) {
#pragma unroll
          for (int s = 0; s < Step::kStates; ++s) states[n][i][s] = __uint_as_float(0x7fffffffu);
#pragma unroll
          for (int o = 0; o < Step::kOutputs; ++o) outputs[n][i][o] = __uint_as_float(0x7fffffffu);
#pragma unroll
          for (int c = 0; c < Step::kCarries; ++c) carry_[n][i][c] = __uint_as_float(0x7fffffffu);
        }
      }
      Publish(p, step + 1, group, publishes, states[n]);
    }
    // What no warp waits for comes after what all wait for.
    if (step + 1 < p.steps) LoadInputs(p, step + 1);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const Group group = At(n);
      if (!group.real) continue;
      Arrays::StoreResults(p, t, group.b, group.unit, states[n], outputs[n]);
    }
    if (Plan::kPrefetch && step + kStepsAhead < p.steps) {
      PrefetchSlot(p, step + kStepsAhead);
    }
  }

  __device__ __forceinline__ void Finish(const RecurrentScanProblem& p) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const Group group = At(n);
#pragma unroll
      for (int i = 0; i < kNear; ++i) {
        if (group.real) Arrays::StoreCarry(p, group.b, group.unit + i, carry_[n][i]);
      }
    }
  }

 private:
  struct Group {
    int unit, b;     // the first one of the layer, of the batch
    int partial;     // where the products' parts lie
    bool real;       // else padding
    bool published;  // padding too, up to whole sectors
  };

  // Adds the parts of all warps, in their order.
  __device__ __forceinline__ static void SumProducts(const float* partials,
                                                     float (&products)[kNear][kSizes.gate_slots]) {
#pragma unroll
    for (int warp = 0; warp < kSizes.parts; ++warp) {
      const float* part = partials + warp * kSizes.warp_part;
      if constexpr (kSizes.gate_slots % 4 == 0 || kSizes.gate_slots * kNear % 4 == 0) {
        float* to = &products[0][0];
#pragma unroll
        for (int i = 0; i < kNear * kSizes.gate_slots; i += 4) {
          const float4 v = *reinterpret_cast<const float4*>(part + i);
          to[i] += v.x;
          to[i + 1] += v.y;
          to[i + 2] += v.z;
          to[i + 3] += v.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kNear; ++i) {
#pragma unroll
          for (int g = 0; g < kSizes.products; ++g) {
            products[i][g] += part[i * kSizes.gate_slots + g];
          }
        }
      }
    }
  }

  template <int kBy>
  __device__ __forceinline__ static void RotateIf(bool wanted, float (&v)[4]) {
    const float old[4] = {v[0], v[1], v[2], v[3]};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = wanted ? old[(i + kBy) % 4] : old[i];
  }

  // In the order of the exchange buffer, so that a warp publishes whole cache lines, or several
  // pieces of 64 bytes or more, from groups of units side by side.
  __device__ __forceinline__ Group At(int n) const {
    constexpr int kTogether = kSizes.units % kSizes.states_per_load == 0 ? kSizes.states_per_load
                              : kPairs                                   ? 2
                                                                         : 1;
    constexpr int kBatch = kSizes.batch_slots, kAllItems = kSizes.units * kBatch;
    constexpr int kRun = kSizes.entries_beside, kBeside = kSizes.groups_beside;
    static_assert(kSizes.has_whole_groups);
    const int index = (n * kSizes.pointwise_threads + thread_) * kNear;
    const int run = index / (kTogether * kRun), runs = run / kBeside;
    const int of_units = runs / (kBatch / kRun) * kBeside + run % kBeside;
    const int unit = of_units * kTogether + index % kTogether;
    Group group;
    group.unit = BlockOfScan<Plan>() * kSizes.units + unit;
    group.b = runs % (kBatch / kRun) * kRun + index / kTogether % kRun;
    const bool exists = index < kAllItems && group.b < kSizes.batch;
    group.real = exists && group.unit < kSizes.hidden;
    group.published =
        index < kAllItems && group.b < kSizes.exchange_batch && group.unit < kSizes.part;
    group.partial = exists ? group.b * kSizes.row_slots + unit * kSizes.gate_slots : 0;
    return group;
  }

  // The state before a step.
  __device__ __forceinline__ void Publish(const RecurrentScanProblem& p, int64_t step, Group group,
                                          bool publishes,
                                          const float (&states)[kNear][Step::kStates]) {
    State* slot = SlotOf<Plan>(p, step);
    const bool wanted = group.published && publishes;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) {
      auto* to = reinterpret_cast<uint32_t*>(
          slot + SlotOffset<Plan>(group.b, s * kSizes.part + group.unit));
      if constexpr (kNear > 1) {
        uint32_t words[kNear / 2];
#pragma unroll
        for (int i = 0; i < kNear / 2; ++i) {
          words[i] = group.real ? ToWord<State>(states[2 * i][s], states[2 * i + 1][s]) : 0;
        }
        if (wanted) StoreRelaxed(to, words);
      } else {
        const float state = group.real ? states[0][s] : 0.f;
        if constexpr (kPairs) {
          const float next = __shfl_xor_sync(kAllLanes, state, 1);
          if (wanted && thread_ % 2 == 0) StoreRelaxed(to, ToWord<State>(state, next));
        } else {
          if (wanted) StoreRelaxed(to, ToWord(state));
        }
      }
    }
  }

  // A long scan's exchange buffer does not stay in the L2 cache from when it was cleared.
  __device__ __forceinline__ void PrefetchSlot(const RecurrentScanProblem& p, int64_t step) const {
    const State* slot = SlotOf<Plan>(p, step);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const Group group = At(n);
      if (!group.published) continue;
#pragma unroll
      for (int s = 0; s < Step::kStates; ++s) {
        const State* at = slot + SlotOffset<Plan>(group.b, s * kSizes.part + group.unit);
        PrefetchToL2(at);
      }
    }
  }

  __device__ __forceinline__ void LoadInputs(const RecurrentScanProblem& p, int64_t step) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const Group group = At(n);
      added_.Ask(step, n, group.real, group.b, group.unit);
      if (Step::kInputs == 0 || !group.real) continue;
      Arrays::LoadInputs(p, Arrays::TimeOf(p, step), group.b, group.unit, input_[n], step > 0);
      if (step + kStepsAhead < p.steps) {
        Arrays::PrefetchInputs(p, Arrays::TimeOf(p, step + kStepsAhead), group.b, group.unit);
      }
    }
  }

  const int thread_;
  Added added_;
  float carry_[kGroups][kNear][Arrays::kCarrySlots] = {};
  uint32_t input_[kGroups][Arrays::kInputWords] = {};
};

template <typename Step, typename Plan, typename Added = NothingAdded>
__device__ __forceinline__ void MakeSteps(const RecurrentScanProblem& p, const float* partials,
                                          volatile uint32_t* stop, const Added& added = {}) {
  constexpr auto kSizes = Plan::kSizes;
  PointwiseStep<Step, Plan, Added> pointwise(p, added);
  bool stopped = false;
  if constexpr (Plan::kBarrier) {
    for (int i = 0; i < kSizes.first_meetings; ++i) WaitAt<kSizes.threads>(kAllThreads);
  }
  for (int64_t step = 0; step < p.steps; ++step) {
    if constexpr (Plan::kBarrier) {
      for (int i = 0; i < 2 + kSizes.meetings; ++i) WaitAt<kSizes.threads>(kAllThreads);
    }
    WaitAt<kSizes.threads>(BarrierOf(step));
    stopped = stopped || __any_sync(kAllLanes, *stop != 0);
    Delay<Plan::kMostDelay>(step);
    if (!stopped && !pointwise.Await(step)) {
      *stop = 1;  // for the block's other warps
      stopped = true;
    }
    pointwise.Run(p, step, partials + (step & 1) * kSizes.partials, stopped);
  }
  pointwise.Finish(p);
}

}  // namespace jaxsparse
