// What blocks of a wave that exchange sums do beside products: pointwise warps receive the parts of
// their units' products, add them up in the order of the blocks, make the pointwise step and leave
// the states to the product warps. A named barrier a step joins the two; pointwise warps only
// arrive at it.
#pragma once

#include "recurrent/arrays.cuh"
#include "recurrent/kernels/wave_scatter.cuh"

namespace jaxsparse {

// Barriers alternate between steps: a warp that has all parts of a step knows that its own block's
// product warps have passed the barrier before the last one.
__device__ __forceinline__ int BarrierBefore(int64_t step) {
  return 1 + static_cast<int>(step & 1);
}

template <typename Step, typename Plan>
class ScatteredStep {
  static constexpr auto kSizes = Plan::kSizes;
  using State = typename Plan::State;
  static constexpr int kRounds = kSizes.rounds;
  static constexpr uint32_t kLowerHalf = 0xffff, kBothHalves = ~0u;  // of a word
  // A lane has two neighbouring units of a batch entry in each round, together if their number
  // divides that of the layer's.
  static constexpr int kNear = kSizes.hidden % 2 == 0 ? 2 : 1, kGroups = 2 / kNear;
  using Arrays = ScanArrays<Step, Plan, kNear>;

 public:
  using Sums = float[kRounds][2];  // of a lane's two units

  __device__ __forceinline__ ScatteredStep(const RecurrentWaveLayer& p, State* states)
      : p_(p), watchdog_(p.wait_limits) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const Place place = At(r);
      float state[2][Step::kStates] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!IsReal(place, i)) continue;
        Arrays::LoadCarry(p, place.b, place.unit + i, carry_[r][i]);
        Arrays::LoadState(p, place.b, place.unit + i, state[i]);
      }
      Leave(place, state, states);
    }
    LoadInputs(0);
  }

  // Adds what the blocks of a layer have sent for a step. False if the warp timed out.
  template <bool kBelow>
  __device__ __forceinline__ bool Receive(int64_t step, Sums& sums) {
    constexpr int kLoads = kSizes.mailbox_loads, kAll = kRounds * kLoads,
                  kAhead = kSizes.mailbox_ahead;
    const Words4* slot = MailboxSlot<Plan, kBelow>(p_, step);
    const uint32_t lap = LapOf<Plan, kBelow>(step);
#pragma unroll
    for (int first = 0; first < kAll; first += kAhead) {
      Words4 x[kAhead];
      const auto from = [&](int i) {
        const Place place = At((first + i) / kLoads);
        const Words4* of_first = slot + MailboxOffset<Plan>(place.tile, place.quarter, 0) +
                                 (threadIdx.x % 4 * 8 + threadIdx.x % kWarp / 4);
        return of_first + (first + i) % kLoads * 32;
      };
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        x[i] = {lap, 0, 0, 0};  // zeros that are there
        if (first + i >= kAll) continue;
        const int before = (first + i) % kLoads * 4;
        const bool sent = At((first + i) / kLoads).exists &&
                          (before + 4 <= kSizes.blocks ||
                           before + static_cast<int>(threadIdx.x % 4) < kSizes.blocks);
        if (sent) x[i].x ^= 1;
        LoadAtOnceIf(sent, from(i), &x[i]);
      }
      watchdog_.Begin();
      for (;;) {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) missing |= !IsOfLap(x[i], lap);
        if (!__any_sync(kAllLanes, missing)) break;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (first + i < kAll) LoadAtOnceIf(!IsOfLap(x[i], lap), from(i), &x[i]);
        }
        if (__any_sync(kAllLanes, watchdog_.TimesOut())) return false;
      }
      AddUp(x, first, sums);
    }
    return true;
  }
  __device__ __forceinline__ bool TakeHasWaited() { return watchdog_.TakeHasWaited(); }

  // Leaves the states after a step to the product warps. `publish` says that they are there.
  template <typename Publish>
  __device__ __forceinline__ void Run(int64_t step, Sums& sums, bool stopped, State* states,
                                      Publish publish) {
    float state[kRounds][2][Step::kStates], outputs[kRounds][2][Arrays::kOutputSlots];
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float product[1] = {sums[r][i]};
        float input[Arrays::kInputSlots];
        Arrays::ConvertInputs(input_[r][i / kNear], i % kNear, input);
        Step::Apply(product, carry_[r][i], input, state[r][i], outputs[r][i]);
        if (!stopped) continue;
#pragma unroll
        for (int s = 0; s < Step::kStates; ++s) state[r][i][s] = __uint_as_float(0x7fffffffu);
#pragma unroll
        for (int o = 0; o < Step::kOutputs; ++o) outputs[r][i][o] = __uint_as_float(0x7fffffffu);
#pragma unroll
        for (int c = 0; c < Step::kCarries; ++c) carry_[r][i][c] = __uint_as_float(0x7fffffffu);
      }
      Leave(At(r), state[r], states);
    }
    publish();
    // What no warp waits for comes after what all wait for.
    if (step + 1 < p_.steps) LoadInputs(step + 1);
    const int64_t t = Arrays::TimeOf(p_, step);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const Place place = At(r);
