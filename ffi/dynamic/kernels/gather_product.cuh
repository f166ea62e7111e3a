// What product warps do in a pass from sources to the rows that have them: they wait for the states
// of a tile's sources, multiply, and leave their parts of the products in the ring.
#pragma once

#include "dynamic/kernels/ring.cuh"
#include "dynamic/kernels/team_exchange.cuh"
#include "dynamic/kernels/team_mma.cuh"
#include "dynamic/kernels/tiles_of_team.cuh"
#include "persistent/delay.cuh"

namespace jaxsparse {

// A kind's weights of a pass: rows (product, unit), columns (slot of a source, its unit).
template <typename Plan>
struct GatherMatrix {
  static constexpr int kColumns = Plan::kSizes.columns;
  __device__ __forceinline__ static DenseWeights Of(const DenseWeights& of_kind) { return of_kind; }
  __device__ __forceinline__ static int PlaceOf(int product) { return product; }
};

// A tile on its way to a warp: what the script says of its kind, and of the sources of the lane's
// row.
template <typename Plan>
struct SourcesOfRow {
  TeamTile tile;
  int kind;
  int source[Plan::kSlots];

  __device__ __forceinline__ void Load(const GraphScanProblem& p, const TeamTile& of, int row) {
    tile = of;
    kind = TilesOfTeam<Plan>::LoadKind(p, tile);
#pragma unroll
    for (int k = 0; k < Plan::kSlots; ++k) {
      source[k] = TilesOfTeam<Plan>::LoadSource(p, tile, row, k);
    }
  }
};

template <typename Plan, typename Product>
class GatherProducts {
  using State = typename Plan::State;
  using States = typename Product::States;
  using Sources = SourcesOfRow<Plan>;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kLoads = kSizes.loads;

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
    Take(p);
    if (!now_.tile.exists) return;
    backoff_.Start();
    States even, odd;
    Ask(p, now_, even);
    for (;;) {
      if (!Turn(p, even, odd)) return;
      if (!Turn(p, odd, even)) return;
    }
  }

 private:
  // Goes on by a tile: its record was asked for when the one before it became the next.
  __device__ __forceinline__ void Take(const GraphScanProblem& p) {
    now_ = next_;
    next_.Load(p, tiles_.Next(p), product_.TileRow());
  }

  // Makes the products of a tile whose states were asked for, or some of them. Whether there is
  // another one.
  __device__ __forceinline__ bool Turn(const GraphScanProblem& p, States& x, States& ahead) {
    MeetTeam<Plan>(p, number_, &watchdog_);
    Delay<Plan::kMostDelay>(number_++);
    const Sources now = now_;
    Take(p);
    if (kSizes.asks_ahead && now_.tile.exists) Ask(p, now_, ahead);
    Await(p, now, x);
    ring_.WaitUntilEmpty();
    product_.Multiply(now.kind, x, ring_.partials());
    if (watchdog_.timed_out()) *stop_ = 1;
    ring_.Fill();
    backoff_.Start();
    if (!kSizes.asks_ahead && now_.tile.exists) Ask(p, now_, ahead);
    return now_.tile.exists;
  }

  __device__ __forceinline__ StatePlace PlaceOf(const GraphScanProblem& p, const Sources& of,
                                                int j) const {
    const int column = product_.Column(j), slot = column / kSizes.part;
    int source = of.source[0];
#pragma unroll
    for (int k = 1; k < Plan::kSlots; ++k) source = slot == k ? of.source[k] : source;
    const SourceRow row = TilesOfTeam<Plan>::Checked(p, of.tile, source);
    const auto* states = static_cast<const State*>(row.is_leaf ? p.leaf_states : p.states);
    const bool exists = row.exists && product_.HasColumn(j);
    return {reinterpret_cast<const Words4*>(states + row.row * kSizes.hidden + column -
                                            slot * kSizes.part),
            exists, exists && !row.is_leaf};
  }

  __device__ __forceinline__ void PlacesOf(const GraphScanProblem& p, const Sources& of,
                                           StatePlace (&places)[kLoads]) const {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) places[j] = PlaceOf(p, of, j);
  }
  __device__ __forceinline__ void Ask(const GraphScanProblem& p, const Sources& of,
                                      States& x) const {
    StatePlace places[kLoads];
    PlacesOf(p, of, places);
    AskForStates(places, x);
  }
  __device__ __forceinline__ void Await(const GraphScanProblem& p, const Sources& of, States& x) {
    StatePlace places[kLoads];
    PlacesOf(p, of, places);
    AwaitStates(places, x, &backoff_, &watchdog_);
  }

  const Product product_;
  Ring<Plan> ring_;
  TilesOfTeam<Plan> tiles_;
  Watchdog watchdog_;
  Backoff backoff_;
  volatile uint32_t* const stop_;
  Sources now_ = {}, next_ = {};
  int64_t number_ = 0;  // of tiles that the team has begun
};

}  // namespace jaxsparse
