// What pointwise warps do in a pass from rows to their sources: as soon as all that its parents
// emit has come to a tile, they make its rows' steps, publish the states, and pass the carries for
// the sources to the warps that sum (emit_sums.cuh).
#pragma once

#include "dynamic/kernels/graph_arrays.cuh"
#include "dynamic/kernels/ring.cuh"
#include "dynamic/kernels/team_items.cuh"
#include "dynamic/kernels/team_mma.cuh"
#include "dynamic/kernels/tiles_of_team.cuh"
#include "persistent/delay.cuh"
#include "persistent/exchange.cuh"

namespace jaxsparse {

template <typename Step, typename Plan>
class EmitSteps {
  using State = typename Plan::State;
  using Arrays = GraphArrays<Step, Plan>;
  using Tiles = TilesOfTeam<Plan, true>;
  static constexpr auto kSizes = Plan::kSizes;
  using Items = TeamItems<Plan, kSizes.pointwise_threads>;
  static constexpr int kSlots = Plan::kSlots, kItems = kSizes.items;
  static constexpr int kCarries = Step::kCarries;  // of a row
  static constexpr int kPassed = kSizes.passed;
  static constexpr int kCarrySlots = kPassed > 0 ? kPassed : 1;
  static_assert(kPassed == kSlots * kCarries && Step::kProducts == 1);

 public:
  __device__ __forceinline__ EmitSteps(const GraphScanProblem& p, Words4* shared,
                                       const volatile uint32_t* stop)
      : items_(threadIdx.x - kSizes.product_threads), ring_(shared), tiles_(p), stop_(stop) {}

  __device__ __forceinline__ void Run(const GraphScanProblem& p) {
    ClearUnused(p);
    Take(p);
    Take(p);
    LoadInputs(p, false);
    for (int64_t number = 0; now_.tile.exists; ++number) {
      const OfTile now = now_;
      Take(p);
      ring_.WaitUntilEmpty();
      if (now.wait > 0) ring_.WaitUntilRead(number, now.wait);
      stopped_ = stopped_ || __any_sync(kAllLanes, *stop_ != 0);
      Delay<Plan::kMostDelay>(number);
      MakeSteps(p, now, number);
    }
  }

 private:
  // A tile on its way to a thread: for which of its items there are rows, and what it waits for.
  struct OfTile {
    TeamTile tile;
    int wait;
    int source[kItems][kSlots];
  };

  // Goes on by a tile: its record was asked for when the one before it became the next.
  __device__ __forceinline__ void Take(const GraphScanProblem& p) {
    now_ = next_;
    next_.tile = tiles_.Next(p);
    next_.wait = Tiles::LoadWait(p, next_.tile);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        next_.source[n][k] = Tiles::LoadSource(p, next_.tile, items_.At(n).row, k);
      }
    }
  }

  __device__ __forceinline__ static int64_t RowOf(const OfTile& of, const TeamItem& item) {
    return int64_t{of.tile.number} * kTileRows + item.row;
  }

  __device__ __forceinline__ void LoadInputs(const GraphScanProblem& p, bool again) {
    if (!now_.tile.exists) return;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      if (!item.exists) continue;
      Arrays::LoadInputs(p, RowOf(now_, item), Items::FirstUnit() + item.unit, input_[n], again);
    }
  }

  __device__ __forceinline__ void MakeSteps(const GraphScanProblem& p, const OfTile& now,
                                            int64_t number) {
    float sum[kItems][1], carry[kItems][kCarrySlots] = {};
    float outputs[kItems][Arrays::kOutputSlots] = {};
#pragma unroll
    for (int n = 0; n < kItems; ++n)
      LoadSums(p, RowOf(now, items_.At(n)), items_.At(n), sum[n], carry[n]);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      bool is_real = false;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        is_real |= Tiles::Checked(p, now.tile, now.source[n][k]).exists;
      }
      float input[Arrays::kInputSlots], states[Step::kStates];
      Arrays::ConvertInputs(input_[n], input);
      Step::Apply(sum[n], carry[n], input, states, outputs[n]);
      if (!is_real || stopped_) Spoil(stopped_, states, carry[n], outputs[n]);
      Publish(p, RowOf(now, item), item, states);
      Pass(item, carry[n]);
    }
    MeetTeam<Plan>(p, number, nullptr);
    ring_.Fill();
    // What no block waits for comes after what all wait for.
    LoadInputs(p, true);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      if (!item.exists) continue;
      Arrays::StoreOutputs(p, RowOf(now, item), Items::FirstUnit() + item.unit, outputs[n]);
    }
    MeetBlock<Plan>();
  }

  __device__ __forceinline__ static void LoadSums(const GraphScanProblem& p, int64_t row,
                                                  const TeamItem& item, float* sum, float* carry) {
    const int64_t at = row * kSizes.hidden + Items::FirstUnit() + item.unit;
    sum[0] = item.exists ? p.sums[at] : 0.f;
#pragma unroll
    for (int c = 0; c < kCarries; ++c) carry[c] = item.exists ? p.carries[c][at] : 0.f;
  }

  // Padding is zero, whatever the step makes of it; after a wait that lasted too long all is NaN.
  __device__ __forceinline__ static void Spoil(bool stopped, float* states, float* carry,
                                               float* output) {
    const float value = stopped ? __uint_as_float(0x7fffffffu) : 0.f;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) states[s] = value;
#pragma unroll
    for (int c = 0; c < kPassed; ++c) carry[c] = value;
#pragma unroll
    for (int o = 0; o < Step::kOutputs; ++o) output[o] = value;
  }

  __device__ __forceinline__ void Publish(const GraphScanProblem& p, int64_t row,
                                          const TeamItem& item, const float* states) const {
    State* to =
        static_cast<State*>(p.states) + row * kSizes.columns + Items::FirstUnit() + item.unit;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) items_.Publish(item, states[s], to + s * kSizes.hidden);
  }

  __device__ __forceinline__ void Pass(const TeamItem& item, const float* carry) const {
    if (!item.exists) return;
    float* passed = ring_.partials() + kSizes.passed_at;
#pragma unroll
    for (int c = 0; c < kPassed; ++c) {
      passed[PlaceOfProduct(c * kSizes.units + item.unit, item.row)] = carry[c];
    }
  }

  // Tiles that no team makes.
  __device__ __forceinline__ void ClearUnused(const GraphScanProblem& p) const {
    const UnusedRows unused = items_.Unused(p, Tiles::Used(p));
    unused.Clear(p.states, int64_t{kSizes.columns} * sizeof(State));
    for (int o = 0; o < Plan::Arrays::kOutputs; ++o) {
      unused.Clear(p.outputs[o], Arrays::OutputRowBytes(o));
    }
  }

  const Items items_;
  Ring<Plan> ring_;
  Tiles tiles_;
  const volatile uint32_t* const stop_;
  OfTile now_ = {}, next_ = {};
  bool stopped_ = false;
  uint32_t input_[kItems][Arrays::kInputSlots] = {};
};

}  // namespace jaxsparse