#pragma unroll
      for (int i = 0; i < 2; i += kNear) {
        if (!IsReal(place, i)) continue;
        Arrays::StoreResults(p_, t, place.b, place.unit + i, state[r] + i, outputs[r] + i);
      }
    }
  }

  __device__ __forceinline__ void Finish() {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const Place place = At(r);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (IsReal(place, i)) Arrays::StoreCarry(p_, place.b, place.unit + i, carry_[r][i]);
      }
    }
  }

 private:
  struct Place {
    int tile, quarter;  // of the layer's units, of the batch
    int b, unit;        // the first one of the lane's
    bool exists;        // whether there is such a part of the batch
  };

  __device__ __forceinline__ static Place At(int round) {
    const int lane = threadIdx.x % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp - kSizes.warps;
    const int portion = round * kSizes.pointwise_warps + warp;
    Place place;
    place.tile =
        static_cast<int>(BlockOfScan<Plan>()) * kSizes.unit_tiles + portion % kSizes.unit_tiles;
    place.quarter = portion / kSizes.unit_tiles;
    place.b = place.quarter * 4 + lane % 2 * 2 + lane % 4 / 2;  // as SumUp has them
    place.unit = place.tile * 16 + lane / 4 * 2;
    place.exists =
        (round + 1) * kSizes.pointwise_warps <= kSizes.portions || portion < kSizes.portions;
    return place;
  }
  __device__ __forceinline__ static bool IsReal(const Place& place, int i) {
    return place.exists && place.b < kSizes.batch && place.unit + i < kSizes.hidden;
  }

  // Adds what a warp has received by its loads from number `first` on to the sums of their rounds.
  template <int kCount>
  __device__ __forceinline__ static void AddUp(const Words4 (&x)[kCount], int first, Sums& sums) {
    const auto begin_of = [&](int r) { return r * kSizes.mailbox_loads - first; };
    const auto is_among = [&](int r) {
      return begin_of(r) < kCount && begin_of(r) + kSizes.mailbox_loads > 0;
    };
    Sums added = {};
    bool has_nan = false;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (!is_among(r)) continue;
      SumUp(x, begin_of(r), kBothHalves, kBothHalves, added[r]);
      has_nan |= added[r][0] != added[r][0] || added[r][1] != added[r][1];
    }
    if (__any_sync(kAllLanes, has_nan)) {
#pragma unroll 1
      for (int part = 0; part < 4; ++part) {
        const uint32_t half = part % 2 == 0 ? kLowerHalf : ~kLowerHalf;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          if (!is_among(r)) continue;
          float alone[2];
          SumUp(x, begin_of(r), part < 2 ? half : 0, part < 2 ? 0 : half, alone);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (part == threadIdx.x % 2 * 2 + i) added[r][i] = alone[i];
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      if (is_among(r)) sums[r][0] += added[r][0], sums[r][1] += added[r][1];
    }
  }

  // The sums of a round, whose first load is x[begin], as a product by ones on tensor cores. The 16
  // bytes of a lane are its part of the operand A. Lanes of the same two units have two rows of it:
  // one for batch entries 0 and 2, one for 1 and 3. The inner dimension has, of each of four
  // blocks, both units of both entries, and a column of B has ones where one of these four is. By
  // the others, zeros, a number that is not finite makes a NaN, which is no part of the sum. Such
  // sums are taken again, of one half of the first or of the last two words alone.
  template <int kCount>
  __device__ __forceinline__ static void SumUp(const Words4 (&x)[kCount], int begin,
                                               uint32_t of_first, uint32_t of_last,
                                               float (&sums)[2]) {
    const uint32_t one = PairOf(State(), 1.f, 0.f);
    const int column = threadIdx.x / 4 % 4;
    const uint32_t ones = column % 2 == 0 ? one : one << 16;
    const uint32_t first_ones = column < 2 ? ones : 0, last_ones = column < 2 ? 0 : ones;
    float d[4] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < begin || i - begin >= kSizes.mailbox_loads) continue;
      MultiplyAdd(
          State(), d,
          {x[i].x & of_first & ~kLapBit, x[i].y & of_first, x[i].z & of_last, x[i].w & of_last},
          first_ones, last_ones);
    }
    const bool is_second = threadIdx.x % 4 >= 2;
    sums[0] = is_second ? d[2] : d[0], sums[1] = is_second ? d[3] : d[1];
  }

  __device__ __forceinline__ void Leave(const Place& place, const float (&state)[2][Step::kStates],
                                        State* states) const {
    if (!place.exists) return;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) {
      const float low = IsReal(place, 0) ? state[0][s] : 0.f;
      const float high = IsReal(place, 1) ? state[1][s] : 0.f;
      const int tile = s * kSizes.unit_tiles + place.tile % kSizes.unit_tiles;
      State* to = states + StateOffset<Plan>(tile, place.b) + place.unit % 16;
      *reinterpret_cast<uint32_t*>(to) = PairOf(State(), low, high);
    }
  }

  __device__ __forceinline__ void LoadInputs(int64_t step) {
    if constexpr (Step::kInputs > 0) {
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const Place place = At(r);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          if (!IsReal(place, n * kNear)) continue;
          const int unit = place.unit + n * kNear;
          Arrays::LoadInputs(p_, Arrays::TimeOf(p_, step), place.b, unit, input_[r][n], step > 0);
          if (step + kStepsAhead < p_.steps) {
            Arrays::PrefetchInputs(p_, Arrays::TimeOf(p_, step + kStepsAhead), place.b, unit);
          }
        }
      }
    }
  }

  const RecurrentWaveLayer& p_;
  Watchdog watchdog_;
  float carry_[kRounds][2][Arrays::kCarrySlots] = {};
  uint32_t input_[kRounds][kGroups][Arrays::kInputWords] = {};
};

}  // namespace jaxsparse
