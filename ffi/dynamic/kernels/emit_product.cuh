// What product warps do in a pass from rows to their sources: they wait for all states of a tile's
// rows, multiply by the weights of the block's units of sources, and leave their parts in the ring.
#pragma once

#include "dynamic/kernels/ring.cuh"
#include "dynamic/kernels/team_exchange.cuh"
#include "dynamic/kernels/team_mma.cuh"
#include "dynamic/kernels/tiles_of_team.cuh"
#include "persistent/delay.cuh"

namespace jaxsparse {

// The weights of a pass: rows (slot of a source, its unit), columns (state, unit).
template <typename Plan>
struct EmitMatrix {
  static constexpr int kColumns = Plan::kSizes.columns;
  __device__ __forceinline__ static DenseWeights Of(const GraphScanProblem& p) { return p.weights; }
  __device__ __forceinline__ static int PlaceOf(int slot) { return slot; }
};

template <typename Plan, typename Product>
class EmitProducts {
  using State = typename Plan::State;
  using States = typename Product::States;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kLoads = kSizes.loads;

 public:
  __device__ __forceinline__ EmitProducts(const GraphScanProblem& p, Words4* shared,
                                          volatile uint32_t* stop)
      : product_(p, shared + kSizes.weights_at / 16),
        ring_(shared),
        tiles_(p),
        watchdog_(p.wait_limits),
        backoff_(p.poll_delays),
        stop_(stop) {}

  __device__ __forceinline__ void Run(const GraphScanProblem& p) {
    now_ = tiles_.Next(p);
    if (!now_.exists) return;
    first_ = static_cast<const State*>(p.states) + product_.TileRow() * kSizes.columns +
             product_.Column(0);
    KeepInRegister(first_);  // and no registers while weights are loaded
    backoff_.Start();
    States even, odd;
    Ask(now_, even);
    for (;;) {
      if (!Turn(p, even, odd)) return;
      if (!Turn(p, odd, even)) return;
    }
  }

 private:
  // Makes the products of a tile whose states were asked for. Whether there is another one.
  __device__ __forceinline__ bool Turn(const GraphScanProblem& p, States& x, States& ahead) {
    MeetTeam<Plan>(p, number_, &watchdog_);
    Delay<Plan::kMostDelay>(number_++);
    const TeamTile now = now_;
    now_ = tiles_.Next(p);
    if (kSizes.asks_ahead && now_.exists) Ask(now_, ahead);
    StatePlace places[kLoads];
    PlacesOf(now, places);
    const int looks = LookForStates(places, x, backoff_, &watchdog_);
    ring_.WaitUntilEmpty();
    product_.Multiply(x, ring_.partials());
    if (watchdog_.timed_out()) *stop_ = 1;
    ring_.Fill();
    MeetBlock<Plan>();
    if (looks > 0) backoff_.Adapt(looks > 1);
    backoff_.Start();
    if (!kSizes.asks_ahead && now_.exists) Ask(now_, ahead);
    return now_.exists;
  }

  __device__ __forceinline__ void Ask(const TeamTile& tile, States& x) const {
    StatePlace places[kLoads];
    PlacesOf(tile, places);
    AskForStates(places, x);
  }

  // Rows of padding have states, too: zeros. A lane's columns lie at the same distances in all
  // tiles.
  __device__ __forceinline__ void PlacesOf(const TeamTile& tile,
                                           StatePlace (&places)[kLoads]) const {
    const State* states = first_ + int64_t{tile.number} * (kTileRows * kSizes.columns);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const State* from = states + j * kSizes.warps * kSizes.load_columns;
      const bool exists = product_.HasColumn(j);
      places[j] = {reinterpret_cast<const Words4*>(from), exists, exists};
    }
  }

  const Product product_;
  const State* first_ = nullptr;  // of the lane's states in the first tile
  Ring<Plan> ring_;
  TilesOfTeam<Plan, true> tiles_;
  Watchdog watchdog_;
  Backoff backoff_;
  volatile uint32_t* const stop_;
  TeamTile now_ = {};
  int64_t number_ = 0;  // of tiles that the team has begun
};

}  // namespace jaxsparse
