// The CPU kernel of attention by the rows of a pattern: a task has some rows of all heads. Compiled
// once for each instruction set, as the other kernels are.
#pragma once

#include "attention/csr_cpu.h"
#include "attention/softmax_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// Rows of one head.
template <typename T>
class CsrAttentionRows {
  using Acc = typename Accumulator<T>::type;
  static constexpr int kLanes = kMaxLanes<Acc>;
  static constexpr int64_t kMost = kMostFeatures<Acc>;

 public:
  JAXSPARSE_INLINE CsrAttentionRows(const AttentionProblem& p, int64_t entry, int64_t head)
      : scale_(static_cast<Acc>(p.scale)),
        query_(p.query, p.batch, entry, head, p.groups * p.per_group, p.queries, p.head_size),
        key_(p.key, p.batch, entry, head / p.per_group, p.groups, p.keys, p.head_size),
        value_(p.value, p.batch, entry, head / p.per_group, p.groups, p.keys, p.value_size),
        out_(p.out, p.batch, entry, head, p.groups * p.per_group, p.queries, p.value_size),
        lse_(p.lse.At<Acc>(p.batch, entry) + head * p.queries),
        rows_(p.pattern, p.batch, entry, p.pattern.Own(head / p.per_group, head % p.per_group)) {}

  // More features of values than sums are kept of take a pass for each part of them.
  JAXSPARSE_INLINE void Run(int64_t row) {
    int64_t feature = 0;
    do {
      const int64_t size = PartOf<Acc>(value_.size, feature);
      for (int64_t f = 0; f < size; ++f) sums_[f] = 0;
      greatest_ = -kInfinity<Acc>;
      total_ = 0;
      ForEachChunk(rows_, row, [&](const int64_t* columns, int count) {
        AddChunk(row, columns, count, feature);
      });
      const Acc inverse = total_ == 0 ? 0 : 1 / total_;
      StoreRow(sums_, inverse, size, out_.Row(row) + feature);
      feature += kMost;
    } while (feature < value_.size);
    lse_[row] = total_ == 0 ? -kInfinity<Acc> : greatest_ + Logarithm(total_);
  }

 private:
  // A NaN among scores is left out of the greatest one and reaches the total.
  JAXSPARSE_INLINE void AddChunk(int64_t row, const int64_t* columns, int count, int64_t feature) {
    PrefetchRows(value_, columns, count);
    DotsOfEntries(query_.Row(row), key_, columns, count, weights_);
    Acc greatest = greatest_;
    for (int i = 0; i < count; ++i) {
      weights_[i] *= scale_;
      greatest = weights_[i] > greatest ? weights_[i] : greatest;
    }
    // Without scores that are not -infinity there is no difference from the greatest.
    const Acc shift = greatest == -kInfinity<Acc> ? 0 : greatest;
    const Acc factor = Exp<1>(Vector<Acc, 1>{greatest_ - shift})[0];
    greatest_ = greatest;
    Acc total = 0;
    for (int i = 0; i < count; i += kLanes) {
      Store<kLanes, Acc>(Exp<kLanes>(Load<kLanes>(weights_ + i) - shift), weights_ + i);
    }
    for (int i = 0; i < count; ++i) total += weights_[i];
    total_ = total_ * factor + total;
    for (int64_t f = 0; f < PartOf<Acc>(value_.size, feature); ++f) sums_[f] *= factor;
    AddRowsOfEntries(weights_, value_, feature, columns, count, sums_);
  }

  const Acc scale_;
  Acc greatest_ = 0, total_ = 0;
  const HeadRows<const T> query_, key_, value_;
  const HeadRows<T> out_;
  Acc* lse_;
  const CsrRows rows_;
  alignas(64) Acc weights_[kCsrEntries], sums_[kMost];
};

template <typename T>
void CsrAttention(const AttentionProblem& p, Workers& workers) {
  const int64_t heads = p.groups * p.per_group;
  ForEachRowsOfHead(p.pattern, p.batch, heads, heads * (p.head_size + p.value_size), workers,
                    [&](int64_t entry, int64_t head, int64_t first, int64_t last) {
                      CsrAttentionRows<T> rows(p, entry, head);
                      for (int64_t row = first; row < last; ++row) rows.Run(row);
                    });
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
