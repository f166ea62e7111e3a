// Waves by products of warpgroups whose weights are the stationary operand.
#include "device/recurrent_wave.h"

namespace jaxsparse {
namespace {

struct StationaryOptions {
  int units, parts, pointwise_warps;
  WaveMatrix own, below;
  int layers = 2, groups = 1, scans = 1;  // parts of the batch, and of a launch
  bool barrier = false;
  unsigned most_delay = 0;
  int portions = 1;
  int groups_beside = 1;
  WaveSkip skip = {};
};

// What recurrent/kernels/wave_stationary.cc and jaxsparse/recurrent/engine.py print.
// `kBatch`: of a part.
template <typename Step, typename S, int kHidden, int kBatch, StationaryOptions kOptions>
struct StationaryPlan {
  using State = S;
  using Weight = S;
  using Arrays = ArraysOf<Step>;
  static constexpr int kProducts = MatrixProducts(kOptions.own, kOptions.below);
  static constexpr WaveStationarySizes kSizes{WaveStationaryConfig{
      .wave =
          WaveConfig{.block = DenseConfig{.products = kProducts,
                                          .state_parts = Step::kStates,
                                          .state_bytes = sizeof(S),
                                          .hidden = kHidden,
                                          .batch = kBatch,
                                          .units = kOptions.units,
                                          .warps = kProducts * kOptions.units / 16 * kOptions.parts,
                                          .pointwise_warps = kOptions.pointwise_warps,
                                          .tensor_cores = true,
                                          .column_parts = kOptions.parts,
                                          .groups_beside = kOptions.groups_beside},
                     .own = kOptions.own,
                     .below = kOptions.below,
                     .skip = kOptions.skip},
      .portions = kOptions.portions}};
  static constexpr int kLayers = kOptions.layers, kBlocks = kSizes.blocks;
  static constexpr int kSkipped = 1;
  static constexpr int kScans = kOptions.scans, kGroups = kOptions.groups;
  static constexpr int kLaunches = kGroups / kScans;
  static constexpr bool kBarrier = kOptions.barrier, kPrefetch = false;
  static constexpr unsigned kMostDelay = kOptions.most_delay;
};

template <typename Step, typename S, int kHidden, int kBatch, StationaryOptions kOptions>
constexpr auto TestWave = Test<Step, StationaryPlan<Step, S, kHidden, kBatch, kOptions>>;

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  constexpr WaveMatrix kOne{}, kFour{.products = 15};
  {  // three layers; columns that fill no step, in two parts, of which the second has fewer
    constexpr auto Lstm =
        TestWave<LstmStep, bfloat16, 38, 32, StationaryOptions{16, 2, 2, kFour, kFour, 3}>;
    Lstm({.steps = 3, .lead = 1, .reverse = true, .has_nan = true, .backwards = true});
    Lstm({.steps = 2, .transposed = true});
    Lstm({.steps = 3, .missing = 4});
  }
  {  // two tiles of rows, two parts of a batch, warps that are held up and take units side by side
    constexpr auto Lstm =
        TestWave<LstmStep, float16, 40, 32,
                 StationaryOptions{32, 1, 4, kFour, kFour, 2, 2, 2, false, 5000, 1, 4}>;
    Lstm({.steps = 4});
    Lstm({.steps = 2, .has_nan = true, .backwards = true, .transposed = true});
    Lstm({.steps = 3, .missing = 1});
  }
  {  // parts of a batch one after another; fewer of a thread's units lie together
    constexpr auto Lstm =
        TestWave<LstmStep, bfloat16, 32, 32,
                 StationaryOptions{16, 1, 4, kFour, kFour, 2, 4, 2, false, 0, 1, 2}>;
    Lstm({.steps = 2, .reverse = true});
  }
  {  // matrices that take some of the states; twice as many rows of the batch; a barrier
    constexpr WaveMatrix kOwn{.states = 5}, kBelow{.states = 6};
    constexpr auto Adjoint = TestWave<AdjointStep, bfloat16, 37, 64,
                                      StationaryOptions{64, 1, 4, kOwn, kBelow, 2, 1, 1, true}>;
    Adjoint({.steps = 3, .lead = 1, .reverse = true, .transposed = true});
  }
  {  // an RNN, whose state comes in two portions
    constexpr auto Rnn = TestWave<RnnStep, bfloat16, 68, 32,
                                  StationaryOptions{64, 1, 1, kOne, kOne, 4, 1, 1, false, 2000, 3}>;
    Rnn({.steps = 5, .has_nan = true});
    Rnn({.steps = 3, .missing = 3});
  }
  std::puts("all results agree");
}
