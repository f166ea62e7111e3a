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
    States even;
    Ask(even);
    if constexpr (kSizes.asks_ahead) {
      States odd;
      for (;;) {
        if (!Turn(p, even, odd)) return;
        if (!Turn(p, odd, even)) return;
      }
    } else {
      while (Turn(p, even, even)) {
      }
    }
  }

 private:
  // Goes on by a tile.
  __device__ __forceinline__ void Take(const GraphScanProblem& p) {
    now_ = tiles_.Next(p);
    kind_ = TilesOfTeam<Plan, true>::LoadKind(p, now_);
  }

  // Makes the products of a tile whose states x were asked for, and asks for those of the next one.
  // Whether there is one.
  //
  // Where steps are ahead of products, states are there at the first look, and probably those of
  // the next tile, too: so it asks for them before it multiplies. Where they are not, as a rule
  // each tile waits for the one before it, and a look so early would be one more in vain.
  __device__ __forceinline__ bool Turn(const GraphScanProblem& p, States& x, States& next) {
    MeetTeam<Plan>(p, number_, &watchdog_);
    Delay<Plan::kMostDelay>(number_++);
    StatePlace places[kLoads];
    PlacesOf(now_, places);
    const int kind = kind_;
    const bool is_missing = IsMissing(places, x);
    ring_.WaitUntilEmpty();
    Take(p);
    const bool asks_ahead = kSizes.asks_ahead && !is_missing && now_.exists;
    if (asks_ahead) Ask(next);
    if (is_missing) {
      const int looks = LookAgain(places, x, backoff_, &watchdog_);
      if (looks > 0) backoff_.Adapt(looks > 1);
      else *stop_ = 1;
    }
    product_.Multiply(kind, x, ring_.partials());
    ring_.Fill();
    MeetBlock<Plan>();
    backoff_.Start();
    if (!now_.exists) return false;
    if (!asks_ahead) Ask(next);
    return true;
  }

  __device__ __forceinline__ void Ask(States& x) const {
    StatePlace places[kLoads];
    PlacesOf(now_, places);
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

  Product product_;
  const State* first_ = nullptr;  // of the lane's states in the first tile
  Ring<Plan> ring_;
  TilesOfTeam<Plan, true> tiles_;
  Watchdog watchdog_;
  Backoff backoff_;
  volatile uint32_t* const stop_;
  TeamTile now_ = {};
  int kind_ = 0;        // of its rows
  int64_t number_ = 0;  // of tiles that the team has begun
};

}  // namespace jaxsparse
