// A sparse-dense product of random operands, and what it is in float64.
#pragma once

#include "device/operands.h"
#include "spmm/problem.h"

namespace jaxsparse {

struct SpmmSize {
  int64_t rows, inner, n;
  double density;
  double density_of_longest = 0;  // of every eighth row, where it is not 0
  int64_t batch = 1;
};

struct SpmmOptions {
  Disorder disorder = Disorder::kNone;
  bool permuted = false;
  bool bias = false;
  Activation activation = Activation::kNone;
  bool preactivation = false;
  bool shared_values = false, shared_x = false, shared_bias = false;  // by all batch entries
  bool own_patterns = false;
  bool shuffled_rows = false;  // taken in no order of their lengths
  int64_t lead = 0;            // elements between an aligned place and each array
};

inline double Activated(Activation activation, double x) {
  if (activation == Activation::kRelu) return x < 0 ? 0 : x;
  if (activation == Activation::kGelu) {
    return x / 2 * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
  }
  return x;
}

template <typename T, typename Out, typename Index>
class SpmmTest {
  SpmmSize size_;
  SpmmOptions options_;
  RandomPattern<Index> pattern_;
  int64_t values_stride_, x_stride_, bias_stride_, out_stride_;  // of batch entries
  std::vector<int32_t> permutation_;
  // Of a transposed product, the pattern as it is stored.
  std::vector<int32_t> stored_offsets_;
  std::vector<Index> stored_columns_;
  std::vector<T> values_, x_, bias_;
  std::vector<Out> out_, preactivation_;

  // The pattern that is walked is the transpose of another one, which is out of order as it is.
  void MakeStored() {
    const int64_t nse = pattern_.nse(), lead = options_.lead;
    permutation_.assign(static_cast<size_t>(lead + nse), 0);
    stored_columns_.assign(static_cast<size_t>(lead + nse), static_cast<Index>(-1));
    struct Entry {
      int64_t column, place;  // in a row of the stored one; of the walked one
    };
    std::vector<std::vector<Entry>> rows(static_cast<size_t>(size_.inner));
    for (int64_t r = 0; r < size_.rows; ++r) {
      for (int64_t i = pattern_.offset(r); i < pattern_.offset(r + 1); ++i) {
        rows[pattern_.column(i)].push_back({r, i});
      }
    }
    stored_offsets_ = {0};
    int32_t at = 0;
    for (size_t r = 0; r < rows.size(); ++r) {
      if (options_.disorder == Disorder::kReversed) std::reverse(rows[r].begin(), rows[r].end());
      if (options_.disorder == Disorder::kShuffled && r % 2 == 1) {
        std::shuffle(rows[r].begin(), rows[r].end(), generator);
      }
      for (const auto& [column, place] : rows[r]) {
        permutation_[lead + place] = at;
        stored_columns_[lead + at++] = static_cast<Index>(column);
      }
      stored_offsets_.push_back(at);
    }
  }

  void MakeOperands() {
    const int64_t nse = pattern_.nse(), lead = options_.lead;
    if (options_.permuted) MakeStored();
    values_ = Normal<T>(lead + size_.batch * nse);
    x_ = Normal<T>(lead + size_.batch * size_.inner * size_.n);
    bias_ = Normal<T>(lead + size_.batch * size_.rows);
    const auto results = static_cast<size_t>(lead + size_.batch * out_stride_);
    out_.resize(results, FromFloat<Out>(NAN));
    preactivation_.resize(results, FromFloat<Out>(NAN));
    const float infinity = std::numeric_limits<float>::infinity();
    const Disorder disorder = options_.disorder;
    if (disorder == Disorder::kNan && !x_.empty()) x_[x_.size() / 3] = FromFloat<T>(NAN);
    if (disorder == Disorder::kInfinite && !x_.empty()) x_[x_.size() / 3] = FromFloat<T>(infinity);
    if (disorder == Disorder::kInfinite && nse > 5) values_[lead + 3] = FromFloat<T>(-infinity);
    // Their product is infinite, though components of it are of both signs.
    if (disorder == Disorder::kHuge) {
      values_[lead + 3] = FromFloat<T>(0x1.ffcp80f);
      x_[lead + 3 * size_.n] = FromFloat<T>(0x1p80f);
    }
  }

