// Waves by products of warpgroups.
#include "device/recurrent_wave.h"
// The steps come first.
#include "recurrent/kernels/wave.cu"

namespace jaxsparse {
namespace {

struct WaveOptions {
  int units, parts, pointwise_warps;
  WaveMatrix own, below;
  int layers = 2, groups = 1;  // parts of the batch
  bool barrier = false;
  unsigned most_delay = 0;
  bool asks_ahead = true;
  int loads_ahead = 0;
  WaveSkip skip = {};
};

// What recurrent/kernels/wave_wgmma.cc and jaxsparse/recurrent/engine.py print.
// `kBatch`: of a part.
template <typename Step, typename S, int kHidden, int kBatch, WaveOptions kOptions>
struct WavePlan {
  using State = S;
  using Weight = S;
  using Arrays = ArraysOf<Step>;
  static constexpr WaveWgmmaSizes kSizes{WaveWgmmaConfig{
      .wave =
          WaveConfig{.block = DenseConfig{.products = MatrixProducts(kOptions.own, kOptions.below),
                                          .state_parts = Step::kStates,
                                          .state_bytes = sizeof(S),
                                          .hidden = kHidden,
                                          .batch = kBatch,
                                          .units = kOptions.units,
                                          .warps = 4 * kOptions.parts * ((kBatch + 63) / 64),
                                          .pointwise_warps = kOptions.pointwise_warps,
                                          .tensor_cores = true,
                                          .warpgroups = true,
                                          .loads_ahead = kOptions.loads_ahead},
                     .own = kOptions.own,
                     .below = kOptions.below,
                     .skip = kOptions.skip},
      .asks_ahead = kOptions.asks_ahead}};
  static constexpr int kLayers = kOptions.layers, kBlocks = kSizes.blocks;
  static constexpr int kSkipped = 1;
  static constexpr int kScans = kOptions.groups, kGroups = kScans, kLaunches = 1;
  static constexpr bool kBarrier = kOptions.barrier, kPrefetch = false;
  static constexpr unsigned kMostDelay = kOptions.most_delay;
};

template <typename Step, typename S, int kHidden, int kBatch, WaveOptions kOptions>
constexpr auto TestWave = [](const Case& c) {
  using Plan = WavePlan<Step, S, kHidden, kBatch, kOptions>;
  Test<Step, Plan, RecurrentWaveScan<Step, Plan>>(c);
};

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  constexpr WaveMatrix kOne{}, kFour{.products = 15};
  {  // three layers of few units, not all of a tensor core's rows; two parts of the columns
    constexpr auto Lstm =
        TestWave<LstmStep, bfloat16, 70, 20, WaveOptions{16, 2, 2, kFour, kFour, 3}>;
    Lstm({.steps = 3, .lead = 1, .reverse = true, .has_nan = true, .backwards = true});
    Lstm({.steps = 2, .transposed = true});
    Lstm({.steps = 3, .missing = 4});
  }
  {  // products of one matrix only, two parts of a batch, warps that are held up
    constexpr WaveMatrix kOwn{.products = 7}, kBelow{.products = 11};
    constexpr auto Gru = TestWave<GruOfWaveStep, float16, 40, 33,
                                  WaveOptions{16, 1, 2, kOwn, kBelow, 2, 2, false, 5000}>;
    Gru({.steps = 4});
    Gru({.steps = 2, .has_nan = true, .backwards = true});
  }
  {  // an adjoint, whose matrices take some of the states, two of three chunks ahead; two tiles of
     // rows; a barrier
    constexpr WaveMatrix kOwn{.states = 5}, kBelow{.states = 6};
    constexpr auto Adjoint = TestWave<AdjointStep, bfloat16, 37, 70,
                                      WaveOptions{24, 1, 4, kOwn, kBelow, 2, 1, true, 0, false, 2}>;
    Adjoint({.steps = 3, .lead = 1, .reverse = true, .transposed = true});
    Adjoint({.steps = 2, .backwards = true, .missing = 1});
  }
  {  // an RNN
    constexpr auto Rnn =
        TestWave<RnnStep, bfloat16, 68, 9, WaveOptions{40, 2, 1, kOne, kOne, 4, 1, false, 2000}>;
    Rnn({.steps = 5, .has_nan = true});
    Rnn({.steps = 3, .missing = 3});
  }
  std::puts("all results agree");
}
