// What pointwise warps do in a pass from sources to the rows that have them: they sum the product
// warps' parts in a fixed order, make the pointwise step of a tile's rows and publish the states.
// Carries stay with the units, so that a block finds those of the sources where it has put them.
#pragma once

#include "dynamic/kernels/graph_arrays.cuh"
#include "dynamic/kernels/ring.cuh"
#include "dynamic/kernels/team_items.cuh"
#include "dynamic/kernels/team_mma.cuh"
#include "dynamic/kernels/tiles_of_team.cuh"
#include "persistent/delay.cuh"

namespace jaxsparse {

template <typename Step, typename Plan>
class GatherSteps {
  using State = typename Plan::State;
  using Arrays = GraphArrays<Step, Plan>;
  using Tiles = TilesOfTeam<Plan>;
  static constexpr auto kSizes = Plan::kSizes;
  using Items = TeamItems<Plan, kSizes.pointwise_threads>;
  static constexpr int kSlots = Plan::kSlots, kItems = kSizes.items;
  static constexpr int kCarries = Step::kCarries / kSlots;  // of a row
  static constexpr int kCarrySlots = Step::kCarries > 0 ? Step::kCarries : 1;
  static_assert(Step::kCarries == kSlots * kCarries && Step::kStates == 1);

 public:
  __device__ __forceinline__ GatherSteps(const GraphScanProblem& p, Words4* shared,
                                         const volatile uint32_t* stop)
      : items_(threadIdx.x - kSizes.product_threads), ring_(shared), tiles_(p), stop_(stop) {}

  __device__ __forceinline__ void Run(const GraphScanProblem& p) {
    ClearUnused(p);
    Take(p);
    Take(p);
    LoadInputs(p, false);
    for (int64_t number = 0; now_.tile.exists; ++number) {
      MeetTeam<Plan>(p, number, nullptr);
      const OfTile now = now_;
      LoadCarries(p, now);
      Take(p);
      ring_.WaitUntilFull();
      stopped_ = stopped_ || __any_sync(kAllLanes, *stop_ != 0);
      Delay<Plan::kMostDelay>(number);
      MakeSteps(p, now);
    }
  }

 private:
  // A tile on its way to a thread: what the script says of the rows of its items.
  struct OfTile {
    TeamTile tile;
    int source[kItems][kSlots];
  };

  // Goes on by a tile: its record was asked for when the one before it became the next.
  __device__ __forceinline__ void Take(const GraphScanProblem& p) {
    now_ = next_;
    next_.tile = tiles_.Next(p);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        next_.source[n][k] = Tiles::LoadSource(p, next_.tile, item.row, k);
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

  // Of the sources; zeros where there is none. A row without any is padding.
  __device__ __forceinline__ void LoadCarries(const GraphScanProblem& p, const OfTile& of) {
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      is_real_[n] = false;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        const SourceRow source = Tiles::Checked(p, of.tile, of.source[n][k]);
        const bool exists = item.exists && source.exists;
        is_real_[n] |= exists;
        const int64_t at = source.row * kSizes.hidden + Items::FirstUnit() + item.unit;
#pragma unroll
        for (int c = 0; c < kCarries; ++c) {
          const float* from = source.is_leaf ? p.leaf_carries[c] : p.carries[c];
          carry_[n][k * kCarries + c] = exists ? from[at] : 0.f;
        }
      }
    }
  }

  __device__ __forceinline__ void MakeSteps(const GraphScanProblem& p, const OfTile& now) {
    float products[kItems][Step::kProducts];
#pragma unroll
    for (int n = 0; n < kItems; ++n) SumProducts(items_.At(n), products[n]);
    ring_.Empty();
    float outputs[kItems][Arrays::kOutputSlots] = {};
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      float input[Arrays::kInputSlots], state[1];
      Arrays::ConvertInputs(input_[n], input);
      Step::Apply(products[n], carry_[n], input, state, outputs[n]);
      if (!is_real_[n] || stopped_) Spoil(stopped_, state, carry_[n], outputs[n]);
      const int64_t at = RowOf(now, item) * kSizes.hidden + Items::FirstUnit() + item.unit;
      items_.Publish(item, state[0], static_cast<State*>(p.states) + at);
    }
    // What no block waits for comes after what all wait for.
    LoadInputs(p, true);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      if (!item.exists) continue;
      const int64_t row = RowOf(now, item), unit = Items::FirstUnit() + item.unit;
#pragma unroll
      for (int c = 0; c < kCarries; ++c) p.carries[c][row * kSizes.hidden + unit] = carry_[n][c];
      Arrays::StoreOutputs(p, row, unit, outputs[n]);
    }
    MeetOwnKind<Plan, kSizes.pointwise_threads>();
  }

  // Padding is zero, whatever the step makes of it; after a wait that lasted too long all is NaN.
  __device__ __forceinline__ static void Spoil(bool stopped, float* state, float* carry,
                                               float* output) {
    const float value = stopped ? __uint_as_float(0x7fffffffu) : 0.f;
    state[0] = value;
#pragma unroll
    for (int c = 0; c < kCarries; ++c) carry[c] = value;
#pragma unroll
    for (int o = 0; o < Step::kOutputs; ++o) output[o] = value;
  }

  // Adds the parts of all warps, in their order.
  __device__ __forceinline__ void SumProducts(const TeamItem& item,
                                              float (&products)[Step::kProducts]) const {
#pragma unroll
    for (int g = 0; g < Step::kProducts; ++g) {
      const float* part = ring_.partials() + PlaceOfProduct(g * kSizes.units + item.unit, item.row);
      products[g] = 0;
#pragma unroll
      for (int warp = 0; warp < kSizes.warps; ++warp) {
        products[g] += part[warp * kSizes.warp_part];
      }
    }
  }

  // Tiles that no team makes.
  __device__ __forceinline__ void ClearUnused(const GraphScanProblem& p) const {
    const UnusedRows unused = items_.Unused(p, Tiles::Used(p));
    unused.Clear(p.states, int64_t{kSizes.hidden} * sizeof(State));
    for (int c = 0; c < kCarries; ++c) {
      unused.Clear(p.carries[c], int64_t{kSizes.hidden} * sizeof(float));
    }
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
  bool is_real_[kItems];
  float carry_[kItems][kCarrySlots];
  uint32_t input_[kItems][Arrays::kInputSlots] = {};
};

}  // namespace jaxsparse
