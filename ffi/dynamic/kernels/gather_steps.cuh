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
  static constexpr uint32_t kRowBytes = kSizes.hidden * sizeof(float);
  static constexpr bool kHasOneUnit = kSizes.set_threads % kSizes.units == 0;  // a thread
  static_assert(kSizes.carries == kCarries);

 public:
  __device__ __forceinline__ GatherSteps(const GraphScanProblem& p, Words4* shared,
                                         const volatile uint32_t* stop)
      : set_(SetOfThread<Plan>()),
        items_((threadIdx.x - kSizes.product_threads) % kSizes.set_threads),
        ring_(shared, set_),
        window_(shared),
        tiles_(p, static_cast<int>(set_)),
        stop_(stop) {
#pragma unroll
    for (int c = 0; c < kCarries; ++c) {
      const int unit = Items::FirstUnit() + (kHasOneUnit ? items_.At(0).unit : 0);
      leaf_carries_[c] = reinterpret_cast<const char*>(p.leaf_carries[c] + unit);
      carries_[c] = reinterpret_cast<const char*>(p.carries[c] + unit) -
                    MultiplyWide(static_cast<uint32_t>(p.leaves), kRowBytes);
      KeepInRegister(leaf_carries_[c]);  // or they are found for every tile
      KeepInRegister(carries_[c]);
    }
  }

  __device__ __forceinline__ void Run(const GraphScanProblem& p) {
    MeetBlock<Plan>();
    Take(p);
    if (set_ == 0) ClearUnused(p);
    FindSources(p, set_);
    Take(p);
    LoadInputs(p, false);
#pragma unroll
    for (int n = 0; n < kItems; ++n) Arrays::ConvertOfAllRows(ahead_.input[n]);
    WaitForPrologue();  // it fills states
    if (set_ == 0) ClearUnusedStates(p);
    for (uint32_t number = set_; ahead_.tile.exists; number += kSizes.sets) {
      MeetTeam<Plan>(p, number, nullptr);
      Delay<Plan::kMostDelay>(~int64_t{number});
      Begin(number);
      FindSources(p, number + kSizes.sets);
      Take(p);
      LoadInputs(p, true);
      MakeSteps(p, number);
    }
  }

 private:
  // A tile on its way to a thread: what the script says of the rows of its items.
  struct Record {
    TeamTile tile;
    int source[kItems][kSlots];
  };
  // Then: whether rows have any sources, or else they are padding; whether these are near, and
  // where; what must be made before; carries that come from memory, and else 0.
  struct Sources {
    TeamTile tile;
    bool is_real[kItems], is_near[kItems][kSlots];
    uint32_t near[kItems][kSlots], unproven;
    float carry[kItems][kCarrySlots];
    uint32_t input[kItems][Arrays::kInputSlots];  // of the step
  };

  // Asks for the record of one more tile of the set.
  __device__ __forceinline__ void Take(const GraphScanProblem& p) {
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
    if (!ahead_.tile.exists) return;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      if (!item.exists) continue;
      Arrays::LoadInputs(p, RowOf(ahead_.tile, item), Items::FirstUnit() + item.unit,
                         ahead_.input[n], again);
    }
  }

  // Of the tile after the one that the set has begun, whose record was asked for a tile before.
  // Carries that are in memory for sure are asked for, so that no tile waits for them.
  __device__ __forceinline__ void FindSources(const GraphScanProblem& p, uint32_t number) {
    ahead_.tile = next_.tile;
    // Of the tile's last row, as sources are counted, and in the window.
    const auto last =
        static_cast<uint32_t>(p.leaves + next_.tile.number * kTileRows + kTileRows - 1);
    const uint32_t behind = number * kTileRows + kTileRows - 1 - last;
    uint32_t unproven = 0;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      ahead_.is_real[n] = false;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        const auto source = static_cast<uint32_t>(next_.source[n][k]);
        const SourceRow of = Tiles::Checked(p, next_.tile, next_.source[n][k]);
        ahead_.is_real[n] |= of.exists;
        if constexpr (kCarries > 0) {
          const uint32_t before = last - source;
          const bool is_near = of.exists && !of.is_leaf && Window::IsNear(before);
          if (is_near) unproven |= Window::BitOf(before);
          ahead_.is_near[n][k] = is_near;
          ahead_.near[n][k] =
              Window::kIsUsed ? window_.AddressOf(source + behind, items_.At(n).unit) : source;
          LoadFromMemory(source, of.is_leaf, of.exists && !is_near, n,
                         &ahead_.carry[n][k * kCarries]);
        }
      }
    }
    if constexpr (kCarries > 0) ahead_.unproven = Window::OfAllLanes(unproven);
  }

  // Goes on to the tile ahead. Carries of near sources are loaded before its products are there
  // (carry_window.cuh). They have registers of their own: a load to one waits for what is on its
  // way there.
  __device__ __forceinline__ void Begin(uint32_t number) {
    now_ = ahead_.tile;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      is_real_[n] = ahead_.is_real[n];
#pragma unroll
      for (int i = 0; i < Step::kInputs; ++i) input_[n][i] = ahead_.input[n][i];
#pragma unroll
      for (int i = 0; i < Step::kCarries; ++i) {
        carry_[n][i] = ahead_.carry[n][i];
        near_carry_[n][i] = 0;
      }
    }
    if constexpr (kCarries > 0) window_.WaitUntilMade(number, ahead_.unproven);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
