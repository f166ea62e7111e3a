// What pointwise warps do in a pass from rows to their sources: as soon as all that its parents
// emit has come to a tile, they make its rows' steps, publish the states, and pass the carries for
// the sources to the warps that sum (emit_sums.cuh).
//
// Other blocks wait for the states. So all that does not need the sums is done before they come:
// inputs are loaded two tiles ahead, and what a step makes of them alone is made one tile ahead.
#pragma once

#include "dynamic/kernels/graph_arrays.cuh"
#include "dynamic/kernels/ring.cuh"
#include "dynamic/kernels/sum_window.cuh"
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
  using Window = SumWindow<Plan>;
  static constexpr auto kSizes = Plan::kSizes;
  using Items = TeamItems<Plan, kSizes.set_threads>;
  static constexpr int kSlots = Plan::kSlots, kItems = kSizes.items;
  static constexpr int kCarries = Step::kCarries;  // of a row
  static constexpr int kPassed = kSizes.passed, kValues = Window::kValues;
  static constexpr int kCarrySlots = kPassed > 0 ? kPassed : 1;
  static constexpr int kPreparedSlots = Step::kPrepared > 0 ? Step::kPrepared : 1;
  static_assert(kPassed == kSlots * kCarries && Step::kProducts == 1);

 public:
  __device__ __forceinline__ EmitSteps(const GraphScanProblem& p, Words4* shared,
                                       const volatile uint32_t* stop)
      : set_(SetOfThread<Plan>()),
        items_((threadIdx.x - kSizes.product_threads) % kSizes.set_threads),
        window_(shared),
        ring_(shared, set_),
        tiles_(p, static_cast<int>(set_)),
        stop_(stop) {}

  // Asks for what the first tile reads, which must be there.
  __device__ __forceinline__ void AskForFirst(const GraphScanProblem& p) { AskForNext(p, false); }

  // All that can be done before inputs are there.
  __device__ __forceinline__ void Begin(const GraphScanProblem& p) {
    if (set_ == 0) ClearUnused(p);
    const int places = UsedPlaces(p);
#pragma unroll
    for (int n = 0; n < kItems; ++n) Settle(p, n, places);
  }

  __device__ __forceinline__ void Run(const GraphScanProblem& p) {
    // All places in the window are clear before a step reads one.
    if constexpr (kSizes.sets > 1) MeetOwnKind<Plan, kSizes.pointwise_threads>();
    Advance(p);
    WaitForPrologue();  // it fills states, of the tiles that the script uses
    for (int64_t number = set_; now_.exists; number += kSizes.sets) {
      uint32_t taken_from[kItems];
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
        taken_from[n] = window_at_[n] + Window::PlaceOfTile(static_cast<uint32_t>(number));
        KeepInRegister(taken_from[n]);
      }
      ring_.WaitUntilEmpty();
      if (wait_ > 0) ring_.WaitUntilRead(number, wait_);
      Delay<Plan::kMostDelay>(number);
      float outputs[kItems][Arrays::kOutputSlots] = {};
      MakeSteps(taken_from, outputs);
      MeetTeam<Plan>(p, number, nullptr);
      ring_.Fill();
      // What no block waits for comes after what all wait for.
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
        const TeamItem item = items_.At(n);
        if (!item.exists) continue;
        Arrays::StoreOutputs(p, RowOf(now_, item), Items::FirstUnit() + item.unit, outputs[n]);
      }
      MeetBlock<Plan>();
      Advance(p);
    }
  }

 private:
  // How many places in the window the team's tiles may take, from the first one on: those of its
  // group, or all of them where it has several, which would have to be counted one by one.
  __device__ __forceinline__ static int UsedPlaces(const GraphScanProblem& p) {
    const TeamTile first = Tiles(p).Next(p, 0);
    const int tiles = first.end - first.first;
    return p.groups <= Plan::kScans && tiles < kSizes.window ? tiles : kSizes.window;
  }

  // Where an item lies, once for all tiles; its used places in the window are cleared, before
  // anything is added there.
  __device__ __forceinline__ void Settle(const GraphScanProblem& p, int n, int places) {
    const TeamItem item = items_.At(n);
    window_at_[n] = window_.AddressOf(Window::PlaceOfRow(item.row), item.unit);
    passed_at_[n] = PlaceOfProduct(item.unit, item.row);
    published_at_[n] = static_cast<State*>(p.states) + item.row * kSizes.columns +
                       Items::FirstUnit() + item.unit + items_.PlaceOfWords(kSizes.hidden);
    KeepInRegister(window_at_[n]);
    KeepInRegister(passed_at_[n]);
    if (set_ > 0 || !item.exists) return;
    constexpr float kNothing[kValues] = {};
#pragma unroll 4
    for (int tile = 0; tile < places; ++tile) {
      Window::Store(window_at_[n] + Window::PlaceOfTile(tile), kNothing);
    }
  }

  // The set's tile behind the next one: what the script says of it, and its inputs.
  __device__ __forceinline__ void AskForNext(const GraphScanProblem& p, bool again) {
    next_ = tiles_.Next(p, kSizes.sets);
    next_wait_ = Tiles::LoadWait(p, next_);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
#pragma unroll
      for (int k = 0; k < kSlots; ++k) source_[n][k] = Tiles::LoadSource(p, next_, item.row, k);
      if (!next_.exists || !item.exists) continue;
      Arrays::LoadInputs(p, RowOf(next_, item), Items::FirstUnit() + item.unit, input_[n], again);
    }
  }

  // Goes on by a tile of the set, all of which but the sums is there.
  __device__ __forceinline__ void Advance(const GraphScanProblem& p) {
    now_ = next_;
    wait_ = Tiles::TilesUntil(now_, next_wait_);
    LoadFarSums(p);
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      is_real_[n] = false;
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        is_real_[n] |= Tiles::Checked(p, now_, source_[n][k]).exists;
      }
      float input[Arrays::kInputSlots];
      Arrays::ConvertInputs(input_[n], input);
      Step::Prepare(input, prepared_[n]);
    }
    AskForNext(p, true);
  }

  __device__ __forceinline__ static int64_t RowOf(const TeamTile& tile, const TeamItem& item) {
    return int64_t{tile.number} * kTileRows + item.row;
  }

  // What has come from tiles that are a window away or more.
  __device__ __forceinline__ void LoadFarSums(const GraphScanProblem& p) {
    if (!now_.exists || !Window::HasFar(now_)) return;
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      if (!item.exists) continue;
      const int64_t at = RowOf(now_, item) * kSizes.hidden + Items::FirstUnit() + item.unit;
      far_[n][0] = LoadFloat(p.sums + at);
#pragma unroll
      for (int c = 0; c < kCarries; ++c) far_[n][1 + c] = LoadFloat(p.carries[c] + at);
    }
  }
  // As it is in the L2 cache, where it was added.
  __device__ __forceinline__ static float LoadFloat(const float* from) {
    return __uint_as_float(LoadRelaxed(reinterpret_cast<const uint32_t*>(from)));
  }

  __device__ __forceinline__ void MakeSteps(const uint32_t (&taken_from)[kItems],
                                            float (&outputs)[kItems][Arrays::kOutputSlots]) {
    constexpr float kNothing[kValues] = {};
    float sums[kItems][kValues] = {};
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      if (items_.At(n).exists) Window::Load(taken_from[n], sums[n]);
    }
    stopped_ |= *stop_ != 0;
    if (Window::HasFar(now_)) {
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
#pragma unroll
        for (int v = 0; v < kValues; ++v) sums[n][v] += far_[n][v];
      }
    }
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const TeamItem item = items_.At(n);
      float carry[kCarrySlots] = {}, states[Step::kStates];
