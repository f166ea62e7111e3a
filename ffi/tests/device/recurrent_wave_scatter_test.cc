// Waves whose blocks send each other sums.
#include "device/recurrent_wave.h"
// The steps come first.
#include "recurrent/kernels/wave_scatter.cu"

namespace jaxsparse {
namespace {

// The adjoint of an LSTM without its inner function: as many states, inputs and outputs.
struct LstmAdjointStep {
  static constexpr int kProducts = 1, kStates = 4, kCarries = 1, kInputs = 6, kOutputs = 2;
  static void Apply(const float* product, float* carry, const float* input, float* state,
                    float* output) {
    const float slope = product[0] + input[0];
    carry[0] = 0.5f * carry[0] + slope * ops::Tanh(input[1]);
    state[0] = ops::Tanh(carry[0]);
    state[1] = 0.5f * carry[0] * ops::Logistic(input[2]);
    state[2] = slope * ops::Tanh(input[3]);
    state[3] = ops::Tanh(slope) * input[4] + input[5];
    output[0] = product[0];
    output[1] = carry[0];
  }
};

// What recurrent/kernels/wave_scatter.cc and jaxsparse/recurrent/engine.py print.
template <typename Step, typename S, int kHidden, int kBatch, WaveOptions kOptions>
struct ScatterPlan : WavePlan<Step, S, kOptions> {
  static constexpr WaveScatterSizes kSizes{
      WaveScatterConfig{.wave = ConfigOf<Step, S>(kHidden, kBatch, kOptions, false)}};
  static constexpr int kBlocks = kSizes.blocks;
  static constexpr int kBitsOfPart = std::is_same_v<S, float16> ? 11 : 8;
};

template <typename Step, typename S, int kHidden, int kBatch, WaveOptions kOptions>
constexpr auto TestWave = [](const Case& c) {
  using Plan = ScatterPlan<Step, S, kHidden, kBatch, kOptions>;
  Test<Step, Plan, RecurrentWaveScan<Step, Plan>>(c);
};

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  {  // three layers of few units, not all of the last block's; laps of all slots; held up
    constexpr WaveMatrix kAll{.states = 15, .register_chunks = 1};
    constexpr auto Lstm = TestWave<LstmAdjointStep, bfloat16, 70, 5,
                                   WaveOptions{16, 2, 1, kAll, kAll, 3, 1, false, false, 5000, 1}>;
    Lstm({.steps = 10, .has_nan = true});
    Lstm({.steps = 3, .lead = 1, .reverse = true, .backwards = true});
    Lstm({.steps = 1, .transposed = true});
    for (const int64_t unit_stride : {0, 3}) Lstm({.steps = 2, .unit_stride = unit_stride});
    Lstm({.steps = 3, .missing = 4});
    // Layers below wait for it, too, before they use a slot again.
    Lstm({.steps = 12, .missing = 12, .all_wait = true});
  }
  {  // matrices that take some of the states, an odd number of units, two pairs of tiles of the
     // batch; weights in shared memory
    constexpr WaveMatrix kOwn{.states = 5}, kBelow{.states = 6};
    constexpr auto Adjoint =
        TestWave<AdjointStep, bfloat16, 37, 19, WaveOptions{32, 1, 1, kOwn, kBelow, 4}>;
    Adjoint({.steps = 5, .lead = 1, .reverse = true, .transposed = true});
    Adjoint({.steps = 3, .has_nan = true, .backwards = true});
    Adjoint({.steps = 2, .backwards = true, .missing = 1});
  }
  {  // two parts of a batch, layers of one block
    constexpr WaveMatrix kAll{.states = 7, .register_chunks = 1};
    constexpr auto Adjoint = TestWave<AdjointStep, float16, 24, 16,
                                      WaveOptions{32, 2, 4, kAll, kAll, 2, 2, false, false, 3000}>;
    Adjoint({.steps = 9});
    Adjoint({.steps = 3, .has_nan = true, .backwards = true});
  }
  {  // a step with one state, many blocks
    constexpr WaveMatrix kOne{.register_chunks = 2};
    constexpr auto Rnn = TestWave<RnnStep, float16, 96, 1,
                                  WaveOptions{16, 4, 1, kOne, kOne, 2, 1, false, false, 2000, 2}>;
    Rnn({.steps = 9, .has_nan = true});
    Rnn({.steps = 2, .overflows = true});
    Rnn({.steps = 4, .missing = 11});
  }
  {  // fewer parts of the batch and tiles of units than pointwise warps
    constexpr WaveMatrix kOne{.register_chunks = 1};
    constexpr auto Rnn = TestWave<RnnStep, bfloat16, 40, 3, WaveOptions{16, 2, 4, kOne, kOne, 3}>;
    Rnn({.steps = 9});
    Rnn({.steps = 4, .missing = 4});
  }
  std::puts("all results agree");
}