#pragma unroll
      for (int k = 0; kCarries > 0 && k < kSlots; ++k) {
        const bool is_near = ahead_.is_near[n][k];
        const uint32_t near = ahead_.near[n][k];
        float* to = &near_carry_[n][k * kCarries];
        if constexpr (Window::kIsUsed) Window::LoadIf(is_near, near, to);
        else LoadFromMemory(near, false, is_near, n, to);
      }
    }
  }

  // Of a source, as records count them; zeros if it doesn't exist.
  __device__ __forceinline__ void LoadFromMemory(uint32_t source, bool is_leaf, bool exists, int n,
                                                 float* to) const {
#pragma unroll
    for (int c = 0; c < kCarries; ++c) {
      const char* from = (is_leaf ? leaf_carries_[c] : carries_[c]) +
                         MultiplyWide(source, kRowBytes) +
                         (kHasOneUnit ? 0 : items_.At(n).unit * sizeof(float));
      to[c] = exists ? *reinterpret_cast<const float*>(from) : 0.f;
    }
  }

  __device__ __forceinline__ void MakeSteps(const GraphScanProblem& p, uint32_t number) {
    const TeamTile tile = now_;
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
      Arrays::template ConvertInputs<true>(input_[n], input);
      ChooseCarries(n);
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
    Store(p, tile, spoiled, outputs);
  }

  // Of each source, one of the two that have been loaded: the other one is 0.
  __device__ __forceinline__ void ChooseCarries(int n) {
#pragma unroll
    for (int i = 0; i < Step::kCarries; ++i) {
      carry_[n][i] =
          __uint_as_float(__float_as_uint(carry_[n][i]) | __float_as_uint(near_carry_[n][i]));
    }
  }

  __device__ __forceinline__ void StoreCarries(const GraphScanProblem& p, const TeamTile& tile,
                                               int n) const {
    const uint64_t at = PlaceOf(RowOf(tile, items_.At(n)), items_.At(n).unit);
#pragma unroll
    for (int c = 0; c < kCarries; ++c) p.carries[c][at] = carry_[n][c];
  }

  __device__ __forceinline__ void Store(const GraphScanProblem& p, const TeamTile& tile,
                                        float spoiled,
                                        float (&outputs)[kItems][Arrays::kOutputSlots]) const {
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

  // Tiles that no team makes. Of their states those of all tiles are filled before.
  __device__ __forceinline__ void ClearUnused(const GraphScanProblem& p) const {
    const UnusedRows unused = items_.Unused(p, Tiles::Used(p));
    for (int c = 0; c < kCarries; ++c) {
      unused.Clear(p.carries[c], int64_t{kSizes.hidden} * sizeof(float));
    }
    for (int o = 0; o < Plan::Arrays::kOutputs; ++o) {
      unused.Clear(p.outputs[o], Arrays::OutputRowBytes(o));
    }
  }
  __device__ __forceinline__ void ClearUnusedStates(const GraphScanProblem& p) const {
    const UnusedRows unused = items_.Unused(p, Tiles::Used(p));
    unused.Clear(p.states, int64_t{kSizes.hidden} * sizeof(State));
  }

  const uint32_t set_;
  const Items items_;
  Ring<Plan, kSizes.sets> ring_;
  const Window window_;
  Tiles tiles_;
  const volatile uint32_t* const stop_;
  // Carries of leaves, and of computed rows, which are counted behind leaves; of the thread's unit,
  // if it has only one, and else of the block's first one.
  const char *leaf_carries_[kCarrySlots], *carries_[kCarrySlots];
  TeamTile now_ = {};
  Record next_ = {};
  Sources ahead_ = {};
  bool is_real_[kItems];
  float carry_[kItems][kCarrySlots], near_carry_[kItems][kCarrySlots];
  uint32_t input_[kItems][Arrays::kInputSlots];
};

}  // namespace jaxsparse
