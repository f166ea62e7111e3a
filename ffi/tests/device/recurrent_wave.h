// Layers of a stack in one launch, whose blocks run at once on an emulated GPU.
#pragma once

#include "device/recurrent_scan_operands.h"
#include "recurrent/kernels/wave.h"

namespace jaxsparse {

alignas(1024) inline __shared__ Words4 shared[5120];

// Two products of the proposal, of a layer's own state and of the layer below.
struct GruOfWaveStep {
  static constexpr int kProducts = 4, kStates = 1, kCarries = 1, kInputs = 4, kOutputs = 2;
  static void Apply(const float* product, float* carry, const float* input, float* state,
                    float* output) {
    const float reset = ops::Logistic(product[0] + input[0] + input[3]);
    const float update = ops::Logistic(product[1] + input[1]);
    const float proposal = ops::Tanh(reset * product[2] + product[3] + input[2]);
    output[0] = carry[0];
    output[1] = product[2];
    state[0] = carry[0] = proposal + update * (carry[0] - proposal);
  }
};

// Of a plan.
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

// `batch`: of a part.
template <typename Step, typename S>
constexpr WaveConfig ConfigOf(int hidden, int batch, const WaveOptions& options, bool warpgroups) {
  return {.block = DenseConfig{.products = MatrixProducts(options.own, options.below),
                               .state_parts = Step::kStates,
                               .state_bytes = sizeof(S),
                               .hidden = hidden,
                               .batch = batch,
                               .units = options.units,
                               .warps = options.warps,
                               .pointwise_warps = options.pointwise_warps,
                               .tensor_cores = true,
                               .warpgroups = warpgroups,
                               .loads_ahead = options.loads_ahead},
          .own = options.own,
          .below = options.below,
          .skip = options.skip,
          .means = {options.means[0], options.means[1]},
          .scales = options.scales};
}

// What the host prints, beside kSizes of the kernel.
template <typename Step, typename S, WaveOptions kOptions>
struct WavePlan {
  using State = S;
  using Weight = S;
  using Arrays = ArraysOf<Step>;
  static constexpr int kLayers = kOptions.layers, kSkipped = kOptions.skipped;
  static constexpr int kScans = kOptions.groups, kGroups = kScans, kLaunches = 1;
  static constexpr bool kBarrier = kOptions.barrier, kPrefetch = kOptions.prefetch;
  static constexpr unsigned kMostDelay = kOptions.most_delay;
};

struct Case {
  int64_t steps = 5;
  int64_t lead = 0;
  int64_t unit_stride = 1;  // of inputs
  bool reverse = false, has_nan = false, backwards = false, transposed = false;
  bool overflows = false;  // parts of the sums of some units do, in float16
  int missing = -1;        // a block
  bool all_wait = false;   // for it: the layers below, too
};

// A layer's weights as they are stored, and with the products and states that it lacks.
template <typename S>
struct Weights {
  std::vector<S> stored;
  DenseWeights operand;
  std::vector<double> matrix;

