// Steps and operands of recurrent scans on an emulated GPU, and a loop on the host that their
// results are compared with.
#pragma once

#define EMULATED_CONCURRENT_BLOCKS

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <type_traits>
#include <vector>

#include "cuda/pointwise.cuh"
#include "device/operands.h"
#include "emulated/concurrent_blocks.h"
#include "recurrent/problem.h"

namespace jaxsparse {

namespace ops = pointwise;

// A step as jaxsparse/codegen/printer.py prints it. The last input is a bias.
struct RnnStep {
  static constexpr int kProducts = 1, kStates = 1, kCarries = 0, kInputs = 2, kOutputs = 1;
  static void Apply(const float* product, float*, const float* input, float* state, float* output) {
    state[0] = ops::Tanh(product[0] + input[0] + input[1]);
    output[0] = product[0];
  }
};
struct GruStep {
  static constexpr int kProducts = 3, kStates = 1, kCarries = 1, kInputs = 4, kOutputs = 3;
  static void Apply(const float* product, float* carry, const float* input, float* state,
                    float* output) {
    const float reset = ops::Logistic(product[0] + input[0] + input[3]);
    const float update = ops::Logistic(product[1] + input[1]);
    const float proposal = ops::Tanh(reset * product[2] + input[2]);
    output[0] = carry[0];
    output[1] = product[2];
    output[2] = carry[0] + product[1];
    state[0] = carry[0] = proposal + update * (carry[0] - proposal);
  }
};
struct LstmStep {
  static constexpr int kProducts = 4, kStates = 1, kCarries = 1, kInputs = 5, kOutputs = 1;
  static void Apply(const float* product, float* carry, const float* input, float* state,
                    float* output) {
    const float forget = ops::Logistic(product[1] + input[1] + input[4]);
    carry[0] =
        forget * carry[0] + ops::Logistic(product[0] + input[0]) * ops::Tanh(product[2] + input[2]);
    output[0] = carry[0];
    state[0] = ops::Logistic(product[3] + input[3]) * ops::Tanh(carry[0]);
  }
};
// One product and several states, as an adjoint has them. One input is passed on as it is.
struct AdjointStep {
  static constexpr int kProducts = 1, kStates = 3, kCarries = 1, kInputs = 3, kOutputs = 1;
  static void Apply(const float* product, float* carry, const float* input, float* state,
                    float* output) {
    carry[0] = 0.5f * carry[0] + product[0];
    state[0] = ops::Tanh(carry[0]);
    state[1] = input[1];
    state[2] = input[0] * product[0] + input[2];
    output[0] = carry[0];
  }
};

// Two arrays of inputs: one for every step, batch entry and unit, and a bias in float32. The
// last output is in float32, too, and the others are an array in the state's dtype.
template <typename Step>
struct ArraysOf {
  static constexpr bool kHasBoth = Step::kOutputs > 1;
  static constexpr int kInputs = 2, kOutputs = kHasBoth ? 2 : 1;
  static constexpr int kInputParts[] = {Step::kInputs - 1, 1};
  static constexpr int kOutputParts[] = {kHasBoth ? Step::kOutputs - 1 : 1, 1};
  static constexpr bool kInputIsFloat[] = {false, true};
  static constexpr bool kOutputIsFloat[] = {!kHasBoth, true};
};

// Of a call: every second direction is reversed, or every other one.
struct ScanSize {
  int64_t steps, batch;
  int64_t directions = 1;
  int64_t parts = 1;        // of the batch
  int64_t scans = 1;        // of a launch
  int64_t lead = 0;         // elements that arrays begin behind an aligned place
  bool has_nan = false;     // in the input of one batch entry, with the bits of an unwritten word
  bool reverse = false;     // the first direction
  int64_t unit_stride = 1;  // of the inputs in the state's dtype
};

template <typename Step, typename State, int64_t kHidden>
class ScanTest {
 public:
  // `weights`: the matrices of the product, (directions, rows, columns), as the kernel has them.
  ScanTest(const ScanSize& size, std::vector<double> weights, int64_t exchange_bytes)
      : size_(size),
        weights_(std::move(weights)),
        exchange_bytes_(exchange_bytes),
        exchange_(static_cast<size_t>(exchange_bytes / 4 * size.scans + kPadding), ~0u),
        input_(Normal<State>(size.lead + Rows() * size.steps * InputColumns())),
        bias_(Normal<float>(size.lead + size.directions * kHidden)),
        initial_state_(Normal<State>(size.lead + Rows() * Step::kStates * kHidden)),
        states_(static_cast<size_t>(size.lead + Cells() * Step::kStates)),
        output_(static_cast<size_t>(size.lead + Cells() * kNarrow)),
        float_output_(static_cast<size_t>(size.lead + Cells())),
        arrivals_(static_cast<size_t>(size.scans * kScanFlagBytes / 4), ~0u) {
    for (int i = 0; i < Step::kCarries; ++i) {
      initial_carry_[i] = Normal<float>(size.lead + Rows() * kHidden);
      final_carry_[i].resize(static_cast<size_t>(size.lead + Rows() * kHidden));
    }
    if (!size.has_nan) return;
    for (int64_t d = 0; d < size.directions; ++d) {
      const int64_t row = RowOf(d, 1, size.batch - 1);
      std::memset(&input_[InputAt(row, Step::kInputs - 2, 2)], 0xff, sizeof(State));
    }
  }

