// Scripts, steps and operands of graph scans on an emulated GPU, and a loop on the host that their
// results are compared with.
#pragma once

#define EMULATED_CONCURRENT_BLOCKS

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cuda/pointwise.cuh"
#include "device/filled_memory.h"
#include "device/operands.h"
#include "dynamic/problem.h"
#include "dynamic/script.h"
#include "emulated/concurrent_blocks.h"

namespace jaxsparse {

namespace ops = pointwise;

// A step as jaxsparse/codegen/printer.py prints it: of a Tree-LSTM's row with two children, whose
// carries come slot by slot. It takes inputs of each row, one number for a row, and a bias. It
// saves a product in the state's dtype and both carries in float32.
struct TreeStep {
  static constexpr int kProducts = 5, kStates = 1, kCarries = 2, kInputs = 4, kOutputs = 3;
  static void Apply(const float* product, float* carry, const float* input, float* state,
                    float* output) {
    const float out = ops::Logistic(product[1] + input[1]);
    output[0] = product[2];
    output[1] = carry[0];
    output[2] = carry[1];
    const float c = ops::Logistic(product[0] + input[0] + input[2]) * ops::Tanh(product[2]) +
                    ops::Logistic(product[3] + input[3]) * carry[0] +
                    ops::Logistic(product[4] + 1) * carry[1];
    carry[0] = c;
    state[0] = out * ops::Tanh(c);
  }
};
// What the inputs and outputs of a TreeStep are.
struct TreeArrays {
  static constexpr int kInputs = 3, kOutputs = 2;
  static constexpr int kInputParts[] = {2, 1, 1}, kOutputParts[] = {1, 2};
  static constexpr bool kInputIsFloat[] = {false, false, true};
  static constexpr bool kInputIsOfRow[] = {true, true, false};
  static constexpr bool kInputIsOfUnit[] = {true, false, true};
  static constexpr bool kOutputIsFloat[] = {false, true};
};

// The same the other way round: of what has come to a row, and to its carry, it makes the states
// that go to its sources by the weights, and what goes to their carries.
// It is made in two parts: of the inputs, and of the rest.
struct TreeAdjointStep {
  static constexpr int kProducts = 1, kStates = 5, kCarries = 1, kInputs = 4, kOutputs = 3;
  static constexpr int kPrepared = 5;
  static void Prepare(const float* input, float* prepared) {
    std::copy(input, input + 4, prepared);
    prepared[4] = ops::Logistic(input[0]);
  }
  static void Finish(const float* product, float* carry, const float* prepared, float* state,
                     float* output) {
    const float sum = carry[0] + ops::Tanh(product[0] + prepared[3]);
    for (int g = 0; g < 4; ++g) state[g] = ops::Tanh(sum * (g - 1.5f) + prepared[g % 3]);
    state[4] = product[0] * 0.5f;
    output[0] = product[0];
    output[1] = sum;
    output[2] = carry[0];
    carry[0] = sum * prepared[4];
    carry[1] = 0.5f * sum + 0.25f;
  }
};

// A chain's step, without carries and inputs, whose padding would not be zero.
struct ChainStep {
  static constexpr int kProducts = 1, kStates = 1, kCarries = 0, kInputs = 0, kOutputs = 0;
  static void Apply(const float* product, float*, const float*, float* state, float*) {
    state[0] = ops::Tanh(product[0] + 0.5f);
  }
  static constexpr int kPrepared = 0;
  static void Prepare(const float*, float*) {}
  static void Finish(const float* product, float* carry, const float*, float* state,
                     float* output) {
    Apply(product, carry, nullptr, state, output);
  }
};
struct NoArrays {
  static constexpr int kInputs = 0, kOutputs = 0;
  static constexpr int kInputParts[] = {0}, kOutputParts[] = {0};
  static constexpr bool kInputIsFloat[] = {false}, kOutputIsFloat[] = {false};
  static constexpr bool kInputIsOfRow[] = {false}, kInputIsOfUnit[] = {false};
};

// Random rows whose sources are any rows before their tile, leaves more often than not.
struct RandomScript {
  int leaves = 5, tiles = 6, unused = 2, groups = 2, kinds = 1;
  bool is_damaged = false;
  int nearest = 1;  // how many tiles before a row its sources are at least

