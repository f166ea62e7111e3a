// The softmax of rows whose scores come in parts. Compiled once for each instruction set, as the
// kernels are.
#pragma once

#include "attention/products_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

JAXSPARSE_INLINE float Logarithm(float x) { return __builtin_logf(x); }
JAXSPARSE_INLINE double Logarithm(double x) { return __builtin_log(x); }

template <typename Acc>
constexpr Acc kInfinity = static_cast<Acc>(__builtin_inff());

// Of 64 rows. A NaN among a row's scores is left out of its greatest one and reaches its sum.
template <typename Acc>
class RunningSoftmax {
  static constexpr int kLanes = kMaxLanes<Acc>;
  using Lanes = Vector<Acc, kLanes>;

 public:
  JAXSPARSE_INLINE void Start() {
    for (int r = 0; r < kCell; ++r) {
      greatest_[r] = -kInfinity<Acc>;
      sums_[r] = 0;
    }
  }

  // Turns `count` columns of products, of 64 rows side by side, into weights; `bits` say which are
  // stored, null: all. What was summed up before is to be multiplied by `factors`.
  JAXSPARSE_INLINE void TakeCell(int64_t count, const uint64_t* bits, Acc scale, Acc* products,
                                 Acc* factors) {
    for (int at = 0; at < kCell; at += kLanes) {
      const Lanes before = Load<kLanes>(greatest_ + at);
      Lanes greatest = before;
      for (int64_t j = 0; j < count; ++j) {
        Lanes s = Load<kLanes>(products + j * kCell + at) * scale;
        if (bits != nullptr) s = LanesOf<kLanes, Acc>(bits[j] >> at) ? s : Lowest();
        Store<kLanes, Acc>(s, products + j * kCell + at);
        greatest = s > greatest ? s : greatest;
      }
      const Lanes reference = Reference(greatest);
      const Lanes factor = Exp<kLanes>(before - reference);
      Lanes sum = Load<kLanes>(sums_ + at) * factor;
      for (int64_t j = 0; j < count; ++j) {
        const Lanes p = Exp<kLanes>(Load<kLanes>(products + j * kCell + at) - reference);
        Store<kLanes, Acc>(p, products + j * kCell + at);
        sum += p;
      }
      Store<kLanes, Acc>(greatest, greatest_ + at);
      Store<kLanes, Acc>(sum, sums_ + at);
      Store<kLanes, Acc>(factor, factors + at);
    }
  }

  // The same for up to 64 products of one row. Returns its factor.
  JAXSPARSE_INLINE Acc TakeRow(int64_t row, int count, Acc scale, Acc* products) {
    Lanes greatest = Broadcast<kLanes>(greatest_[row]);
    for (int i = count; i % kLanes != 0; ++i) products[i] = -kInfinity<Acc>;
    for (int i = 0; i < count; i += kLanes) {
      const Lanes s = Load<kLanes>(products + i) * scale;
      Store<kLanes, Acc>(s, products + i);
      greatest = s > greatest ? s : greatest;
    }
    for (int l = 1; l < kLanes; ++l) {
      if (greatest[l] > greatest[0]) greatest[0] = greatest[l];
    }
    const Lanes reference = Reference(Broadcast<kLanes>(greatest[0]));
    Lanes sum = {};
    for (int i = 0; i < count; i += kLanes) {
      const Lanes p = Exp<kLanes>(Load<kLanes>(products + i) - reference);
      Store<kLanes, Acc>(p, products + i);
      sum += p;
    }
    const Acc factor = Exp<kLanes>(Broadcast<kLanes>(greatest_[row]) - reference)[0];
    greatest_[row] = greatest[0];
    sums_[row] = sums_[row] * factor + Sum<kLanes, Acc>(sum);
    return factor;
  }

  // What weighted sums have to be multiplied by; 0 in a row that sees nothing.
  JAXSPARSE_INLINE Acc Inverse(int64_t row) const { return sums_[row] == 0 ? 0 : 1 / sums_[row]; }
  JAXSPARSE_INLINE Acc LogSum(int64_t row) const {
    return sums_[row] == 0 ? -kInfinity<Acc> : greatest_[row] + Logarithm(sums_[row]);
  }

 private:
  JAXSPARSE_INLINE static Lanes Lowest() { return Broadcast<kLanes>(-kInfinity<Acc>); }
  // What scores are taken relative to. A row of -infinity has no difference from its greatest.
  JAXSPARSE_INLINE static Lanes Reference(Lanes greatest) {
    return greatest == -kInfinity<Acc> ? Lanes{} : greatest;
  }

  alignas(64) Acc greatest_[kCell], sums_[kCell];
};

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
