// What product warps do in a pass from sources to the rows that have them: they wait for the states
// of a tile's sources, multiply, and leave their parts of the products in the ring.
#pragma once

#include "dynamic/kernels/ring.cuh"
#include "dynamic/kernels/team_exchange.cuh"
#include "dynamic/kernels/team_mma.cuh"
#include "dynamic/kernels/tiles_of_team.cuh"
#include "persistent/delay.cuh"

namespace jaxsparse {

// The weights of a pass: rows (product, unit), columns (slot of a source, its unit).
template <typename Plan>
struct GatherMatrix {
  static constexpr int kColumns = Plan::kSizes.columns;
  __device__ __forceinline__ static DenseWeights Of(const GraphScanProblem& p) { return p.weights; }
  __device__ __forceinline__ static int PlaceOf(int product) { return product; }
};

template <typename Plan, typename Product>
class GatherProducts {
  using State = typename Plan::State;
  using States = typename Product::States;
  using Tiles = TilesOfTeam<Plan>;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kLoads = kSizes.loads;
  // Columns that all warps load at once. If a slot has a multiple of these, a lane reads the row of
  // one slot by several loads, whose distance is known, and else by each load what row it must.
  static constexpr int kTogether = kSizes.warps * kSizes.load_columns;
  static constexpr bool kIsEven = kSizes.part % kTogether == 0;
  static constexpr int kRowLoads = kIsEven ? kSizes.part / kTogether : 1;
  static constexpr int kRows = kLoads / kRowLoads;  // that a lane loads

 public:
  __device__ __forceinline__ GatherProducts(const GraphScanProblem& p, Words4* shared,
                                            volatile uint32_t* stop)
      : product_(p, shared + kSizes.weights_at / 16),
        ring_(shared),
        tiles_(p),
        watchdog_(p.wait_limits),
        backoff_(p.poll_delays),
        stop_(stop) {}

  __device__ __forceinline__ void Run(const GraphScanProblem& p) {
    Take(p);
    if (!next_.tile.exists) return;
    backoff_.Start();
    Asked even, odd;
    const Sources first = next_;
    Take(p);
    Ask(p, first, even);
    for (;;) {
      if (!Turn(p, even, odd)) return;
      if (!Turn(p, odd, even)) return;
    }
  }

 private:
  // A tile on its way to a warp: what the script says of the sources of the lane's row.
  struct Sources {
    TeamTile tile;
    int source[kRows];
  };
  // What has been asked for, and where it lies.
  struct Asked {
    States x;
    StatePlace row[kRows];
  };

  // Goes on by a tile, whose record is read a tile before its states are asked for.
  __device__ __forceinline__ void Take(const GraphScanProblem& p) {
    next_.tile = tiles_.Next(p);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      next_.source[i] = Tiles::LoadSource(p, next_.tile, product_.TileRow(), SlotOf(i));
    }
  }

  // Makes the products of a tile whose states were asked for, or some of them. Whether there is
  // another one.
  __device__ __forceinline__ bool Turn(const GraphScanProblem& p, Asked& now, Asked& ahead) {
    MeetTeam<Plan>(p, number_, &watchdog_);
    Delay<Plan::kMostDelay>(number_++);
    const Sources next = next_;
    Take(p);
    if (kSizes.asks_ahead && next.tile.exists) Ask(p, next, ahead);
    StatePlace places[kLoads];
    PlacesOf(now, places);
    ring_.WaitUntilEmpty();  // which it is long before the states come
    const int looks = LookForStates(places, now.x, backoff_, &watchdog_);
    product_.Multiply(now.x, ring_.partials());
    if (watchdog_.timed_out()) *stop_ = 1;
    ring_.Fill();
    if (looks > 0) backoff_.Adapt(looks > 1);
    backoff_.Start();
    if (!kSizes.asks_ahead && next.tile.exists) Ask(p, next, ahead);
    return next.tile.exists;
  }

  // Of the row that a lane loads: its slot, and the first column there.
  __device__ __forceinline__ int SlotOf(int i) const {
    if constexpr (kIsEven) return i;
    return product_.HasColumn(i) ? product_.Column(i) / kSizes.part : 0;
  }
  __device__ __forceinline__ int ColumnOf(int i) const {
    if constexpr (kIsEven) return product_.Column(0);
    return product_.HasColumn(i) ? product_.Column(i) % kSizes.part : 0;
  }

  __device__ __forceinline__ void Ask(const GraphScanProblem& p, const Sources& of,
                                      Asked& asked) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const SourceRow row = Tiles::Checked(p, of.tile, of.source[i]);
      const auto* states = static_cast<const State*>(row.is_leaf ? p.leaf_states : p.states);
      const bool exists = row.exists && (kIsEven || product_.HasColumn(i));
      states += uint64_t{static_cast<uint32_t>(row.row)} * kSizes.hidden + ColumnOf(i);
      asked.row[i] = {reinterpret_cast<const Words4*>(states), exists, exists && !row.is_leaf};
    }
    StatePlace places[kLoads];
    PlacesOf(asked, places);
    AskForStates(places, asked.x);
  }

  __device__ __forceinline__ static void PlacesOf(const Asked& asked,
                                                  StatePlace (&places)[kLoads]) {
    constexpr int kDistance = kTogether * static_cast<int>(sizeof(State)) / 16;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      places[j] = asked.row[j / kRowLoads];
      places[j].from += j % kRowLoads * kDistance;
    }
  }

  const Product product_;
  Ring<Plan> ring_;
  Tiles tiles_;
  Watchdog watchdog_;
  Backoff backoff_;
  volatile uint32_t* const stop_;
  Sources next_ = {};
  int64_t number_ = 0;  // of tiles that the team has begun
};

}  // namespace jaxsparse
