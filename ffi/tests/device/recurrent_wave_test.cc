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

struct WaveOptions {
  int units, warps, pointwise_warps;
  WaveMatrix own, below;
  int layers = 2, groups = 1;  // parts of the batch
  bool barrier = false, prefetch = false;
  unsigned most_delay = 0;
  int loads_ahead = 0;
  WaveSkip skip = {};
  int skipped = 1;  // layers
  WaveMean means[kMaxWaveMeans] = {};
  bool scales = false;
};

// What recurrent/kernels/wave.cc and jaxsparse/recurrent/engine.py print.
// `kBatch`: of a part.
template <typename Step, typename S, int kHidden, int kBatch, WaveOptions kOptions>
struct WavePlan {
  using State = S;
  using Weight = S;
  using Arrays = ArraysOf<Step>;
  static constexpr WaveSizes kSizes{
      WaveConfig{.block = DenseConfig{.products = MatrixProducts(kOptions.own, kOptions.below),
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
                 .skip = kOptions.skip,
                 .means = {kOptions.means[0], kOptions.means[1]},
                 .scales = kOptions.scales}};
  static constexpr int kLayers = kOptions.layers, kBlocks = kSizes.blocks;
  static constexpr int kSkipped = kOptions.skipped;
  static constexpr int kScans = kOptions.groups, kGroups = kScans, kLaunches = 1;
  static constexpr bool kBarrier = kOptions.barrier, kPrefetch = kOptions.prefetch;
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
    constexpr auto Adjoint = TestWave<AdjointStep, bfloat16, 37, 9,
                                      WaveOptions{16, 2, 2, kOwn, kBelow, 4, 1, true, false, 0, 1}>;
    Adjoint({.steps = 4, .lead = 1, .reverse = true, .transposed = true});
    Adjoint({.steps = 2, .backwards = true, .missing = 1});
  }
  {  // an RNN, one tile of whose rows is padded; two of three loads ahead
    constexpr auto Rnn = TestWave<RnnStep, bfloat16, 68, 1,
                                  WaveOptions{24, 1, 1, kOne, kOne, 4, 1, false, false, 2000, 2}>;
    Rnn({.steps = 5, .has_nan = true});
    Rnn({.steps = 3, .missing = 4});
  }
  constexpr WaveMatrix kFirst{.products = 1, .states = 1},
      kSecond{.products = 2, .states = 2, .register_chunks = 1};
  {  // skips over two layers and the layer norm; products of matrices are not all that there are
    constexpr auto Normed = TestWave<NormedStep, bfloat16, 70, 3,
                                     WaveOptions{16,
                                                 2,
                                                 2,
                                                 kFirst,
                                                 kSecond,
                                                 4,
                                                 1,
                                                 false,
                                                 false,
                                                 0,
                                                 0,
                                                 {2, 1},
                                                 2,
                                                 {{3, 1, false}, {4, 1, true}}}>;
    Normed({});
    Normed({.steps = 3, .lead = 1, .reverse = true, .has_nan = true, .backwards = true});
    Normed({.steps = 3, .missing = 2});
  }
  {  // only a skip, by pointwise threads with several units; parts of a batch; held up
    constexpr auto Skipping =
        TestWave<NormedStep, float16, 64, 5,
                 WaveOptions{32, 2, 1, kFirst, kSecond, 3, 2, false, false, 5000, 0, {2, 1}, 1}>;
    Skipping({.steps = 4});
    Skipping({.steps = 2, .missing = 0});
  }
  {  // products that are scaled; of 17 rows a tile of the batch has one
    constexpr WaveMatrix kBelow{.states = 2};
    constexpr auto Scaled = TestWave<ScaledStep, float16, 40, 17,
                                     WaveOptions{24,
                                                 2,
                                                 2,
                                                 kFirst,
                                                 kBelow,
                                                 3,
                                                 1,
                                                 false,
                                                 false,
                                                 3000,
                                                 0,
                                                 {},
                                                 1,
                                                 {{1, 1, false}, {2, 1, true}},
                                                 true}>;
    Scaled({.steps = 6, .has_nan = true});
    Scaled({.steps = 2, .missing = 1});
    constexpr auto Rms = TestWave<
        NormedStep, bfloat16, 70, 2,
        WaveOptions{
            16, 3, 1, kFirst, kSecond, 3, 2, false, false, 0, 0, {}, 1, {{4, 1, true}}, true}>;
    Rms({.steps = 5});
  }
  {  // means of states that no matrix takes; tiles of the batch; a barrier
    constexpr WaveMatrix kOwn{.products = 1, .states = 5, .register_chunks = 1},
        kBelow{.products = 2, .states = 2};
    constexpr auto Adjoint = TestWave<NormedAdjointStep, bfloat16, 37, 9,
                                      WaveOptions{16,
                                                  2,
                                                  2,
                                                  kOwn,
                                                  kBelow,
                                                  3,
                                                  1,
                                                  true,
                                                  false,
                                                  0,
                                                  0,
                                                  {1, 3},
                                                  2,
                                                  {{1, 2, false}, {2, 3, false}}}>;
    Adjoint({.steps = 4, .reverse = true, .backwards = true, .transposed = true});
  }
  std::puts("all results agree");
}