  // To the products of a step those of another scan's states after that step are added.
  void LieAbove(const ScanTest& below, std::vector<double> weights) {
    below_ = &below;
    below_weights_ = std::move(weights);
  }

  // Its products are divided, by what a norm makes of the units that they are taken of, before.
  void Scales(int state, bool centred, double epsilon) {
    scale_ = [=](const State* states) {
      double sum = 0, squares = 0;
      for (int64_t i = 0; i < kHidden; ++i) {
        const double x = ToAccumulator(states[state * kHidden + i]);
        sum += x, squares += x * x;
      }
      const double mean = centred ? sum / kHidden : 0;
      return 1 / std::sqrt(squares / kHidden - mean * mean + epsilon);
    };
  }

  // Each product by a matrix is added up of parts, each of the states of so many units, that are
  // rounded to numbers of so many bits: those of even units to a bit less for every fourth entry of
  // a part of the batch.
  void RoundsParts(int units, int bits) { units_of_part_ = units, bits_of_part_ = bits; }

  // To one of the products of a step, another scan's state after that step is added: of the unit
  // itself, or the mean over units of it or of its square.
  enum class Kind { kState, kMean, kMeanOfSquares };
  void Takes(const ScanTest& from, int product, int state, Kind kind) {
    taken_.push_back({&from, product, state, kind});
  }

  int64_t Launches() const {
    return (size_.directions * size_.parts + size_.scans - 1) / size_.scans;
  }
  int64_t ScansOf(int64_t launch) const {
    return std::min(size_.scans, size_.directions * size_.parts - launch * size_.scans);
  }

  // Of a launch, without its weights.
  RecurrentScanProblem Problem(int64_t launch) {
    std::fill(exchange_.begin(), exchange_.end(), ~0u);
    std::fill(arrivals_.begin(), arrivals_.end(), ~0u);
    RecurrentScanProblem p;
    p.steps = size_.steps;
    p.batch = size_.batch;
    p.hidden = kHidden;
    p.first_scan = static_cast<uint32_t>(launch * size_.scans);
    for (int64_t scan = 0; scan < ScansOf(launch); ++scan) {
      const uint32_t bit = IsReversed((p.first_scan + scan) / size_.parts) ? 1 : 0;
      p.reversed_scans[scan / 32] |= bit << scan % 32;
    }
    p.reverse = (p.reversed_scans[0] & 1) != 0;
    p.inputs[0] = {input_.data() + size_.lead,
                   size_.steps * size_.batch * InputColumns(),
                   size_.batch * InputColumns(),
                   InputColumns(),
                   InputUnits(),
                   size_.unit_stride};
    p.inputs[1] = {bias_.data() + size_.lead, kHidden, 0, 0, kHidden, 1};
    p.initial_state = initial_state_.data() + size_.lead;
    p.states = states_.data() + size_.lead;
    if (kNarrow > 0) p.outputs[0] = output_.data() + size_.lead;
    p.outputs[kNarrow > 0 ? 1 : 0] = float_output_.data() + size_.lead;
    for (int i = 0; i < Step::kCarries; ++i) {
      p.initial_carry[i] = initial_carry_[i].data() + size_.lead;
      p.final_carry[i] = final_carry_[i].data() + size_.lead;
    }
    p.exchange = exchange_.data();
    p.exchange_bytes = exchange_bytes_;
    p.poll_delays = {200, 50, 10};
    p.wait_limits = {int64_t{1} << 40, &error_, &report_};
    p.arrivals = arrivals_.data();
    return p;
  }

  // Step by step, from the states that the kernel has found: each follows from the one before.
  void Check() const {
    if (error_ != ~0u || report_ != 0) Fail("a watchdog", 0, 0, error_, ~0u);
    for (int64_t direction = 0; direction < size_.directions; ++direction) {
      for (int64_t b = 0; b < size_.batch; ++b) {
        for (int64_t unit = 0; unit < kHidden; ++unit) CheckUnit(direction, b, unit);
      }
    }
  }

