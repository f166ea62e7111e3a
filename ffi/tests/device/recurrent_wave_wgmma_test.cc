// Waves by products of warpgroups.
#include "device/recurrent_wave.h"
// The steps come first.
#include "recurrent/kernels/wave.cu"

namespace jaxsparse {
namespace {

// What recurrent/kernels/wave_wgmma.cc and jaxsparse/recurrent/engine.py print.
template <typename Step, typename S, int kHidden, int kBatch, WaveOptions kOptions, bool kAsksAhead>
struct WgmmaPlan : WavePlan<Step, S, kOptions> {
  static constexpr WaveWgmmaSizes kSizes{WaveWgmmaConfig{
      .wave = ConfigOf<Step, S>(kHidden, kBatch, kOptions, true), .asks_ahead = kAsksAhead}};
  static constexpr int kBlocks = kSizes.blocks;
};

template <typename Step, typename S, int kHidden, int kBatch, WaveOptions kOptions,
          bool kAsksAhead = true>
constexpr auto TestWave = [](const Case& c) {
  using Plan = WgmmaPlan<Step, S, kHidden, kBatch, kOptions, kAsksAhead>;
  Test<Step, Plan, RecurrentWaveScan<Step, Plan>>(c);
};

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  constexpr WaveMatrix kOne{}, kFour{.products = 15};
  {  // three layers of few units, not all of a tensor core's rows; two parts of the columns
    constexpr WaveOptions kOptions{
        .units = 16, .warps = 8, .pointwise_warps = 2, .own = kFour, .below = kFour, .layers = 3};
    constexpr auto Lstm = TestWave<LstmStep, bfloat16, 70, 20, kOptions>;
    Lstm({.steps = 3, .lead = 1, .reverse = true, .has_nan = true, .backwards = true});
    Lstm({.steps = 2, .transposed = true});
    Lstm({.steps = 3, .missing = 4});
  }
  {  // products of one matrix only, two parts of a batch, warps that are held up
    constexpr WaveOptions kOptions{.units = 16,
                                   .warps = 4,
                                   .pointwise_warps = 2,
                                   .own = {.products = 7},
                                   .below = {.products = 11},
                                   .groups = 2,
                                   .most_delay = 5000};
    constexpr auto Gru = TestWave<GruOfWaveStep, float16, 40, 33, kOptions>;
    Gru({.steps = 4});
    Gru({.steps = 2, .has_nan = true, .backwards = true});
  }
  {  // an adjoint, whose matrices take some of the states, two of three chunks ahead; two tiles of
     // rows; a barrier
    constexpr WaveOptions kOptions{.units = 24,
                                   .warps = 8,
                                   .pointwise_warps = 4,
                                   .own = {.states = 5},
                                   .below = {.states = 6},
                                   .barrier = true,
                                   .loads_ahead = 2};
    constexpr auto Adjoint = TestWave<AdjointStep, bfloat16, 37, 70, kOptions, false>;
    Adjoint({.steps = 3, .lead = 1, .reverse = true, .transposed = true});
    Adjoint({.steps = 2, .backwards = true, .missing = 1});
  }
  {  // an RNN
    constexpr WaveOptions kOptions{.units = 40,
                                   .warps = 8,
                                   .pointwise_warps = 1,
                                   .own = kOne,
                                   .below = kOne,
                                   .layers = 4,
                                   .most_delay = 2000};
    constexpr auto Rnn = TestWave<RnnStep, bfloat16, 68, 9, kOptions>;
    Rnn({.steps = 5, .has_nan = true});
    Rnn({.steps = 3, .missing = 3});
  }
  std::puts("all results agree");
}