  std::vector<int32_t> Words(int slots) const {
    const ScriptForm form = FormOf(slots);
    const int64_t words = form.RecordWords(), at = form.RecordsAt();
    std::vector<int32_t> script(static_cast<size_t>(form.RootsAt()), -1);
    for (int g = 0; g <= groups; ++g) script[form.GroupTilesAt() + g] = FirstTile(g);
    const auto below = [](int most) { return static_cast<int>(generator() % most); };
    std::vector<bool> is_row(static_cast<size_t>(tiles * kTileRows));
    for (int g = 0; g < groups; ++g) {
      for (int tile = FirstTile(g); tile < FirstTile(g + 1); ++tile) {
        int32_t* record = script.data() + at + tile * words;
        const int rows = 1 + below(kTileRows);
        for (int row = 0; row < rows; ++row) {
          for (int k = 0; k < slots; ++k) {
            const int before = (tile + 1 - nearest - FirstTile(g)) * kTileRows;
            const int computed = before > 0 ? FirstTile(g) * kTileRows + below(before) : 0;
            const bool takes_computed = before > 0 && below(3) > 0 && is_row[computed];
            const bool is_none = k > 0 && below(4) == 0;
            record[kRecordSources + row * slots + k] = is_none          ? -1
                                                       : takes_computed ? leaves + computed
                                                                        : below(leaves);
          }
          is_row[tile * kTileRows + row] = true;
        }
        record[kRecordKind] = below(kinds);
      }
    }
    SetWaits(slots, script.data() + at);
    if (is_damaged) {
      Confuse(slots, &script);
      Spoil(script);
    }
    return script;
  }

  int AllTiles() const { return tiles + unused; }
  ScriptForm FormOf(int slots) const {
    return {.leaves = leaves,
            .tiles = AllTiles(),
            .width = kTileRows,
            .slots = slots,
            .groups = groups,
            .kinds = kinds};
  }

 private:
  // Groups that overlap, and rows that are there as sources, of whatever tile and group.
  void Confuse(int slots, std::vector<int32_t>* script) const {
    const ScriptForm form = FormOf(slots);
    for (int64_t at = form.GroupTilesAt(); at < form.RootsAt(); ++at) {
      const bool is_group = at <= form.GroupTilesAt() + groups;
      const int64_t values = is_group ? form.tiles + 1 : form.Rows();
      if (generator() % 2 == 0) (*script)[at] = static_cast<int32_t>(generator() % values);
    }
  }
  // The nearest later tile that has a row of a tile as a source.
  void SetWaits(int slots, int32_t* records) const {
    const int64_t words = FormOf(slots).RecordWords();
    for (int tile = tiles - 1; tile >= 0; --tile) {
      for (int i = 0; i < kTileRows * slots; ++i) {
        const int computed = records[tile * words + kRecordSources + i] - leaves;
        if (computed >= 0) records[computed / kTileRows * words + kRecordWait] = tile;
      }
    }
  }
  int32_t FirstTile(int group) const { return group * tiles / groups; }
};

// What a test has of a script, whose form of arrays is TreeArrays or NoArrays. Plan: as the kernel
// wants it.
template <typename Step, typename Plan>
class GraphOperands {
 public:
  using State = typename Plan::State;
  static constexpr int kHidden = Plan::kSizes.hidden, kSlots = Plan::kSlots;
  static constexpr bool kHasArrays = Step::kInputs > 0;
  static constexpr int kMostInputs = 4, kMostOutputs = 3;

  // `gates`: of the weights.
  GraphOperands(const RandomScript& script, int gates)
      : script_(script),
        gates_(gates),
        words_(script.Words(kSlots)),
        weights_(Normal<State>(Plan::kSizes.kinds * KindWeights(gates))),
        input_(Normal<State>(Rows() * 2 * kHidden)),
        number_(Normal<State>(Rows())),
        bias_(Normal<float>(kHidden)),
        states_(static_cast<size_t>(Rows() * Step::kStates * kHidden)),
        output_(static_cast<size_t>(Rows() * kHidden)),
        float_output_(static_cast<size_t>(Rows() * 2 * kHidden), 7.f),
        arrivals_(static_cast<size_t>(Plan::kScans * kScanFlagBytes / 4)) {
    for (State& w : weights_) {
      w = FromFloat<State>(ToAccumulator(w) / std::sqrt(float(kSlots * kHidden)));
    }
    // Where rows emit, those of the tiles that the script uses.
    const int tiles = Plan::kSizes.sum_warps > 0 ? script.tiles : script.AllTiles();
    constexpr int64_t kTileBytes = kTileRows * Step::kStates * kHidden * int64_t{sizeof(State)};
    filled_.Add(states_.data(), static_cast<size_t>(tiles * kTileBytes), 0xff);
    filled_.Add(arrivals_, 0xff);
    filled_.Add(&error_, sizeof(error_), 0xff);
  }

  // What the kernel in front does.
  void Fill() const { filled_.Fill(); }

