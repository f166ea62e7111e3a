// A sparse-dense product of random operands, and what it is in float64.
#pragma once

#include <numeric>

#include "device/operands.h"
#include "spmm/problem.h"

namespace jaxsparse {

struct SpmmSize {
  int64_t rows, inner, n;
  double density;
  double density_of_longest = 0;  // of row 1, where it is not 0
  int64_t batch = 1;              // of values, x and results
};

struct SpmmOptions {
  Disorder disorder = Disorder::kNone;
  bool permuted = false, left = false;
  bool bias = false;  // and an activation
  bool preactivation = false;
};

template <typename T, typename Out, typename Index>
class SpmmTest {
  static constexpr int kPadding = 2;

  SpmmSize size_;
  SpmmOptions options_;
  int64_t nse_ = 0;
  std::vector<int32_t> offsets_{0}, order_, permutation_;
  std::vector<Index> columns_;
  std::vector<T> values_, x_, bias_;
  std::vector<Out> out_, preactivation_;

  void MakePattern() {
    std::bernoulli_distribution stored(size_.density), of_longest(size_.density_of_longest);
    for (int64_t r = 0; r < size_.rows; ++r) {
      const auto first = static_cast<std::ptrdiff_t>(columns_.size());
      const bool longest = r == 1 && size_.density_of_longest != 0;
      for (int64_t k = 0; k < size_.inner; ++k) {
        if (r == size_.rows / 2 || !(longest ? of_longest : stored)(generator)) continue;
        const int times = options_.disorder == Disorder::kRepeated && k % 7 == 0 ? 2 : 1;
        columns_.insert(columns_.end(), times, static_cast<Index>(k));
      }
      if (options_.disorder == Disorder::kReversed) {
        std::reverse(columns_.begin() + first, columns_.end());
      }
      if (options_.disorder == Disorder::kShuffled) {
        std::shuffle(columns_.begin() + first, columns_.end(), generator);
      }
      offsets_.push_back(static_cast<int32_t>(columns_.size()));
    }
    columns_.resize(columns_.size() + kPadding, static_cast<Index>(-1));  // not to be read
    nse_ = static_cast<int64_t>(columns_.size());
    permutation_.resize(columns_.size());
    std::iota(permutation_.begin(), permutation_.end(), 0);
    if (options_.permuted) std::shuffle(permutation_.begin(), permutation_.end(), generator);
    order_.resize(static_cast<size_t>(size_.rows));
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
      return offsets_[a + 1] - offsets_[a] > offsets_[b + 1] - offsets_[b];
    });
  }

  void MakeOperands() {
    values_ = Normal<T>(size_.batch * nse_);
    x_ = Normal<T>(size_.batch * size_.inner * size_.n);
    bias_ = Normal<T>(size_.rows);
    const auto results = static_cast<size_t>(size_.batch * size_.rows * size_.n);
    out_.resize(results, FromFloat<Out>(NAN));
    preactivation_.resize(results, FromFloat<Out>(NAN));
    const float infinity = std::numeric_limits<float>::infinity();
    const Disorder disorder = options_.disorder;
    if (disorder == Disorder::kNan && !x_.empty()) x_[x_.size() / 3] = FromFloat<T>(NAN);
    if (disorder == Disorder::kInfinite && !x_.empty()) x_[x_.size() / 3] = FromFloat<T>(infinity);
    if (disorder == Disorder::kInfinite && nse_ > 5) values_[3] = FromFloat<T>(-infinity);
    // Their product is infinite, though planes of it are of both signs.
    if (disorder == Disorder::kHuge) {
      values_[3] = FromFloat<T>(0x1.ffcp80f);
      x_[options_.left ? 3 : 3 * size_.n] = FromFloat<T>(0x1p80f);
    }
  }

 public:
  SpmmTest(const SpmmSize& size, const SpmmOptions& options) : size_(size), options_(options) {
    MakePattern();
    MakeOperands();
  }

  SpmmProblem Problem() {
    SpmmProblem p;
    p.pattern.rows = size_.rows;
    p.pattern.columns = size_.inner;
    p.pattern.nse = nse_;
    p.pattern.row_offsets = Of(offsets_);
    p.pattern.column_indices = Of(columns_);
    p.pattern.row_order = Of(order_);
    if (options_.permuted) p.pattern.permutation = Of(permutation_);
    p.n = size_.n;
    p.dense_on_left = options_.left;
    p.activation = options_.bias ? Activation::kRelu : Activation::kNone;
    p.batch.rank = 1;
    p.batch.count = p.batch.sizes[0] = size_.batch;
    p.values = Of(values_, 0, nse_);
    p.x = Of(x_, 0, size_.inner * size_.n);
    if (options_.bias) p.bias = Of(bias_);
    p.out = Of(out_, 0, size_.rows * size_.n);
    if (options_.preactivation) p.preactivation = Of(preactivation_, 0, size_.rows * size_.n);
    return p;
  }

  std::vector<Out>& out() { return out_; }

  void Check() const {
    for (int64_t entry = 0; entry < size_.batch; ++entry) {
      for (int64_t r = 0; r < size_.rows; ++r) {
        for (int64_t c = 0; c < size_.n; ++c) CheckElement(entry, r, c);
      }
    }
  }

 private:
  void CheckElement(int64_t entry, int64_t r, int64_t c) const {
    const T* values = values_.data() + entry * nse_;
    const T* x = x_.data() + entry * size_.inner * size_.n;
    double sum = 0, most = 0;
    for (int32_t i = offsets_[r]; i < offsets_[r + 1]; ++i) {
      const auto k = static_cast<int64_t>(columns_[i]);
      const double product =
          double(ToAccumulator(values[options_.permuted ? permutation_[i] : i])) *
          ToAccumulator(x[options_.left ? c * size_.inner + k : k * size_.n + c]);
      sum += product;
      most += std::fabs(product);
    }
    if (std::fabs(sum) > std::numeric_limits<float>::max()) {
      sum = std::copysign(std::numeric_limits<double>::infinity(), sum);
    }
    if (options_.bias) sum += ToAccumulator(bias_[r]);
    const int64_t at =
        entry * size_.rows * size_.n + (options_.left ? c * size_.rows + r : r * size_.n + c);
    const double before = ToAccumulator(preactivation_[at]), got = ToAccumulator(out_[at]);
    if (options_.preactivation && !IsClose<Out>(before, sum, most)) {
      Fail("spmm's preactivation", r, c, before, sum);
    }
    if (options_.bias && sum < 0) sum = 0;
    if (!IsClose<Out>(got, sum, most)) Fail("spmm", r, c, got, sum);
  }
};

}  // namespace jaxsparse
