// What product warps do in a pass from rows to their sources: they wait for all states of a tile's
// rows, multiply by the weights of the block's units of sources, and leave their parts in the ring.
#pragma once

#include "dynamic/kernels/ring.cuh"
#include "dynamic/kernels/team_exchange.cuh"
#include "dynamic/kernels/tiles_of_team.cuh"
#include "persistent/delay.cuh"

namespace jaxsparse {

template <typename Plan, typename Product>
class EmitProducts {
  using State = typename Plan::State;
  using States = typename Product::States;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kLoads = kSizes.loads;

 public:
  __device__ __forceinline__ EmitProducts(const GraphScanProblem& p, Words4* shared,
                                          volatile uint32_t* stop)
      : product_(shared + kSizes.weights_at / 16),
        ring_(shared),
        tiles_(p),
        watchdog_(p.wait_limits),
        backoff_(p.poll_delays),
        stop_(stop) {}

  __device__ __forceinline__ void Run(const GraphScanProblem& p) {
    Take(p);
    if (!now_.exists) return;
    product_.LoadWeights(p);
    first_ = static_cast<const State*>(p.states) + product_.TileRow() * kSizes.columns +
             product_.Column(0);
    KeepInRegister(first_);  // and no registers while weights are loaded
    WaitForPrologue();
    backoff_.Start();
    States x;
    for (int64_t number = 0; now_.exists; ++number) {
      StatePlace places[kLoads];
      PlacesOf(now_, places);
      AskForStates(places, x);
      MeetTeam<Plan>(p, number, &watchdog_);
      Delay<Plan::kMostDelay>(number);
      const int kind = kind_;
      Take(p);
      const int looks = LookForStates(places, x, backoff_, &watchdog_);
      ring_.WaitUntilEmpty();
      product_.Multiply(kind, x, ring_.partials());
      if (watchdog_.timed_out()) *stop_ = 1;
      ring_.Fill();
      MeetBlock<Plan>();
      if (looks > 0) backoff_.Adapt(looks > 1);
      backoff_.Start();
    }
  }

 private:
  // Goes on by a tile.
  __device__ __forceinline__ void Take(const GraphScanProblem& p) {
    now_ = tiles_.Next(p);
    kind_ = TilesOfTeam<Plan, true>::LoadKind(p, now_);
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

  Product product_;
  const State* first_ = nullptr;  // of the lane's states in the first tile
  Ring<Plan> ring_;
  TilesOfTeam<Plan, true> tiles_;
  Watchdog watchdog_;
  Backoff backoff_;
  volatile uint32_t* const stop_;
  TeamTile now_ = {};
  int kind_ = 0;  // of its rows
};

}  // namespace jaxsparse
