// What pointwise warps do in a pass from sources to the rows that have them: they sum the product
// warps' parts in a fixed order, make the pointwise step of a tile's rows and publish the states.
// Carries stay with the units, so that a block finds those of the sources where it has put them.
// Warps may be several sets, which take the team's tiles in turn.
#pragma once

#include "dynamic/kernels/carry_window.cuh"
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
  using Window = CarryWindow<Plan>;
  static constexpr auto kSizes = Plan::kSizes;
  using Items = TeamItems<Plan, kSizes.set_threads>;
  static constexpr int kSlots = Plan::kSlots, kItems = kSizes.items;
  static constexpr int kCarries = Step::kCarries / kSlots;  // of a row
  static constexpr int kCarrySlots = Step::kCarries > 0 ? Step::kCarries : 1;
  static_assert(Step::kCarries == kSlots * kCarries && Step::kStates == 1);
  static_assert(kSizes.carries == kCarries);

 public:
  __device__ __forceinline__ GatherSteps(const GraphScanProblem& p, Words4* shared,
                                         const volatile uint32_t* stop)
      : set_(SetOfThread()),
        items_((threadIdx.x - kSizes.product_threads) % kSizes.set_threads),
        ring_(shared, set_),
        window_(shared),
        tiles_(p, static_cast<int>(set_)),
        stop_(stop) {}

  __device__ __forceinline__ void Run(const GraphScanProblem& p) {
    if (set_ == 0) ClearUnused(p);
    Take(p);
    Take(p);
    LoadInputs(p, false);
    for (uint32_t number = set_; now_.tile.exists; number += kSizes.sets) {
      MeetTeam<Plan>(p, number, nullptr);
      Delay<Plan::kMostDelay>(~int64_t{number});
      if constexpr (kCarries > 0) LoadCarries(p, number);
      else FindRows(p);
      const TeamTile tile = now_.tile;
      Take(p);
      MakeSteps(p, tile, number);
    }
  }

 private:
  // A tile on its way to a thread: what the script says of the rows of its items.
  struct OfTile {
    TeamTile tile;
    int source[kItems][kSlots];
  };

  __device__ __forceinline__ static uint32_t SetOfThread() {
    if constexpr (kSizes.sets == 1) return 0;
    return (threadIdx.x - kSizes.product_threads) / kSizes.set_threads;
  }

  // Goes on to the set's next tile: its record was asked for when the one before became the next.
  __device__ __forceinline__ void Take(const GraphScanProblem& p) {
    now_ = next_;
    next_.tile = tiles_.Next(p, kSizes.sets);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        next_.source[n][k] = item.exists ? Tiles::LoadSource(p, next_.tile, item.row, k) : -1;
      }
    }
  }

  __device__ __forceinline__ static uint32_t RowOf(const TeamTile& tile, const TeamItem& item) {
    return static_cast<uint32_t>(tile.number * kTileRows + item.row);
  }
  // In an array with one value for each row and unit.
  __device__ __forceinline__ static uint64_t PlaceOf(uint32_t row, int unit) {
    return uint64_t{row} * kSizes.hidden + static_cast<uint32_t>(Items::FirstUnit() + unit);
  }

  __device__ __forceinline__ void LoadInputs(const GraphScanProblem& p, bool again) {
    if (!now_.tile.exists) return;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      if (!item.exists) continue;
      Arrays::LoadInputs(p, RowOf(now_.tile, item), Items::FirstUnit() + item.unit, input_[n],
                         again);
    }
  }

  // A row without any source is padding.
  __device__ __forceinline__ void FindRows(const GraphScanProblem& p) {
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      is_real_[n] = false;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        is_real_[n] |= Tiles::Checked(p, now_.tile, now_.source[n][k]).exists;
      }
    }
  }

  // Those of the sources, before the products are there (carry_window.cuh); zeros where there is
  // none.
  __device__ __forceinline__ void LoadCarries(const GraphScanProblem& p, uint32_t number) {
    const uint32_t end = static_cast<uint32_t>(now_.tile.number) * kTileRows;
    uint32_t address[kItems][kSlots], unproven = 0;
    bool is_near[kItems][kSlots];
    SourceRow source[kItems][kSlots];
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      is_real_[n] = false;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        SourceRow& of = source[n][k];
        of = Tiles::Checked(p, now_.tile, now_.source[n][k]);
        is_real_[n] |= of.exists;
        const uint32_t before = end - static_cast<uint32_t>(of.row);
        const bool is_computed = of.exists && !of.is_leaf;
        unproven |= is_computed ? Window::BitOf(before) : 0;
        is_near[n][k] = is_computed && before <= Window::kReach * kTileRows;
        address[n][k] = window_.AddressOf(number * kTileRows - before, items_.At(n).unit);
        // What lies farther back is there.
        if constexpr (Window::kIsUsed) {
          LoadFromMemory(p, of, of.exists && !is_near[n][k], n, &carry_[n][k * kCarries]);
        }
      }
    }
    window_.WaitUntilMade(number, unproven);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        float* to = &carry_[n][k * kCarries];
        if constexpr (Window::kIsUsed) Window::LoadIf(is_near[n][k], address[n][k], to);
        else LoadFromMemory(p, source[n][k], source[n][k].exists, n, to);
      }
    }
  }

  __device__ __forceinline__ void LoadFromMemory(const GraphScanProblem& p, const SourceRow& source,
                                                 bool exists, int n, float* to) const {
    const uint64_t at = PlaceOf(static_cast<uint32_t>(source.row), items_.At(n).unit);
#pragma unroll
    for (int c = 0; c < kCarries; ++c) {
      const float* from = source.is_leaf ? p.leaf_carries[c] : p.carries[c];
      to[c] = exists ? from[at] : 0.f;
    }
  }

  __device__ __forceinline__ void MakeSteps(const GraphScanProblem& p, const TeamTile& tile,
                                            uint32_t number) {
    // What could come between the products and the states comes before them.
    State* to[kItems];
    uint32_t in_window[kItems], parts = AddressOfShared(ring_.partials());
    KeepInRegister(parts);  // or it is found when the products are there
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      to[n] = static_cast<State*>(p.states) + PlaceOf(RowOf(tile, item), item.unit);
      in_window[n] = window_.AddressOf(number * kTileRows + item.row, item.unit);
    }
    ring_.WaitUntilFull();
    Delay<Plan::kMostDelay>(number);
    const bool stopped = *stop_ != 0;
    float products[kItems][Step::kProducts];
