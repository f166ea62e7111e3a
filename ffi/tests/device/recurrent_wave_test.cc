// Waves by products of warps.
#include "device/recurrent_wave.h"

namespace jaxsparse {
namespace {

struct WaveOptions {
  int units, warps, pointwise_warps;
  WaveMatrix own, below;
  int layers = 2, groups = 1;  // parts of the batch
  bool barrier = false, prefetch = false;
  unsigned most_delay = 0;
  bool asks_ahead = true;
  int loads_ahead = 0;
};

// What recurrent/kernels/wave.cc and jaxsparse/recurrent/engine.py print.
// `kBatch`: of a part.
template <typename Step, typename S, int kHidden, int kBatch, WaveOptions kOptions>
struct WavePlan {
  using State = S;
  using Weight = S;
  using Arrays = ArraysOf<Step>;
  static constexpr WaveSizes kSizes{
      WaveConfig{.block = DenseConfig{.products = Step::kProducts,
                                      .state_parts = Step::kStates,
                                      .state_bytes = sizeof(S),
                                      .hidden = kHidden,
                                      .batch = kBatch,
                                      .units = kOptions.units,
                                      .warps = kOptions.warps,
                                      .pointwise_warps = kOptions.pointwise_warps,
                                      .tensor_cores = true,
                                      .loads_ahead = kOptions.loads_ahead},
                 .own = kOptions.own,
                 .below = kOptions.below,
                 .asks_ahead = kOptions.asks_ahead}};
  static constexpr int kLayers = kOptions.layers, kBlocks = kSizes.blocks;
  static constexpr int kScans = kOptions.groups, kGroups = kScans, kLaunches = 1;
  static constexpr bool kBarrier = kOptions.barrier, kPrefetch = kOptions.prefetch;
  static constexpr unsigned kMostDelay = kOptions.most_delay;
};

template <typename Step, typename S, int kHidden, int kBatch, WaveOptions kOptions>
constexpr auto TestWave = Test<Step, WavePlan<Step, S, kHidden, kBatch, kOptions>>;

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  constexpr WaveMatrix kOne{.register_chunks = 1}, kFour{.products = 15, .register_chunks = 1};
  {  // three layers of few units; weights in shared memory as well
    constexpr auto Lstm =
        TestWave<LstmStep, bfloat16, 70, 3, WaveOptions{24, 1, 1, kFour, kFour, 3, 1, false, true}>;
    Lstm({});
    Lstm({.steps = 3, .lead = 1, .reverse = true, .has_nan = true, .backwards = true});
    Lstm({.steps = 1, .transposed = true});
    Lstm({.steps = 3, .missing = 4});
  }
  {  // products of one matrix only, two parts of a batch, warps that are held up
    constexpr WaveMatrix kOwn{.products = 7}, kBelow{.products = 11, .register_chunks = 1};
    constexpr auto Gru = TestWave<GruOfWaveStep, float16, 40, 3,
                                  WaveOptions{16, 2, 2, kOwn, kBelow, 2, 2, false, false, 5000}>;
    Gru({.steps = 5});
    Gru({.steps = 3, .has_nan = true, .backwards = true});
  }
  {  // an adjoint, whose matrices take some of the states, a load at a time; tiles of the batch; a
     // barrier
    constexpr WaveMatrix kOwn{.states = 5, .register_chunks = 1}, kBelow{.states = 6};
    constexpr auto Adjoint =
        TestWave<AdjointStep, bfloat16, 37, 9,
                 WaveOptions{16, 2, 2, kOwn, kBelow, 4, 1, true, false, 0, false, 1}>;
    Adjoint({.steps = 4, .lead = 1, .reverse = true, .transposed = true});
    Adjoint({.steps = 2, .backwards = true, .missing = 1});
  }
  {  // an RNN, one tile of whose rows is padded; two of three loads ahead
    constexpr auto Rnn =
        TestWave<RnnStep, bfloat16, 68, 1,
                 WaveOptions{24, 1, 1, kOne, kOne, 4, 1, false, false, 2000, true, 2}>;
    Rnn({.steps = 5, .has_nan = true});
    Rnn({.steps = 3, .missing = 4});
  }
  std::puts("all results agree");
}