  // Of a call by one launch that lacks a block of a scan: both words say so, and the scan's last
  // state is NaN. Its other scans may have been told to stop.
  void CheckTimedOut(int64_t scan) const {
    if (error_ != 0 || report_ != 1) Fail("a missing block", error_, report_, 0, 1);
    const int64_t direction = scan / size_.parts, rows = size_.batch / size_.parts;
    int64_t nans = 0, written = 0;
    for (int64_t b = 0; b < rows; ++b) {
      const int64_t row = RowOf(direction, size_.steps - 1, scan % size_.parts * rows + b);
      for (int64_t i = 0; i < kColumns; ++i) {
        const double x = ToAccumulator(states_[size_.lead + row * kColumns + i]);
        nans += std::isnan(x);
        written += std::isnan(x) || x != 0;  // the missing block's units are as they were
      }
    }
    if (nans == 0 || nans != written) Fail("after a missing block", nans, written, 0, 0);
  }

 private:
  static constexpr int64_t kColumns = Step::kStates * kHidden, kPadding = 4;
  static constexpr int kNarrow = Step::kOutputs - 1;  // outputs that are not in float32
  static constexpr int kMostCarries = Step::kCarries > 0 ? Step::kCarries : 1;

  int64_t Rows() const { return size_.directions * size_.batch; }
  int64_t Cells() const { return size_.steps * Rows() * kHidden; }
  // Elements of a part of the inputs, and of all parts.
  int64_t InputUnits() const { return size_.unit_stride == 0 ? 1 : size_.unit_stride * kHidden; }
  int64_t InputColumns() const { return (Step::kInputs - 1) * InputUnits(); }
  bool IsReversed(int64_t direction) const { return (direction % 2 == 1) != size_.reverse; }
  // Of arrays (directions, steps, batch, ...).
  int64_t RowOf(int64_t direction, int64_t step, int64_t b) const {
    const int64_t t = IsReversed(direction) ? size_.steps - 1 - step : step;
    return (direction * size_.steps + t) * size_.batch + b;
  }
  int64_t InputAt(int64_t row, int64_t part, int64_t unit) const {
    return size_.lead + row * InputColumns() + part * InputUnits() + unit * size_.unit_stride;
  }
  // What precedes a step: (state parts, units) of a batch entry.
  const State* StateBefore(int64_t direction, int64_t step, int64_t b) const {
    return step == 0 ? initial_state_.data() + size_.lead + (direction * size_.batch + b) * kColumns
                     : states_.data() + size_.lead + RowOf(direction, step - 1, b) * kColumns;
  }

  struct Taken {
    const ScanTest* from;
    int product, state;
    Kind kind;

    double Of(const State* states, int64_t unit) const {
      const State* values = states + state * kHidden;
      if (kind == Kind::kState) return ToAccumulator(values[unit]);
      double sum = 0;
      for (int64_t i = 0; i < kHidden; ++i) {
        const double x = ToAccumulator(values[i]);
        sum += kind == Kind::kMean ? x : x * x;
      }
      return sum / kHidden;
    }
  };

  // `slack`: is added to by as much as the kernel may have rounded otherwise, because its parts are
  // sums in float32 that lie next to the middle between two numbers.
  double Product(const double* row, const State* states, int64_t b, int64_t unit,
                 double* slack) const {
    const int64_t together = units_of_part_ > 0 ? units_of_part_ : kHidden;
    double sum = 0;
    for (int64_t first = 0; first < kHidden; first += together) {
      double part = 0, terms = 0;
      for (int64_t k = 0; k < kColumns; ++k) {
        const bool is_of_part = k % kHidden >= first && k % kHidden < first + together;
        if (!is_of_part || row[k] == 0) continue;
        const double term = row[k] * double(ToAccumulator(states[k]));
        part += term, terms += std::fabs(term);
      }
      const bool has_less = b % (size_.batch / size_.parts) % 4 == 0 && unit % 2 == 0;
      sum += units_of_part_ > 0 ? Rounded(part, terms, has_less, slack) : part;
    }
    return sum;
  }

  // `terms`: the sum of their magnitudes.
  double Rounded(double x, double terms, bool has_less, double* slack) const {
    if (!std::isfinite(x) || x == 0) return x;
    // Small numbers of float16 have fewer bits; the last one is dropped after they were rounded.
    const int least = (std::is_same_v<State, float16> ? -24 : -133) + has_less;
    const int exponent = std::ilogb(x) + 1 - bits_of_part_ + has_less;
    const bool is_small = exponent < least;
    const double spacing = std::ldexp(1.0, is_small ? least : exponent);
    const double rounded = std::nearbyint(x / spacing) * spacing;
    constexpr double kTooLarge = std::is_same_v<State, float16> ? 65520 : 0x1.ffp127;
    if (std::fabs(rounded) >= kTooLarge) {
      return std::copysign(std::numeric_limits<double>::infinity(), x);
    }
    const bool is_close = std::fabs(std::fabs(x - rounded) - spacing / 2) < terms * 0x1p-21;
    if ((is_small && has_less) || is_close) *slack += spacing;
    return rounded;
  }

