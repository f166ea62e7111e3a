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

// What is taken from a query's scores before their exponentials: weights of one that sees nothing
// are 0.
template <typename Acc>
JAXSPARSE_INLINE Acc TakenFromScores(Acc lse) {
  return lse == -kInfinity<Acc> ? kInfinity<Acc> : lse;
}

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

  // The same for products of single positions. There must be room for a multiple of the lanes.
  JAXSPARSE_INLINE void TakePositions(const Positions& positions, uint64_t used_rows, Acc scale,
                                      Acc* products, Acc* factors) {
    for (uint64_t rows = used_rows; rows != 0; rows &= rows - 1) {
      const int r = __builtin_ctzll(rows), begin = positions.begins[r];
      Acc greatest = greatest_[r];
      for (int i = begin; i < positions.begins[r + 1]; ++i) {
        products[i] *= scale;
        greatest = products[i] > greatest ? products[i] : greatest;
      }
      const Acc reference = greatest == -kInfinity<Acc> ? 0 : greatest;
      for (int i = begin; i < positions.begins[r + 1]; ++i) products[i] -= reference;
      factors[r] = greatest_[r] - reference;
      greatest_[r] = greatest;
    }
    for (int i = 0; i < positions.count(); i += kLanes) {
      Store<kLanes, Acc>(Exp<kLanes>(Load<kLanes>(products + i)), products + i);
    }
    for (int r = 0; r < kCell; r += kLanes) {
      Store<kLanes, Acc>(Exp<kLanes>(Load<kLanes>(factors + r)), factors + r);
    }
    for (uint64_t rows = used_rows; rows != 0; rows &= rows - 1) {
      const int r = __builtin_ctzll(rows);
      Acc sum = 0;
      for (int i = positions.begins[r]; i < positions.begins[r + 1]; ++i) sum += products[i];
      sums_[r] = sums_[r] * factors[r] + sum;
    }
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
