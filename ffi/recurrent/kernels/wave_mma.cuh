// Products of a layer in a wave on tensor cores: of its own last state, and of the layer below.
#pragma once

#include "recurrent/kernels/dense_mma.cuh"
#include "recurrent/kernels/wave.h"
#include "recurrent/kernels/wave_added.cuh"
#include "recurrent/kernels/wave_matrix.cuh"

namespace jaxsparse {

// What products by mma.sync take of a matrix beside that.
template <typename Plan, bool kBelow>
struct MmaMatrixOfWave : MatrixOfWave<Plan, kBelow> {
  static constexpr auto kMatrix = kBelow ? Plan::kSizes.below : Plan::kSizes.own;
  static constexpr int kLoads = kMatrix.loads, kRegisterChunks = kMatrix.register_chunks,
                       kRowTiles = kMatrix.row_tiles, kAhead = kMatrix.ahead;

  __device__ __forceinline__ static int RowTile(int tile) {
    if constexpr (HasFirst(kMatrix.products)) {
      return tile;
    } else {
      constexpr int kTiles = Plan::kSizes.units / 16;  // of a product
      return NthOf(kMatrix.products, tile / kTiles) * kTiles + tile % kTiles;
    }
  }
};

// What the product warps of a layer do in a step. The layer below is ahead, so that its state is
// there most often, and its product is made while the own state is on its way.
template <typename Plan>
class WaveMma {
  using State = typename Plan::State;
  static_assert(!Plan::kSizes.has_idle_warps && Plan::kSizes.has_whole_tiles);

 public:
  using Sums = MmaSums<Plan>;

  __device__ __forceinline__ WaveMma(const RecurrentWaveLayer& p, Words4* shared)
      : own_(p, shared + Plan::kSizes.weights_at / 16),
        below_(p, shared + Plan::kSizes.below_weights_at / 16) {}

  __device__ __forceinline__ void AskBelow(const State* slot) {
    below_.Ask(slot, x_);
    added_up_.Ask(slot);
  }
  __device__ __forceinline__ void MultiplyBelow(const State* slot, Watchdog* watchdog,
                                                MmaSums<Plan>& sums) {
    added_up_.Clear();
    const auto add = [&](int column, int tile, const Words4& x) {
      constexpr auto kSizes = Plan::kSizes;
      if constexpr (kSizes.means.count > 0 && kSizes.means.of_products) {
        const int part = CountBits(kSizes.below.states) == 1 ? 0 : column / kSizes.part;
        added_up_.Add(NthOf(kSizes.below.states, part), tile, x);
      }
    };
    below_.Multiply(slot, x_, watchdog, sums, [](int) {}, add);
    added_up_.AddReceived(slot, watchdog);
  }
  // Leaves what the warp has added up of the layer below, zeros if there is none.
  __device__ __forceinline__ void WriteSums(float* to) const { added_up_.Write(to); }

  __device__ __forceinline__ void AskOwn(const State* slot) { own_.Ask(slot, x_); }
  // Asks for the next state of the layer below in the places of what has been multiplied, so that
  // it comes while all wait for the next own one, and takes no registers. `next_below`: may be
  // null. True: the warp timed out, here or below.
  __device__ __forceinline__ bool MultiplyOwn(const State* slot, const State* next_below,
                                              float* partials, Watchdog* watchdog,
                                              MmaSums<Plan>& sums) {
    const auto ask = [&](int place) {
      if (next_below != nullptr) below_.AskAt(place, next_below, x_);
    };
#pragma unroll
    for (int place = Plan::kSizes.own.ahead; place < Plan::kSizes.ahead; ++place) ask(place);
    if (next_below != nullptr) added_up_.Ask(next_below);
    return own_.MultiplyLast(slot, x_, partials, watchdog, sums, ask);
  }

 private:
  MmaChunks<Plan, MmaMatrixOfWave<Plan, false>> own_;
  MmaChunks<Plan, MmaMatrixOfWave<Plan, true>> below_;
  MmaStates<Plan> x_;
  SumsOfBelow<Plan> added_up_;
};

}  // namespace jaxsparse