#pragma unroll
      for (int c = 0; c < kCarries; ++c) carry[c] = sums[n][1 + c];
      Step::Finish(sums[n], carry, prepared_[n], states, outputs[n]);
      if (!is_real_[n] || stopped_) Spoil(stopped_, states, carry, outputs[n]);
      State* to = published_at_[n] + int64_t{now_.number} * (kTileRows * kSizes.columns);
      items_.template PublishAll<Step::kStates>(item, states, to, kSizes.hidden);
      Pass(n, carry);
      if (item.exists) Window::Store(taken_from[n], kNothing);  // its place is free
    }
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

  __device__ __forceinline__ void Pass(int n, const float* carry) const {
    if (!items_.At(n).exists) return;
    float* passed = ring_.partials() + kSizes.passed_at;
#pragma unroll
    for (int c = 0; c < kPassed; ++c)
      passed[PlaceBehind(c * kSizes.units, passed_at_[n])] = carry[c];
  }

  // Tiles that no team makes.
  __device__ __forceinline__ void ClearUnused(const GraphScanProblem& p) const {
    const UnusedRows unused = items_.Unused(p, Tiles::Used(p));
    unused.Clear(p.states, int64_t{kSizes.columns} * sizeof(State));
    for (int o = 0; o < Plan::Arrays::kOutputs; ++o) {
      unused.Clear(p.outputs[o], Arrays::OutputRowBytes(o));
    }
  }

  const uint32_t set_;
  const Items items_;
  const Window window_;
  Ring<Plan, kSizes.sets> ring_;
  Tiles tiles_;
  const volatile uint32_t* const stop_;
  bool stopped_ = false;

  uint32_t window_at_[kItems];
  int passed_at_[kItems];
  State* published_at_[kItems];

  TeamTile now_ = {};
  int wait_ = 0;
  bool is_real_[kItems];
  float prepared_[kItems][kPreparedSlots];
  float far_[kItems][kValues] = {};

  TeamTile next_ = {};
  int next_wait_ = 0;
  int source_[kItems][kSlots];
  uint32_t input_[kItems][Arrays::kInputSlots] = {};
};

}  // namespace jaxsparse
