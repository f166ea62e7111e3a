// What blocks of a wave that exchange sums do beside products: pointwise warps receive the parts of
// their units' products, have tensor cores add them up, make the pointwise step and leave the
// states to the product warps. A named barrier a step joins the two; pointwise warps only arrive at
// it.
#pragma once

#include "recurrent/array_cursors.cuh"
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
  static constexpr int kRounds = kSizes.rounds, kCells = kSizes.cells, kNear = kSizes.near;
  static constexpr uint32_t kLowerHalf = 0xffff, kBothHalves = ~0u;  // of a word
  using Arrays = ScanArrays<Step, Plan, kNear>;
  using Inputs = InputCursor<Step, Plan>;

 public:
  using Sums = float[kRounds][2];  // of a lane's two units

  __device__ __forceinline__ ScatteredStep(const RecurrentWaveLayer& p, State* states)
      : p_(p),
        watchdog_(p.wait_limits),
        first_(FirstCell()),
        mailbox_(MailboxOf<Plan>(p) + threadIdx.x % kWarp / 4 +
                 MailboxOffset<Plan>(first_.warp_unit / 16, first_.entry / 4, threadIdx.x % 4)),
        inputs_(p, first_),
        results_(p, first_) {
    const uint32_t one = PairOf(State(), 1.f, 0.f);
    const uint32_t column = threadIdx.x / 4 % 4, ones = column % 2 == 0 ? one : one << 16;
    ones_[0] = column < 2 ? ones : 0, ones_[1] = column < 2 ? 0 : ones;
    KeepInRegister(mailbox_);
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      float state[2][Step::kStates] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int c = 2 * r + i;
        if (!IsReal(c)) continue;
        Arrays::LoadCarry(p, EntryOf(c), UnitOf(c), carry_[c]);
        Arrays::LoadState(p, EntryOf(c), UnitOf(c), state[i]);
      }
      Leave(r, state, states);
    }
    LoadInputs(0);
  }

  // Adds what the blocks of a layer have sent for a step. False if the warp timed out.
  template <bool kBelow>
  __device__ __forceinline__ bool Receive(int64_t step, Sums& sums) {
    constexpr int kLoads = kSizes.mailbox_loads, kAll = kRounds * kLoads,
                  kAhead = kSizes.mailbox_ahead;
    const Words4* slot = mailbox_ + SlotOfMailbox<Plan, kBelow>(step);
    const uint32_t lap = LapOf<Plan, kBelow>(step);
#pragma unroll
    for (int first = 0; first < kAll; first += kAhead) {
      Words4 x[kAhead];
      const auto from = [&](int i) {
        const int c = (first + i) / kLoads * 2, before = (first + i) % kLoads * 4;
        return slot + MailboxOffset<Plan>(kSizes.UnitFromFirst(c) / 16,
                                          kSizes.EntryFromFirst(c) / 4, before);
      };
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        x[i] = {lap, 0, 0, 0};  // zeros that are there
        if (first + i >= kAll) continue;
        const int before = (first + i) % kLoads * 4;
        const bool sent = Exists((first + i) / kLoads) &&
                          (before + 4 <= kSizes.blocks ||
                           before + static_cast<int>(threadIdx.x % 4) < kSizes.blocks);
        if (sent) x[i].x ^= kLapBit;
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
    float state[kCells][Step::kStates], outputs[kCells][Arrays::kOutputSlots];
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      const float product[1] = {sums[c / 2][c % 2]};
      float input[Arrays::kInputSlots];
      inputs_.Convert(input_[c / kNear], c % kNear, input);
      Step::Apply(product, carry_[c], input, state[c], outputs[c]);
      if (!stopped) continue;
#pragma unroll
      for (int s = 0; s < Step::kStates; ++s) state[c][s] = __uint_as_float(0x7fffffffu);
#pragma unroll
      for (int o = 0; o < Step::kOutputs; ++o) outputs[c][o] = __uint_as_float(0x7fffffffu);
#pragma unroll
      for (int k = 0; k < Step::kCarries; ++k) carry_[c][k] = __uint_as_float(0x7fffffffu);
    }
#pragma unroll
    for (int r = 0; r < kRounds; ++r) Leave(r, state + 2 * r, states);
    publish();
    // What no warp waits for comes after what all wait for.
    if (step + 1 < p_.steps) LoadInputs(step + 1);
#pragma unroll
    for (int c = 0; c < kCells; c += kNear) {
      if (IsReal(c)) results_.Store(c, state + c, outputs + c);
    }
    results_.Advance();
  }

  __device__ __forceinline__ void Finish() {
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      if (IsReal(c)) Arrays::StoreCarry(p_, EntryOf(c), UnitOf(c), carry_[c]);
    }
  }

 private:
  // A lane's cells are of two neighbouring units, of the entry whose sums SumUp gives it.
  __device__ __forceinline__ static CellPlace FirstCell() {
    const uint32_t lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp - kSizes.warps;
    const uint32_t tile = warp % kSizes.tiles_beside, quarter = warp / kSizes.tiles_beside;
    CellPlace first;
    first.entry = static_cast<int>(quarter * 4 + lane % 2 * 2 + lane % 4 / 2);
    first.warp_unit = static_cast<int>(BlockOfScan<Plan>() * kSizes.units + tile * 16);
    first.unit = first.warp_unit + static_cast<int>(lane / 4 * 2);
    return first;
  }
  __device__ __forceinline__ int EntryOf(int c) const {
    return first_.entry + kSizes.EntryFromFirst(c);
  }
  __device__ __forceinline__ int UnitOf(int c) const {
    return first_.unit + kSizes.UnitFromFirst(c);
  }
  // Whether there is what a round has of the batch, all of a warp's four entries or some.
  __device__ __forceinline__ bool Exists(int round) const {
    const int before = kSizes.EntryFromFirst(2 * round) / 4;
    return before + kSizes.quarters_beside <= kSizes.quarters ||
           before + first_.entry / 4 < kSizes.quarters;
  }
  __device__ __forceinline__ bool IsReal(int c) const {
    return (kSizes.has_all_entries || EntryOf(c) < kSizes.batch) &&
           (kSizes.has_all_units || UnitOf(c) < kSizes.hidden);
  }

  // Adds what a warp has received by its loads from number `first` on to the sums of their rounds.
  template <int kCount>
  __device__ __forceinline__ void AddUp(const Words4 (&x)[kCount], int first, Sums& sums) const {
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

  // The sums of a round, whose first load is x[begin], for a lane's two units and its batch entry:
  // products by ones on tensor cores. What a lane has loaded is its part of the operand A, in which
  // two units have two rows, one of words 0 and 2, for batch entries 0 and 2, and one of words 1
  // and 3. So the inner dimension has four numbers of each of four blocks, and a column of B has
  // ones where one of the four is. Elsewhere it has zeros, and zero times what is not finite is
  // NaN, in sums of which that is no part. Such sums are taken again, from one half of the first
  // two or of the last two words alone.
  template <int kCount>
  __device__ __forceinline__ void SumUp(const Words4 (&x)[kCount], int begin, uint32_t of_first,
                                        uint32_t of_last, float (&sums)[2]) const {
    // A product waits for the last one that it adds to. Those of other rounds can come between.
    constexpr int kChains = kCount > kSizes.mailbox_loads ? 1 : 2;
    float d[kChains][4] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i < begin || i - begin >= kSizes.mailbox_loads) continue;
      MultiplyAdd(
          State(), d[i % kChains],
          {x[i].x & of_first & ~kLapBit, x[i].y & of_first, x[i].z & of_last, x[i].w & of_last},
          ones_[0], ones_[1]);
    }
    const bool is_second = threadIdx.x % 4 >= 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i] = is_second ? d[0][2 + i] : d[0][i];
      if constexpr (kChains == 2) sums[i] += is_second ? d[1][2 + i] : d[1][i];
    }
  }

  __device__ __forceinline__ void Leave(int round, const float (*state)[Step::kStates],
                                        State* states) const {
    if (!Exists(round)) return;
    const int c = 2 * round, unit = UnitOf(c) - BlockOfScan<Plan>() * kSizes.units;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) {
      const float low = IsReal(c) ? state[0][s] : 0.f, high = IsReal(c + 1) ? state[1][s] : 0.f;
      State* to =
          states + StateOffset<Plan>(s * kSizes.unit_tiles + unit / 16, EntryOf(c)) + unit % 16;
      *reinterpret_cast<uint32_t*>(to) = PairOf(State(), low, high);
    }
  }

  // Of a step, and has those of a later one brought to the cache; what is the same in every step
  // stays there, and where it is one value, all prefetches would queue for its line.
  __device__ __forceinline__ void LoadInputs(int64_t step) {
    if constexpr (Step::kInputs > 0) {
      const auto is_real = [&](int c) { return IsReal(c); };
      inputs_.Load(step + 1 < p_.steps, is_real, input_);
#pragma unroll
      for (int i = 0; i < Plan::Arrays::kInputs; ++i) {
        if (p_.inputs[i].step_stride == 0) continue;
        inputs_.PrefetchOf(i, step + kStepsToCache + 1 < p_.steps, is_real);
      }
    }
  }

  const RecurrentWaveLayer& p_;
  Watchdog watchdog_;
  const CellPlace first_;
  const Words4* mailbox_;  // where the lane's first load begins, but for the slot
  uint32_t ones_[2];       // of the operand B
  Inputs inputs_;
  ResultCursor<Step, Plan> results_;
  float carry_[kCells][Arrays::kCarrySlots] = {};
  typename Inputs::Words input_ = {};
};

}  // namespace jaxsparse