  Weights(const WaveMatrix& form, int products, int states, int64_t hidden, const Case& c) {
    const int64_t rows = CountBits(form.products) * hidden,
                  columns = CountBits(form.states) * hidden;
    stored = SmallWeights<S>(c.lead + rows * columns, 2 * columns);
    operand = {stored.data() + c.lead, c.transposed ? 1 : columns, c.transposed ? rows : 1};
    if (c.overflows) {
      for (const int64_t unit : {2, 5}) {
        for (int64_t k = 0; k < columns; ++k) {
          S& weight = stored[c.lead + unit * operand.row_stride + k * operand.column_stride];
          weight = FromFloat<S>(std::copysign(30000.f, ToAccumulator(weight)));
        }
      }
    }
    matrix.assign(products * hidden * states * hidden, 0.0);
    int64_t row = 0;
    for (int64_t i = 0; i < products * hidden; ++i) {
      if ((form.products >> i / hidden & 1) == 0) continue;
      int64_t column = 0;
      for (int64_t j = 0; j < states * hidden; ++j) {
        if ((form.states >> j / hidden & 1) == 0) continue;
        matrix[i * states * hidden + j] = ToAccumulator(
            stored[c.lead + row * operand.row_stride + column++ * operand.column_stride]);
      }
      ++row;
    }
  }
};

// Of a layer and part of its batch.
template <typename Plan>
constexpr int64_t ExchangeBytes(int64_t steps) {
  constexpr auto kSizes = Plan::kSizes;
  if constexpr (requires { kSizes.exchange_bytes; }) {
    return kSizes.exchange_bytes;
  } else {
    return (steps + 1) * kSizes.slot * int64_t{sizeof(typename Plan::State)};
  }
}

template <typename Step, typename Plan, auto kKernel>
void Test(const Case& c) {
  using S = typename Plan::State;
  constexpr int kHidden = Plan::kSizes.hidden;
  constexpr WaveSkip kSkip = Plan::kSizes.skip;
  constexpr WaveMeans kMeans = Plan::kSizes.means;
  constexpr float kEpsilon = 0.01f;
  using Kind = typename ScanTest<Step, S, kHidden>::Kind;
  RecurrentWave<Plan::kLayers> wave;
  std::deque<Weights<S>> own, below;
  std::deque<ScanTest<Step, S, kHidden>> tests;
  for (int layer = 0; layer < Plan::kLayers; ++layer) {
    own.emplace_back(Plan::kSizes.own, Step::kProducts, Step::kStates, kHidden, c);
    below.emplace_back(Plan::kSizes.below, Step::kProducts, Step::kStates, kHidden, c);
    const ScanSize size{.steps = c.steps,
                        .batch = Plan::kGroups * Plan::kSizes.batch,
                        .parts = Plan::kGroups,
                        .scans = Plan::kScans,
                        .lead = c.lead,
                        .has_nan = c.has_nan && layer == 0,
                        .reverse = c.reverse,
                        .unit_stride = c.unit_stride};
    tests.emplace_back(size, own[layer].matrix, ExchangeBytes<Plan>(c.steps));
    if constexpr (requires { Plan::kBitsOfPart; }) {
      tests[layer].RoundsParts(Plan::kSizes.units, Plan::kBitsOfPart);
    }
    if (layer > 0) {
      tests[layer].LieAbove(tests[layer - 1], below[layer].matrix);
      for (int k = 0; k < kMeans.count; ++k) {
        const WaveMean mean = kMeans.mean_of[k];
        tests[layer].Takes(tests[layer - 1], mean.product, mean.state,
                           mean.squared ? Kind::kMeanOfSquares : Kind::kMean);
      }
    }
    if (kMeans.scales) {
      tests[layer].Scales(kMeans.mean_of[0].state, kMeans.count == 2, kEpsilon);
    }
    if (kSkip.product >= 0 && layer >= Plan::kSkipped) {
      tests[layer].Takes(tests[layer - Plan::kSkipped], kSkip.product, kSkip.state, Kind::kState);
    }
  }
  for (int64_t launch = 0; launch < Plan::kLaunches; ++launch) {
    for (int layer = 0; layer < Plan::kLayers; ++layer) {
      RecurrentWaveLayer& p = wave.layer[layer];
      static_cast<RecurrentScanProblem&>(p) = tests[layer].Problem(launch);
      p.weights = own[layer].operand.values;
      p.weight_row_stride = own[layer].operand.row_stride;
      p.weight_column_stride = own[layer].operand.column_stride;
      if (layer > 0) {
        p.below_weights = below[layer].operand;
        p.below_exchange = wave.layer[layer - 1].exchange;
      }
      if (kMeans.scales) p.norm_epsilon = kEpsilon;
      if (kSkip.product >= 0 && layer >= Plan::kSkipped) {
        p.skip_exchange = wave.layer[layer - Plan::kSkipped].exchange;
      }
      if (c.missing >= 0) p.wait_limits.limit_ns = 1000;
    }
    emulated::Launch({.blocks = Plan::kLayers * Plan::kScans * Plan::kBlocks,
                      .threads = Plan::kSizes.threads,
                      .missing = c.missing,
                      .backwards = c.backwards},
                     {reinterpret_cast<char*>(shared), sizeof(shared)}, Plan::kSizes.shared_bytes,
                     [&] { kKernel(wave); });
  }
  const int lacking = c.missing / Plan::kBlocks;  // a scan
  for (int layer = 0; layer < Plan::kLayers; ++layer) {
    // The layers above wait in vain, too.
    const bool waits = c.missing >= 0 && (layer >= lacking / Plan::kScans || c.all_wait);
    waits ? tests[layer].CheckTimedOut(lacking % Plan::kScans) : tests[layer].Check();
  }
}

}  // namespace jaxsparse