  // Without leaves, carries and the distances of weights.
  GraphScanProblem Problem() {
    GraphScanProblem p;
    const ScriptForm form = script_.FormOf(kSlots);
    p.group_tiles = words_.data() + form.GroupTilesAt();
    p.records = words_.data() + form.RecordsAt();
    p.leaves = script_.leaves;
    p.tiles = script_.AllTiles();
    p.groups = script_.groups;
    p.weights.values = weights_.data();
    p.weight_kind_bytes = KindWeights(gates_) * int64_t{sizeof(State)};
    p.inputs[0] = input_.data();
    p.inputs[1] = number_.data();
    p.inputs[2] = bias_.data();
    p.states = states_.data();
    p.outputs[0] = output_.data();
    p.outputs[1] = float_output_.data();
    p.poll_delays = {200, 50, 10};
    p.wait_limits = {int64_t{1} << 40, &error_, &report_};
    p.arrivals = arrivals_.data();
    return p;
  }

  // Nothing was out of bounds, and no block has waited for what never comes.
  void CheckWaits() const {
    if (error_ != ~0u || report_ != 0) Fail("a watchdog", 0, 0, error_, ~0u);
  }
  // A block never ran: both words say so, and what depends on it is NaN.
  void CheckTimedOut() const {
    if (error_ != 0 || report_ != 1) Fail("a missing block", error_, report_, 0, 1);
    // What was not written is NaN as well: 0xff in every byte.
    State unwritten;
    std::memset(&unwritten, 0xff, sizeof(unwritten));
    int64_t nans = 0;
    for (const State& state : states_) {
      const bool is_written = std::memcmp(&state, &unwritten, sizeof(state)) != 0;
      nans += is_written && std::isnan(ToAccumulator(state));
    }
    if (nans == 0) Fail("after a missing block", nans, 0, 0, 0);
  }

 protected:
  int64_t Rows() const { return int64_t{script_.AllTiles()} * kTileRows; }

  static constexpr int64_t KindWeights(int gates) {
    return int64_t{gates} * kSlots * kHidden * kHidden;
  }
  // The weight of a row's kind at a place.
  double WeightOf(int64_t row, int64_t at) const {
    const ScriptForm form = script_.FormOf(kSlots);
    const int64_t record = form.RecordsAt() + row / kTileRows * form.RecordWords();
    return ToAccumulator(weights_[words_[record + kRecordKind] * KindWeights(gates_) + at]);
  }
  // A row's source, or a number below 0.
  int64_t SourceOf(int64_t row, int slot) const {
    const ScriptForm form = script_.FormOf(kSlots);
    const int64_t record = form.RecordsAt() + row / kTileRows * form.RecordWords();
    return words_[record + kRecordSources + row % kTileRows * kSlots + slot];
  }
  bool IsReal(int64_t row) const {
    bool is_real = false;
    for (int k = 0; k < kSlots; ++k) is_real |= SourceOf(row, k) >= 0;
    return is_real;
  }
  void InputsOf(int64_t row, int64_t unit, float (&inputs)[kMostInputs]) const {
    inputs[0] = ToAccumulator(input_[row * 2 * kHidden + unit]);
    inputs[1] = ToAccumulator(input_[(row * 2 + 1) * kHidden + unit]);
    inputs[2] = ToAccumulator(number_[row]);
    inputs[3] = bias_[unit];
  }
  void CompareOutputs(int64_t row, int64_t unit, const float (&outputs)[kMostOutputs]) const {
    if (!kHasArrays) return;
    Compare("output", row, unit, output_[row * kHidden + unit], outputs[0]);
    for (int i = 0; i < 2; ++i) {
      const float got = float_output_[(2 * row + i) * kHidden + unit];
      Compare("float output", row, unit, got, outputs[1 + i]);
    }
  }
  template <typename T>
  static void Compare(const char* what, int64_t row, int64_t unit, T value, double wanted) {
    const double got = ToAccumulator(value);
    const double allowed = (sizeof(T) == 4 ? 0x1p-16 : 0x1p-7) * (1 + std::fabs(wanted));
    const bool close = std::isnan(wanted) ? std::isnan(got) : std::fabs(got - wanted) <= allowed;
    if (!close) Fail(what, row, unit, got, wanted);
  }

  const RandomScript script_;
  const int gates_;
  const std::vector<int32_t> words_;
  std::vector<State> weights_;

 private:
  std::vector<State> input_, number_;
  std::vector<float> bias_;

 protected:
  std::vector<State> states_;
  FilledMemory filled_;

 private:
  std::vector<State> output_;
  std::vector<float> float_output_;
  uint32_t error_ = 0, report_ = 0;
  std::vector<uint32_t> arrivals_;
};

}  // namespace jaxsparse
