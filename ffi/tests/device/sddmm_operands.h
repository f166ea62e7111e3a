// A sampled dense-dense product of random operands, and what it is in float64.
#pragma once

#include <numeric>

#include "device/operands.h"
#include "sddmm/problem.h"

namespace jaxsparse {

struct SddmmSize {
  int64_t rows, columns, d;
  double density;
  double density_of_longest = 0;  // of row 1, where it is not 0
};

// Two batch entries; arrays begin `lead` elements behind an aligned place.
template <typename T, typename Out, typename Index>
class SddmmTest {
  static constexpr int64_t kEntries = 2, kPadding = 5;
  static constexpr float kUntouched = 77, kInfinity = std::numeric_limits<float>::infinity();

  SddmmSize size_;
  Disorder disorder_;
  bool scaled_;
  int64_t lead_, nse_ = 0;
  std::vector<int32_t> offsets_{0}, order_;
  std::vector<Index> columns_;
  std::vector<T> x_, y_, scale_;
  std::vector<Out> out_;

  void MakePattern() {
    std::bernoulli_distribution stored(size_.density), of_longest(size_.density_of_longest);
    columns_.resize(static_cast<size_t>(lead_));
    for (int64_t r = 0; r < size_.rows; ++r) {
      const auto first = static_cast<std::ptrdiff_t>(columns_.size());
      const bool longest = r == 1 && size_.density_of_longest != 0;
      for (int64_t c = 0; c < size_.columns; ++c) {
        if (r == size_.rows / 2 || !(longest ? of_longest : stored)(generator)) continue;
        const int times = disorder_ == Disorder::kRepeated && c % 7 == 0 ? 2 : 1;
        columns_.insert(columns_.end(), times, static_cast<Index>(c));
      }
      if (disorder_ == Disorder::kReversed && r % 3 == 0) {
        std::reverse(columns_.begin() + first, columns_.end());
      }
      if (disorder_ == Disorder::kReversed && r % 3 == 1) {
        std::shuffle(columns_.begin() + first, columns_.end(), generator);
      }
      offsets_.push_back(static_cast<int32_t>(columns_.size()) - static_cast<int32_t>(lead_));
    }
    columns_.resize(columns_.size() + kPadding, static_cast<Index>(-1));  // not to be read
    nse_ = static_cast<int64_t>(columns_.size()) - lead_;
    order_.resize(static_cast<size_t>(size_.rows));
    std::iota(order_.begin(), order_.end(), 0);
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
      return offsets_[a + 1] - offsets_[a] > offsets_[b + 1] - offsets_[b];
    });
    if (disorder_ == Disorder::kWrongOffsets) {
      offsets_[size_.rows / 3] = -7;
      offsets_[size_.rows / 2] = offsets_[size_.rows] = 1 << 30;
    }
  }

  void MakeOperands() {
    x_ = Normal<T>(lead_ + kEntries * size_.rows * size_.d);
    y_ = Normal<T>(lead_ + kEntries * size_.columns * size_.d);
    scale_ = Normal<T>(lead_ + kEntries * nse_);
    out_.resize(static_cast<size_t>(lead_ + kEntries * nse_), FromFloat<Out>(kUntouched));
    if (disorder_ == Disorder::kNan) x_[x_.size() / 3] = y_[y_.size() / 2] = FromFloat<T>(NAN);
    if (disorder_ == Disorder::kInfinite) {
      x_[x_.size() / 3] = FromFloat<T>(kInfinity);
      y_[y_.size() / 2] = FromFloat<T>(-kInfinity);
      // Finite, but no sum of planes; and with a product that is infinite.
      if (sizeof(T) == 4) x_[x_.size() / 4] = y_[y_.size() / 5] = FromFloat<T>(3.4e38f);
    }
  }

 public:
  SddmmTest(const SddmmSize& size, Disorder disorder, bool scaled, int64_t lead)
      : size_(size), disorder_(disorder), scaled_(scaled), lead_(lead) {
    MakePattern();
    MakeOperands();
  }

  SddmmProblem Problem() {
    SddmmProblem p;
    p.pattern.rows = size_.rows;
    p.pattern.columns = size_.columns;
    p.pattern.nse = nse_;
    p.pattern.row_offsets = Of(offsets_);
    p.pattern.column_indices = Of(columns_, lead_, 0);
    p.pattern.row_order = Of(order_);
    p.d = size_.d;
    p.batch.rank = 1;
    p.batch.count = p.batch.sizes[0] = kEntries;
    p.x = Of(x_, lead_, size_.rows * size_.d);
    p.y = Of(y_, lead_, size_.columns * size_.d);
    if (scaled_) p.scale_by = Of(scale_, lead_, nse_);
    p.out = Of(out_, lead_, nse_);
    return p;
  }

  std::vector<Out>& out() { return out_; }

  void Check() const {
    const float before = ToAccumulator(out_[lead_ - 1]);
    if (before != kUntouched) Fail("sddmm", -1, -1, before, kUntouched);
    if (disorder_ == Disorder::kWrongOffsets) return;  // nothing was out of bounds
    for (int64_t entry = 0; entry < kEntries; ++entry) {
      for (int64_t r = 0; r < size_.rows; ++r) {
        for (int64_t i = offsets_[r]; i < offsets_[r + 1]; ++i) CheckStored(entry, r, i);
      }
      for (int64_t i = offsets_[size_.rows]; i < nse_; ++i) {
        CheckElement(entry, size_.rows, i, 0, 0);
      }
    }
  }

 private:
  void CheckElement(int64_t entry, int64_t row, int64_t i, double sum, double most) const {
    const double got = ToAccumulator(out_[lead_ + entry * nse_ + i]);
    if (!IsClose<Out>(got, sum, most)) Fail("sddmm", row, i, got, sum);
  }

  void CheckStored(int64_t entry, int64_t r, int64_t i) const {
    const T* of_row = x_.data() + lead_ + (entry * size_.rows + r) * size_.d;
    const auto column = static_cast<int64_t>(columns_[lead_ + i]);
    const T* of_column = y_.data() + lead_ + (entry * size_.columns + column) * size_.d;
    const double factor = scaled_ ? ToAccumulator(scale_[lead_ + entry * nse_ + i]) : 1;
    float in_float = 0;
    double sum = 0, most = 0;
    for (int64_t d = 0; d < size_.d; ++d) {
      const float a = ToAccumulator(of_row[d]), b = ToAccumulator(of_column[d]);
      in_float += a * b;
      sum += double(a) * b;
      most += std::fabs(double(a) * b);
    }
    // What overflows in float32 is infinite there.
    sum = (std::isfinite(in_float) ? sum : in_float) * factor;
    if (std::fabs(sum) > std::numeric_limits<float>::max()) sum = std::copysign(kInfinity, sum);
    CheckElement(entry, r, i, sum, most * std::fabs(factor));
  }
};

}  // namespace jaxsparse
