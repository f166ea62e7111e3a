// The CPU kernel of attention's cotangents by the rows of a pattern, of queries, and by those of
// the transposed pattern, of keys and values. Compiled once for each instruction set, as the other
// kernels are.
#pragma once

#include "attention/csr_cpu.h"
#include "attention/softmax_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// Rows of a head, of queries or of keys. They have factors `a`, of the scores (queries or keys),
// and `b`, of the weights' cotangents (cotangents of the result, or values); columns have the other
// two.
template <typename T, Owner kOwner>
class CsrCotangentRows {
  using Acc = typename Accumulator<T>::type;
  using Rows = HeadRows<const T>;
  static constexpr int kLanes = kMaxLanes<Acc>;
  static constexpr int64_t kMost = kMostFeatures<Acc>;
  static constexpr bool kByKeys = kOwner == Owner::kKeys;
  static constexpr int kResults = kByKeys ? 2 : 1;  // of factors a, b

 public:
  // `head`: of keys or of queries.
  JAXSPARSE_INLINE CsrCotangentRows(const AttentionCotangentProblem& p, int64_t entry, int64_t head)
      : problem_(p),
        entry_(entry),
        group_(kByKeys ? head : head / p.per_group),
        heads_(kByKeys ? p.per_group : 1),
        first_head_(*this, kByKeys ? 0 : head % p.per_group) {
    if constexpr (kByKeys) {
      results_[0] = {p.ct_key, p.batch, entry, head, p.groups, p.keys, p.head_size};
      results_[1] = {p.ct_value, p.batch, entry, head, p.groups, p.keys, p.value_size};
    } else {
      const int64_t heads = p.groups * p.per_group;
      results_[0] = {p.ct_query, p.batch, entry, head, heads, p.queries, p.head_size};
    }
  }

  // More features than sums are kept of take a pass for each part of them.
  JAXSPARSE_INLINE void Run(int64_t row) {
    int64_t feature = 0;
    do {
      for (int i = 0; i < kResults; ++i) {
        const int64_t size = PartOf<Acc>(results_[i].size, feature);
        for (int64_t f = 0; f < size; ++f) sums_[i][f] = 0;
      }
      AddTerms(first_head_, row, feature);
      for (int64_t i = 1; i < heads_; ++i) AddTerms(Head(*this, i), row, feature);
      for (int i = 0; i < kResults; ++i) {
        const int64_t size = PartOf<Acc>(results_[i].size, feature);
        StoreRow(sums_[i], Acc(1), size, results_[i].Row(row) + feature);
      }
      feature += kMost;
    } while (feature < results_[0].size || feature < results_[kResults - 1].size);
  }

 private:
  // What there is of one query head.
  struct Head {
    Rows a, b, own_a, own_b;
    const Acc *lse, *ct_sums;
    CsrRows rows;

    JAXSPARSE_INLINE Head(const CsrCotangentRows& of, int64_t of_group)
        : rows(of.OwnPattern(), of.problem_.batch, of.entry_,
               of.OwnPattern().Own(of.group_, of_group)) {
      const AttentionCotangentProblem& p = of.problem_;
      const int64_t heads = p.groups * p.per_group, head = of.group_ * p.per_group + of_group;
      const Rows query{p.query, p.batch, of.entry_, head, heads, p.queries, p.head_size};
      const Rows ct_out{p.ct_out, p.batch, of.entry_, head, heads, p.queries, p.value_size};
      const Rows key{p.key, p.batch, of.entry_, of.group_, p.groups, p.keys, p.head_size};
      const Rows value{p.value, p.batch, of.entry_, of.group_, p.groups, p.keys, p.value_size};
      a = kByKeys ? query : key;
      b = kByKeys ? ct_out : value;
      own_a = kByKeys ? key : query;
      own_b = kByKeys ? value : ct_out;
      lse = p.lse.At<const Acc>(p.batch, of.entry_) + head * p.queries;
      ct_sums = p.ct_sums.At<const Acc>(p.batch, of.entry_) + head * p.queries;
    }
  };

  JAXSPARSE_INLINE const MaskPattern& OwnPattern() const {
    return kByKeys ? problem_.transposed_pattern : problem_.pattern;
  }

  JAXSPARSE_INLINE void AddTerms(const Head& head, int64_t row, int64_t feature) {
    const Acc scale = static_cast<Acc>(problem_.scale);
    ForEachChunk(head.rows, row, [&](const int64_t* columns, int count) {
      PrefetchRows(head.b, columns, count);
      DotsOfEntries(head.own_a.Row(row), head.a, columns, count, weights_);
      DotsOfEntries(head.own_b.Row(row), head.b, columns, count, cotangents_);
      for (int i = 0; i < count; ++i) {
        const int64_t query_row = kByKeys ? columns[i] : row;
        weights_[i] = weights_[i] * scale - TakenFromScores(head.lse[query_row]);
        cotangents_[i] += head.ct_sums[query_row];
      }
      for (int i = 0; i < count; i += kLanes) {
        const auto weight = Exp<kLanes>(Load<kLanes>(weights_ + i));
        Store<kLanes, Acc>(weight, weights_ + i);
        Store<kLanes, Acc>(weight * scale * Load<kLanes>(cotangents_ + i), cotangents_ + i);
      }
      AddRowsOfEntries(cotangents_, head.a, feature, columns, count, sums_[0]);
      if (kByKeys) AddRowsOfEntries(weights_, head.b, feature, columns, count, sums_[1]);
    });
  }

  const AttentionCotangentProblem& problem_;
  int64_t entry_, group_, heads_;  // of a group, if these are rows of keys
  Head first_head_;
  HeadRows<T> results_[kResults];
  alignas(64) Acc weights_[kCsrEntries], cotangents_[kCsrEntries], sums_[2][kMost];
};

template <typename T>
void CsrCotangent(const AttentionCotangentProblem& p, Workers& workers) {
  const int64_t heads = p.groups * p.per_group, sizes = p.head_size + p.value_size;
  ForEachRowsOfHead(p.pattern, p.batch, heads, 2 * heads * sizes, workers,
                    [&](int64_t entry, int64_t head, int64_t first, int64_t last) {
                      CsrCotangentRows<T, Owner::kQueries> rows(p, entry, head);
                      for (int64_t row = first; row < last; ++row) rows.Run(row);
                    });
  ForEachRowsOfHead(p.transposed_pattern, p.batch, p.groups, 2 * heads * sizes, workers,
                    [&](int64_t entry, int64_t head, int64_t first, int64_t last) {
                      CsrCotangentRows<T, Owner::kKeys> rows(p, entry, head);
                      for (int64_t row = first; row < last; ++row) rows.Run(row);
                    });
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