#pragma unroll
    for (int n = 0; n < kItems; ++n) SumProducts(parts, items_.At(n), products[n]);
    ring_.Empty();
    float outputs[kItems][Arrays::kOutputSlots] = {};
    // Padding is zero, whatever the step makes of it; after a wait that was too long all is NaN.
    const float spoiled = stopped ? __uint_as_float(0x7fffffffu) : 0.f;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      float input[Arrays::kInputSlots], state[1];
      Arrays::ConvertInputs(input_[n], input);
      Step::Apply(products[n], carry_[n], input, state, outputs[n]);
      is_real_[n] = is_real_[n] && !stopped;
      items_.Publish(items_.At(n), is_real_[n] ? state[0] : spoiled, to[n]);
    }
    // What no other block waits for comes after what all wait for.
    if constexpr (kCarries > 0) {
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
#pragma unroll
        for (int c = 0; c < kCarries; ++c) {
          carry_[n][c] = is_real_[n] ? carry_[n][c] : spoiled;
        }
        if (!items_.At(n).exists) continue;
        if constexpr (Window::kIsUsed) Window::Store(in_window[n], carry_[n]);
        else StoreCarries(p, tile, n);
      }
      window_.SetMade(number);
    }
    LoadInputsAndStore(p, tile, spoiled, outputs);
  }

  __device__ __forceinline__ void StoreCarries(const GraphScanProblem& p, const TeamTile& tile,
                                               int n) const {
    const uint64_t at = PlaceOf(RowOf(tile, items_.At(n)), items_.At(n).unit);
#pragma unroll
    for (int c = 0; c < kCarries; ++c) p.carries[c][at] = carry_[n][c];
  }

  __device__ __forceinline__ void LoadInputsAndStore(
      const GraphScanProblem& p, const TeamTile& tile, float spoiled,
      float (&outputs)[kItems][Arrays::kOutputSlots]) {
    LoadInputs(p, true);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      if (!item.exists) continue;
      if constexpr (Window::kIsUsed) StoreCarries(p, tile, n);
#pragma unroll
      for (int o = 0; o < Step::kOutputs; ++o) {
        outputs[n][o] = is_real_[n] ? outputs[n][o] : spoiled;
      }
      Arrays::StoreOutputs(p, RowOf(tile, item), Items::FirstUnit() + item.unit, outputs[n]);
    }
  }

  // Adds the parts of all warps, in their order. Many loads are on their way at once.
  __device__ __forceinline__ static void SumProducts(uint32_t parts, const TeamItem& item,
                                                     float (&products)[Step::kProducts]) {
    constexpr int kInFlight = 40;
    constexpr int kTogether = kSizes.warps < kInFlight ? kInFlight / kSizes.warps : 1;
#pragma unroll
    for (int first = 0; first < Step::kProducts; first += kTogether) {
      uint32_t part[kTogether][kSizes.warps][1];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= Step::kProducts) continue;
        const uint32_t own = parts + PlaceOfPart(first + i, item) * 4;
#pragma unroll
        for (int warp = 0; warp < kSizes.warps; ++warp) {
          LoadShared(own + warp * kSizes.warp_part * 4, part[i][warp]);
        }
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (first + i >= Step::kProducts) continue;
        float& sum = products[first + i];
        sum = __uint_as_float(part[i][0][0]);
#pragma unroll
        for (int warp = 1; warp < kSizes.warps; ++warp) sum += __uint_as_float(part[i][warp][0]);
      }
    }
  }
  // If units are a multiple of 16, a product's distance to the first one is known.
  __device__ __forceinline__ static int PlaceOfPart(int product, const TeamItem& item) {
    const int row = product * kSizes.units;
    if constexpr (kSizes.units % 16 == 0)
      return row * kTileRows + PlaceOfProduct(item.unit, item.row);
    return PlaceOfProduct(row + item.unit, item.row);
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

  const uint32_t set_;
  const Items items_;
  Ring<Plan> ring_;
  const Window window_;
  Tiles tiles_;
  const volatile uint32_t* const stop_;
  OfTile now_ = {}, next_ = {};
  bool is_real_[kItems];
  float carry_[kItems][kCarrySlots];
  uint32_t input_[kItems][Arrays::kInputSlots] = {};
};

}  // namespace jaxsparse
