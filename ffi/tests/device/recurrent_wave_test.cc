// Waves by products of warps.
#include "device/recurrent_wave.h"
// The steps come first.
#include "recurrent/kernels/wave.cu"

namespace jaxsparse {
namespace {

// A step behind a layer norm whose output, its second state, is added to by a skip.
struct NormedStep {
  static constexpr int kProducts = 5, kStates = 2, kCarries = 0, kInputs = 2, kOutputs = 1;
  static void Apply(const float* product, float*, const float* input, float* state, float* output) {
    const float mean = product[3], variance = std::max(product[4] - mean * mean, 0.f);
    const float factor = 1 / std::sqrt(variance + 0.01f);
    const float normed = (product[1] - mean * input[1]) * factor;
    state[0] = ops::Tanh(product[0] + 0.05f * normed + input[0]);
    state[1] = state[0] + product[2] + 16.f;
    output[0] = product[4];
  }
};
// What a transpose of it takes: to its second product lead a matrix, a skip and a mean.
struct NormedAdjointStep {
  static constexpr int kProducts = 3, kStates = 4, kCarries = 0, kInputs = 2, kOutputs = 1;
  static void Apply(const float* product, float*, const float* input, float* state, float* output) {
    const float sum = product[0] + product[1] + input[0];
    state[0] = ops::Tanh(sum);
    state[1] = 0.5f * ops::Tanh(product[1] + input[1]);
    state[2] = 0.5f * sum * input[0];
    state[3] = state[1] - 0.25f * product[2];
    output[0] = product[1];
  }
};

// The first one where the product of the layer below is scaled already.
struct ScaledStep {
  static constexpr int kProducts = 3, kStates = 2, kCarries = 0, kInputs = 2, kOutputs = 1;
  static void Apply(const float* product, float*, const float* input, float* state, float* output) {
    const float mean = product[1], variance = std::max(product[2] - mean * mean, 0.f);
    const float normed = product[0] - mean * input[1] / std::sqrt(variance + 0.01f);
    state[0] = ops::Tanh(0.05f * normed + input[0]);
    state[1] = state[0] + 16.f;
    output[0] = mean;
  }
};

// What recurrent/kernels/wave.cc and jaxsparse/recurrent/engine.py print.
template <typename Step, typename S, int kHidden, int kBatch, WaveOptions kOptions>
struct MmaPlan : WavePlan<Step, S, kOptions> {
  static constexpr WaveSizes kSizes{ConfigOf<Step, S>(kHidden, kBatch, kOptions, false)};
  static constexpr int kBlocks = kSizes.blocks;
};

template <typename Step, typename S, int kHidden, int kBatch, WaveOptions kOptions>
constexpr auto TestWave = [](const Case& c) {
  using Plan = MmaPlan<Step, S, kHidden, kBatch, kOptions>;
  Test<Step, Plan, RecurrentWaveScan<Step, Plan>>(c);
};

}  // namespace
}  // namespace jaxsparse

