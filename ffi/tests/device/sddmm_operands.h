// A sampled dense-dense product of random operands, and what it is in float64.
#pragma once

#include "device/operands.h"
#include "sddmm/problem.h"

namespace jaxsparse {

struct SddmmSize {
  int64_t rows, columns, d;
  double density;
  double density_of_longest = 0;  // of every eighth row, where it is not 0
  bool shared_y = false;          // by batch entries
  int64_t entries = 2;            // of the batch
};

// Arrays begin `lead` elements behind an aligned place.
template <typename T, typename Out, typename Index>
class SddmmTest {
  static constexpr float kUntouched = 77, kInfinity = std::numeric_limits<float>::infinity();

  SddmmSize size_;
  Disorder disorder_;
  bool scaled_;
  int64_t lead_;
  RandomPattern<Index> pattern_;
  int64_t nse_;
  std::vector<T> x_, y_, scale_;
  std::vector<Out> out_;

  void MakeOperands() {
    x_ = Normal<T>(lead_ + size_.entries * size_.rows * size_.d);
    y_ = Normal<T>(lead_ + size_.entries * size_.columns * size_.d);
    scale_ = Normal<T>(lead_ + size_.entries * nse_);
    out_.resize(static_cast<size_t>(lead_ + size_.entries * nse_), FromFloat<Out>(kUntouched));
    if (disorder_ == Disorder::kNan) x_[x_.size() / 3] = y_[y_.size() / 2] = FromFloat<T>(NAN);
    if (disorder_ == Disorder::kInfinite) {
      x_[x_.size() / 3] = FromFloat<T>(kInfinity);
      y_[y_.size() / 2] = FromFloat<T>(-kInfinity);
      // Finite, but no sum of components; and with a product that is infinite.
      if (sizeof(T) == 4) x_[x_.size() / 4] = y_[y_.size() / 5] = FromFloat<T>(3.4e38f);
    }
  }

 public:
  SddmmTest(const SddmmSize& size, Disorder disorder, bool scaled, int64_t lead)
      : size_(size),
        disorder_(disorder),
        scaled_(scaled),
        lead_(lead),
        pattern_(size.rows, size.columns, size.density, size.density_of_longest, disorder, lead),
        nse_(pattern_.nse()) {
    MakeOperands();
  }

  SddmmProblem Problem(bool own_patterns = false) {
    SddmmProblem p;
    if (disorder_ == Disorder::kWrongIndices) pattern_.SpoilIndices();
    p.pattern = pattern_.AsOperand(own_patterns ? size_.entries : 0);
    p.d = size_.d;
    p.batch.rank = size_.entries > 1 ? 1 : 0;
    p.batch.count = p.batch.sizes[0] = size_.entries;
    p.x = Of(x_, lead_, size_.rows * size_.d);
    p.y = Of(y_, lead_, size_.shared_y ? 0 : size_.columns * size_.d);
    if (scaled_) p.scale_by = Of(scale_, lead_, nse_);
    p.out = Of(out_, lead_, nse_);
    return p;
  }

  std::vector<Out>& out() { return out_; }

  void Check() const {
    const float before = ToAccumulator(out_[lead_ - 1]);
    if (before != kUntouched) Fail("sddmm", -1, -1, before, kUntouched);
    if (AreWrong(disorder_)) return;
    for (int64_t entry = 0; entry < size_.entries; ++entry) {
      for (int64_t r = 0; r < size_.rows; ++r) {
        for (int64_t i = pattern_.offset(r); i < pattern_.offset(r + 1); ++i) {
          CheckStored(entry, r, i);
        }
      }
      for (int64_t i = pattern_.offset(size_.rows); i < nse_; ++i) {
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
    const int64_t of_y = size_.shared_y ? 0 : entry;
    const T* of_column = y_.data() + lead_ + (of_y * size_.columns + pattern_.column(i)) * size_.d;
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