 public:
  SpmmTest(const SpmmSize& size, const SpmmOptions& options)
      : size_(size),
        options_(options),
        pattern_(size.rows, size.inner, size.density, size.density_of_longest, options.disorder,
                 options.lead),
        values_stride_(options.shared_values ? 0 : pattern_.nse()),
        x_stride_(options.shared_x ? 0 : size.inner * size.n),
        bias_stride_(options.shared_bias ? 0 : size.rows),
        out_stride_(size.rows * size.n) {
    MakeOperands();
  }

  SpmmProblem Problem() {
    const int64_t lead = options_.lead;
    SpmmProblem p;
    if (options_.shuffled_rows) pattern_.ShuffleRows();
    if (options_.disorder == Disorder::kWrongIndices) {
      pattern_.SpoilIndices();
      Spoil(permutation_);
      Spoil(stored_offsets_);
      Spoil(stored_columns_);
    }
    const int64_t copies = options_.own_patterns ? size_.batch : 0;
    p.pattern = pattern_.AsOperand(copies);
    p.stored = p.pattern;
    if (options_.permuted) {
      p.pattern.permutation = CopiesOf(permutation_, lead, copies);
      p.stored.rows = size_.inner;
      p.stored.columns = size_.rows;
      p.stored.row_offsets = CopiesOf(stored_offsets_, 0, copies);
      p.stored.column_indices = CopiesOf(stored_columns_, lead, copies);
    }
    p.n = size_.n;
    p.activation = options_.activation;
    p.batch.rank = 1;
    p.batch.count = p.batch.sizes[0] = size_.batch;
    p.values = Of(values_, lead, values_stride_);
    p.x = Of(x_, lead, x_stride_);
    if (options_.bias) p.bias = Of(bias_, lead, bias_stride_);
    p.out = Of(out_, lead, out_stride_);
    if (options_.preactivation) p.preactivation = Of(preactivation_, lead, out_stride_);
    return p;
  }

  std::vector<Out>& out() { return out_; }

  void Check() const {
    for (int64_t i = 0; i < options_.lead; ++i) {
      for (const float before : {ToAccumulator(out_[i]), ToAccumulator(preactivation_[i])}) {
        if (!std::isnan(before)) Fail("in front of spmm", -1, i, before, NAN);
      }
    }
    if (AreWrong(options_.disorder)) return;
    for (int64_t entry = 0; entry < size_.batch; ++entry) {
      for (int64_t r = 0; r < size_.rows; ++r) {
        for (int64_t c = 0; c < size_.n; ++c) CheckElement(entry, r, c);
      }
    }
  }

 private:
  void CheckElement(int64_t entry, int64_t r, int64_t c) const {
    const int64_t lead = options_.lead;
    const T* values = values_.data() + lead + entry * values_stride_;
    const T* x = x_.data() + lead + entry * x_stride_;
    double sum = 0, most = 0;
    for (int64_t i = pattern_.offset(r); i < pattern_.offset(r + 1); ++i) {
      const int64_t k = pattern_.column(i);
      const double product =
          double(ToAccumulator(values[options_.permuted ? permutation_[lead + i] : i])) *
          ToAccumulator(x[k * size_.n + c]);
      sum += product;
      most += std::fabs(product);
    }
    if (std::fabs(sum) > std::numeric_limits<float>::max()) {
      sum = std::copysign(std::numeric_limits<double>::infinity(), sum);
    }
    if (options_.bias) {
      const double bias = ToAccumulator(bias_[lead + entry * bias_stride_ + r]);
      sum += bias;
      most += std::fabs(bias);
    }
    const int64_t at = lead + entry * out_stride_ + r * size_.n + c;
    const double before = ToAccumulator(preactivation_[at]), got = ToAccumulator(out_[at]);
    if (options_.preactivation && !IsClose<Out>(before, sum, most)) {
      Fail("spmm's preactivation", r, c, before, sum);
    }
    const double wanted = Activated(options_.activation, sum);
    if (!IsClose<Out>(got, wanted, most)) Fail("spmm", r, c, got, wanted);
  }
};

}  // namespace jaxsparse