int main() {
  using namespace jaxsparse;
  constexpr WaveMatrix kOne{.register_chunks = 1}, kFour{.products = 15, .register_chunks = 1};
  {  // three layers of few units; weights in shared memory as well
    constexpr WaveOptions kOptions{.units = 24,
                                   .warps = 1,
                                   .pointwise_warps = 1,
                                   .own = kFour,
                                   .below = kFour,
                                   .layers = 3,
                                   .prefetch = true};
    constexpr auto Lstm = TestWave<LstmStep, bfloat16, 70, 3, kOptions>;
    Lstm({});
    Lstm({.steps = 3, .lead = 1, .reverse = true, .has_nan = true, .backwards = true});
    Lstm({.steps = 1, .transposed = true});
    Lstm({.steps = 3, .missing = 4});
  }
  {  // products of one matrix only, two parts of a batch, warps that are held up
    constexpr WaveOptions kOptions{.units = 16,
                                   .warps = 2,
                                   .pointwise_warps = 2,
                                   .own = {.products = 7},
                                   .below = {.products = 11, .register_chunks = 1},
                                   .groups = 2,
                                   .most_delay = 5000};
    constexpr auto Gru = TestWave<GruOfWaveStep, float16, 40, 3, kOptions>;
    Gru({.steps = 5});
    Gru({.steps = 3, .has_nan = true, .backwards = true});
  }
  {  // an adjoint, whose matrices take some of the states, a load at a time; tiles of the batch; a
     // barrier
    constexpr WaveOptions kOptions{.units = 16,
                                   .warps = 2,
                                   .pointwise_warps = 2,
                                   .own = {.states = 5, .register_chunks = 1},
                                   .below = {.states = 6},
                                   .layers = 4,
                                   .barrier = true,
                                   .loads_ahead = 1};
    constexpr auto Adjoint = TestWave<AdjointStep, bfloat16, 37, 9, kOptions>;
    Adjoint({.steps = 4, .lead = 1, .reverse = true, .transposed = true});
    Adjoint({.steps = 2, .backwards = true, .missing = 1});
  }
  {  // an RNN, one tile of whose rows is padded; two of three loads ahead
    constexpr WaveOptions kOptions{.units = 24,
                                   .warps = 1,
                                   .pointwise_warps = 1,
                                   .own = kOne,
                                   .below = kOne,
                                   .layers = 4,
                                   .most_delay = 2000,
                                   .loads_ahead = 2};
    constexpr auto Rnn = TestWave<RnnStep, bfloat16, 68, 1, kOptions>;
    Rnn({.steps = 5, .has_nan = true});
    Rnn({.steps = 3, .missing = 4});
  }
  constexpr WaveMatrix kFirst{.products = 1, .states = 1},
      kSecond{.products = 2, .states = 2, .register_chunks = 1};
  {  // skips over two layers and the layer norm; products of matrices are not all that there are
    constexpr WaveOptions kOptions{
        .units = 16,
        .warps = 2,
        .pointwise_warps = 2,
        .own = kFirst,
        .below = kSecond,
        .layers = 4,
        .skip = {.product = 2, .state = 1},
        .skipped = 2,
        .means = {{.product = 3, .state = 1}, {.product = 4, .state = 1, .squared = true}}};
    constexpr auto Normed = TestWave<NormedStep, bfloat16, 70, 3, kOptions>;
    Normed({});
    Normed({.steps = 3, .lead = 1, .reverse = true, .has_nan = true, .backwards = true});
    Normed({.steps = 3, .missing = 2});
  }
  {  // only a skip, by pointwise threads with several units; parts of a batch; held up
    constexpr WaveOptions kOptions{.units = 32,
                                   .warps = 2,
                                   .pointwise_warps = 1,
                                   .own = kFirst,
                                   .below = kSecond,
                                   .layers = 3,
                                   .groups = 2,
                                   .most_delay = 5000,
                                   .skip = {.product = 2, .state = 1}};
    constexpr auto Skipping = TestWave<NormedStep, float16, 64, 5, kOptions>;
    Skipping({.steps = 4});
    Skipping({.steps = 2, .missing = 0});
  }
  {  // products that are scaled; of 17 rows a tile of the batch has one
    constexpr WaveOptions kOptions{
        .units = 24,
        .warps = 2,
        .pointwise_warps = 2,
        .own = kFirst,
        .below = {.states = 2},
        .layers = 3,
        .most_delay = 3000,
        .means = {{.product = 1, .state = 1}, {.product = 2, .state = 1, .squared = true}},
        .scales = true};
    constexpr auto Scaled = TestWave<ScaledStep, float16, 40, 17, kOptions>;
    Scaled({.steps = 6, .has_nan = true});
    Scaled({.steps = 2, .missing = 1});
  }
  {  // by the root of the mean square alone; three warps of a block
    constexpr WaveOptions kOptions{.units = 16,
                                   .warps = 3,
                                   .pointwise_warps = 1,
                                   .own = kFirst,
                                   .below = kSecond,
                                   .layers = 3,
                                   .groups = 2,
                                   .means = {{.product = 4, .state = 1, .squared = true}},
                                   .scales = true};
    TestWave<NormedStep, bfloat16, 70, 2, kOptions>({.steps = 5});
  }
  {  // means of states that no matrix takes; tiles of the batch; a barrier
    constexpr WaveOptions kOptions{
        .units = 16,
        .warps = 2,
        .pointwise_warps = 2,
        .own = {.products = 1, .states = 5, .register_chunks = 1},
        .below = {.products = 2, .states = 2},
        .layers = 3,
        .barrier = true,
        .skip = {.product = 1, .state = 3},
        .skipped = 2,
        .means = {{.product = 1, .state = 2}, {.product = 2, .state = 3}}};
    constexpr auto Adjoint = TestWave<NormedAdjointStep, bfloat16, 37, 9, kOptions>;
    Adjoint({.steps = 4, .reverse = true, .backwards = true, .transposed = true});
  }
  std::puts("all results agree");
}