  void CheckUnit(int64_t direction, int64_t b, int64_t unit) const {
    const int64_t at = size_.lead + (direction * size_.batch + b) * kHidden + unit;
    float carry[kMostCarries];
    for (int i = 0; i < Step::kCarries; ++i) carry[i] = initial_carry_[i][at];
    double slack = 0;  // what a carry has kept of it, too
    for (int64_t step = 0; step < size_.steps; ++step) {
      CheckCell(direction, step, b, unit, carry, &slack);
    }
    for (int i = 0; i < Step::kCarries; ++i) {
      Compare<State>("last carry", b, unit, final_carry_[i][at], carry[i], slack);
    }
  }

  void CheckCell(int64_t direction, int64_t step, int64_t b, int64_t unit, float* carry,
                 double* slack) const {
    const int64_t row = RowOf(direction, step, b);
    const State* before = StateBefore(direction, step, b);
    const double* matrix = weights_.data() + direction * Step::kProducts * kHidden * kColumns;
    float products[Step::kProducts], inputs[Step::kInputs], states[Step::kStates],
        outputs[Step::kOutputs];
    for (int g = 0; g < Step::kProducts; ++g) {
      double sum = Product(matrix + (g * kHidden + unit) * kColumns, before, b, unit, slack);
      if (below_ != nullptr) {
        const State* states = below_->StateBefore(direction, step + 1, b);
        const double* row = below_weights_.data() + (g * kHidden + unit) * kColumns;
        sum += Product(row, states, b, unit, slack) * (scale_ ? scale_(states) : 1);
      }
      for (const Taken& taken : taken_) {
        if (taken.product != g) continue;
        sum += taken.Of(taken.from->StateBefore(direction, step + 1, b), unit);
      }
      products[g] = static_cast<float>(sum);
    }
    for (int i = 0; i + 1 < Step::kInputs; ++i) {
      inputs[i] = ToAccumulator(input_[InputAt(row, i, unit)]);
    }
    inputs[Step::kInputs - 1] = bias_[size_.lead + direction * kHidden + unit];
    Step::Apply(products, carry, inputs, states, outputs);
    for (int s = 0; s < Step::kStates; ++s) {
      const State got = states_[size_.lead + row * kColumns + s * kHidden + unit];
      Compare<State>("state", step, unit, ToAccumulator(got), states[s], *slack);
    }
    for (int i = 0; i < kNarrow; ++i) {
      const State got = output_[size_.lead + (row * kNarrow + i) * kHidden + unit];
      Compare<State>("output", step, unit, ToAccumulator(got), outputs[i], *slack);
    }
    const float got = float_output_[size_.lead + row * kHidden + unit];
    Compare<float>("float output", step, unit, got, outputs[kNarrow], *slack);
  }

  template <typename T>
  static void Compare(const char* what, int64_t row, int64_t column, double got, double wanted,
                      double slack) {
    const double rounding = sizeof(T) == 4 ? 0x1p-18 : 0x1p-7;
    const double allowed = rounding * (1 + std::fabs(wanted)) + 2 * slack;
    const bool close = std::isnan(wanted)   ? std::isnan(got)
                       : std::isinf(wanted) ? got == wanted
                                            : std::fabs(got - wanted) <= allowed;
    if (!close) Fail(what, row, column, got, wanted);
  }

  const ScanSize size_;
  const std::vector<double> weights_;
  const ScanTest* below_ = nullptr;
  std::vector<double> below_weights_;
  std::vector<Taken> taken_;
  std::function<double(const State*)> scale_;
  int units_of_part_ = 0, bits_of_part_ = 0;  // 0: products are not rounded
  const int64_t exchange_bytes_;              // of a scan
  std::vector<uint32_t> exchange_;
  std::vector<State> input_;
  std::vector<float> bias_;
  std::vector<State> initial_state_, states_, output_;
  std::vector<float> float_output_;
  std::vector<float> initial_carry_[kMostCarries], final_carry_[kMostCarries];
  uint32_t error_ = ~0u, report_ = 0;
  std::vector<uint32_t> arrivals_;
};

// Weights with which a state neither vanishes nor grows.
template <typename T>
std::vector<T> SmallWeights(int64_t size, int64_t columns) {
  std::vector<T> weights = Normal<T>(size);
  for (T& weight : weights) {
    weight = FromFloat<T>(ToAccumulator(weight) / std::sqrt(float(columns)));
  }
  return weights;
}

}  // namespace jaxsparse
