// What product warps do in a pass from sources to the rows that have them: they wait for the states
// of a tile's sources, multiply, and leave their parts of the products in the ring.
#pragma once

#include "dynamic/kernels/ring.cuh"
#include "dynamic/kernels/team_exchange.cuh"
#include "dynamic/kernels/tiles_of_team.cuh"
#include "persistent/delay.cuh"

namespace jaxsparse {

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
  static constexpr uint32_t kRowBytes = kSizes.hidden * sizeof(State);

 public:
  __device__ __forceinline__ GatherProducts(const GraphScanProblem& p, Words4* shared,
                                            volatile uint32_t* stop)
      : product_(shared + kSizes.weights_at / 16),
        ring_(shared),
        tiles_(p),
        watchdog_(p.wait_limits),
        backoff_(p.poll_delays),
        stop_(stop),
        sources_(Tiles::SourcesOf(p, product_.TileRow())) {
    KeepInRegister(sources_);  // or it is found for every tile
  }

  __device__ __forceinline__ void Run(const GraphScanProblem& p) {
    const Sources first = Take(p), second = Take(p);  // on their way together, beside the weights
    if (first.tile.exists) product_.LoadWeights(p);
    MeetBlock<Plan>();  // weights are no longer on their way through the ring
    if (!first.tile.exists) return;
    FindStates(p);
    backoff_.Start();
    Asked even, odd;
    Find(p, first, even);
    Ask(even);  // of leaves alone, since no row comes before a team's first tile
    WaitForPrologue();
    Find(p, second, odd);
    next_ = Take(p);
    for (;;) {
      if (!Turn(p, even, odd)) return;
      if (!Turn(p, odd, even)) return;
    }
  }

 private:
  // A tile on its way to a warp: what the script says of its kind, and of the sources of the lane's
  // row.
  struct Sources {
    TeamTile tile;
    int kind;
    int source[kRows];
  };
  // What is asked for, and where it lies. Where there is no tile there is nothing to ask for.
  struct Asked {
    bool exists;
    int kind;
    States x;
    const Words4* row[kRows];
    bool has_row[kRows];
  };

  // Behind the weights, which take registers while they are loaded.
  __device__ __forceinline__ void FindStates(const GraphScanProblem& p) {
    leaf_states_ = reinterpret_cast<uint64_t>(p.leaf_states);
    states_ = reinterpret_cast<uint64_t>(p.states) -
              MultiplyWide(static_cast<uint32_t>(p.leaves), kRowBytes);
    if constexpr (kIsEven) {
      leaf_states_ += FirstByteOf(0);
      states_ += FirstByteOf(0);
      KeepInRegister(leaf_states_);  // or they are found for every tile
      KeepInRegister(states_);
    }
  }

  // Asks for the record of one more tile.
  __device__ __forceinline__ Sources Take(const GraphScanProblem& p) {
    Sources next;
    next.tile = tiles_.Next(p);
    next.kind = Tiles::LoadKind(p, next.tile);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      next.source[i] = Tiles::LoadSource(sources_, next.tile, SlotOf(i));
    }
    return next;
  }

  // Makes the products of a tile whose states were asked for, or some of them. Whether there is
  // another one, of which it is known where its states lie.
  //
  // Loads share a few counters, on which a warp waits for all that was asked for before. So a turn
  // looks at what earlier ones have asked for, and asks for more after that.
  __device__ __forceinline__ bool Turn(const GraphScanProblem& p, Asked& now, Asked& ahead) {
    MeetTeam<Plan>(p, number_, &watchdog_);
    Delay<Plan::kMostDelay>(number_++);
    const Words4* places[kLoads];
    PlacesOf(now, places);
    const bool may_be_missing = HasUnwritten(now.x);
    ring_.WaitUntilEmpty();  // which it is long before the states come
    if (kSizes.asks_ahead) Ask(ahead);
    const Sources next = next_;  // its record was asked for a turn ago
    next_ = Take(p);
    if (may_be_missing) LookWhereComputed(p, places, now.x);
    product_.Multiply(now.kind, now.x, ring_.partials());
    ring_.Fill();
    backoff_.Start();
    if (!kSizes.asks_ahead) Ask(ahead);
    Find(p, next, now);
    return ahead.exists;
  }

  // Of the row that a lane loads: its slot, and where in the row its states begin.
  __device__ __forceinline__ int SlotOf(int i) const {
    if constexpr (kIsEven) return i;
    return product_.HasColumn(i) ? product_.Column(i) / kSizes.part : 0;
  }
  __device__ __forceinline__ uint32_t FirstByteOf(int i) const {
    const int column = kIsEven                 ? product_.Column(0)
                       : product_.HasColumn(i) ? product_.Column(i) % kSizes.part
                                               : 0;
    return static_cast<uint32_t>(column) * sizeof(State);
  }

  // Where the states of a tile's sources lie.
  __device__ __forceinline__ void Find(const GraphScanProblem& p, const Sources& of,
                                       Asked& to) const {
    to.exists = of.tile.exists;
    to.kind = of.kind;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const SourceRow row = Tiles::Checked(p, of.tile, of.source[i]);
      const bool exists = row.exists && (kIsEven || product_.HasColumn(i));
      const uint64_t states = (row.is_leaf ? leaf_states_ : states_) +
                              MultiplyWide(static_cast<uint32_t>(of.source[i]), kRowBytes) +
                              (kIsEven ? 0 : FirstByteOf(i));
      to.row[i] = reinterpret_cast<const Words4*>(states);
      to.has_row[i] = exists;
    }
  }

  __device__ __forceinline__ static void Ask(Asked& of) {
    const Words4* places[kLoads];
    PlacesOf(of, places);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      of.x[j] = {0, 0, 0, 0};
      LoadRelaxedIf(of.has_row[j / kRowLoads], places[j], &of.x[j]);
    }
  }

  __device__ __forceinline__ static void PlacesOf(const Asked& asked,
                                                  const Words4* (&places)[kLoads]) {
    constexpr int kDistance = kTogether * static_cast<int>(sizeof(State)) / 16;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      places[j] = asked.row[j / kRowLoads] + j % kRowLoads * kDistance;
    }
  }

  // After a look that found words that look unwritten. Those of leaves may look so, too, but are
  // there: their rows lie outside of those that are computed.
  __device__ __forceinline__ void LookWhereComputed(const GraphScanProblem& p,
                                                    const Words4* const (&from)[kLoads],
                                                    States& x) {
    StatePlace places[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const uint64_t behind =
          reinterpret_cast<uint64_t>(from[j]) - reinterpret_cast<uint64_t>(p.states);
      const bool is_computed =
          behind < MultiplyWide(static_cast<uint32_t>(p.tiles * kTileRows), kRowBytes);
      places[j] = {from[j], is_computed, is_computed};
    }
    if (!IsMissing(places, x)) return;
    const int looks = LookAgain(places, x, backoff_, &watchdog_);
    if (looks > 0) backoff_.Adapt(looks > 1);
    else *stop_ = 1;
  }

  Product product_;
  Ring<Plan> ring_;
  Tiles tiles_;
  Watchdog watchdog_;
  Backoff backoff_;
  volatile uint32_t* const stop_;
  // Those of leaves, and of computed rows, which are counted behind leaves; from the lane's column
  // on, if it is the same in all rows.
  uint64_t leaf_states_ = 0, states_ = 0;
  const int32_t* sources_;  // of the lane's row in the first tile
  Sources next_ = {};
  int64_t number_ = 0;  // of tiles that the team has begun
};

}  // namespace jaxsparse
