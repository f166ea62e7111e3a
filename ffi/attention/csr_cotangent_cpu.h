// The CPU kernel of attention's cotangents by the rows of a pattern, of queries, and by those of
// the transposed pattern, of keys and values. Compiled once for each instruction set, as the other
// kernels are.
#pragma once

#include "attention/csr_cpu.h"
#include "attention/softmax_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

enum class CsrOwner { kQueries, kKeys };

// One row of a head, of queries or of keys. It has factors `a`, of the scores (queries or keys),
// and `b`, of the weights' cotangents (cotangents of the result, or values); columns have the other
// two.
template <typename T, CsrOwner kOwner>
class CsrCotangentRow {
  using Acc = typename Accumulator<T>::type;
  using Rows = HeadRows<const T>;
  static constexpr int kLanes = kMaxLanes<Acc>;
  static constexpr int64_t kMost = kMostFeatures<Acc>;
  static constexpr bool kByKeys = kOwner == CsrOwner::kKeys;
  static constexpr int kResults = kByKeys ? 2 : 1;  // of factors a, b

 public:
  // `head`: of keys or of queries.
  JAXSPARSE_INLINE CsrCotangentRow(const AttentionCotangentProblem& p, int64_t entry, int64_t head)
      : problem_(p),
        entry_(entry),
        group_(kByKeys ? head : head / p.per_group),
        first_of_group_(kByKeys ? 0 : head % p.per_group) {
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
        for (int64_t f = 0; f < kMost; ++f) sums_[i][f] = 0;
      }
      const int64_t heads = kByKeys ? problem_.per_group : 1;
      for (int64_t i = 0; i < heads; ++i) AddHead(row, first_of_group_ + i, feature);
      for (int i = 0; i < kResults; ++i) {
        const int64_t size = PartOf<Acc>(results_[i].size, feature);
        for (int64_t f = 0; f < size; f += kLanes) {
          StoreSome<kLanes, Acc>(Load<kLanes>(sums_[i] + f), size - f,
                                 results_[i].Row(row) + feature + f);
        }
      }
      feature += kMost;
    } while (feature < results_[0].size || feature < results_[kResults - 1].size);
  }

 private:
  // The terms of one query head.
  JAXSPARSE_INLINE void AddHead(int64_t row, int64_t of_group, int64_t feature) {
    const AttentionCotangentProblem& p = problem_;
    const int64_t heads = p.groups * p.per_group, head = group_ * p.per_group + of_group;
    const Rows query{p.query, p.batch, entry_, head, heads, p.queries, p.head_size};
    const Rows ct_out{p.ct_out, p.batch, entry_, head, heads, p.queries, p.value_size};
    const Rows key{p.key, p.batch, entry_, group_, p.groups, p.keys, p.head_size};
    const Rows value{p.value, p.batch, entry_, group_, p.groups, p.keys, p.value_size};
    const Acc* lse = p.lse.At<const Acc>(p.batch, entry_) + head * p.queries;
    const Acc* ct_sums = p.ct_sums.At<const Acc>(p.batch, entry_) + head * p.queries;
    const Rows &a = kByKeys ? query : key, &b = kByKeys ? ct_out : value;
    const T* own_a = (kByKeys ? key : query).Row(row);
    const T* own_b = (kByKeys ? value : ct_out).Row(row);
    const MaskPattern& pattern = kByKeys ? p.transposed_pattern : p.pattern;
    const CsrRows rows(pattern, p.batch, entry_, pattern.Own(group_, of_group));
    const Acc scale = static_cast<Acc>(p.scale);
    ForEachChunk(rows, row, [&](const int64_t* columns, int count) {
      PrefetchRows(b, columns, count);
      DotsOfEntries(own_a, a, columns, count, weights_);
      DotsOfEntries(own_b, b, columns, count, cotangents_);
      for (int i = 0; i < count; ++i) {
        const int64_t query_row = kByKeys ? columns[i] : row;
        weights_[i] = weights_[i] * scale - Shift(lse[query_row]);
        cotangents_[i] += ct_sums[query_row];
      }
      for (int i = 0; i < count; i += kLanes) {
        const auto weight = Exp<kLanes>(Load<kLanes>(weights_ + i));
        Store<kLanes, Acc>(weight, weights_ + i);
        Store<kLanes, Acc>(weight * scale * Load<kLanes>(cotangents_ + i), cotangents_ + i);
      }
      AddRowsOfEntries(cotangents_, a, feature, columns, count, sums_[0]);
      if (kByKeys) AddRowsOfEntries(weights_, b, feature, columns, count, sums_[1]);
    });
  }

  // Weights of a query that sees nothing are 0.
  JAXSPARSE_INLINE static Acc Shift(Acc lse) {
    return lse == -kInfinity<Acc> ? kInfinity<Acc> : lse;
  }

  const AttentionCotangentProblem& problem_;
  int64_t entry_, group_, first_of_group_;
  HeadRows<T> results_[kResults];
  alignas(64) Acc weights_[kCsrEntries], cotangents_[kCsrEntries], sums_[2][kMost];
};

template <typename T>
void CsrCotangent(const AttentionCotangentProblem& p, Workers& workers) {
  const int64_t heads = p.groups * p.per_group, sizes = p.head_size + p.value_size;
  ForEachRowOf(p.pattern, p.batch, 2 * heads * sizes, workers, [&](int64_t entry, int64_t row) {
    for (int64_t head = 0; head < heads; ++head) {
      CsrCotangentRow<T, CsrOwner::kQueries>(p, entry, head).Run(row);
    }
  });
  ForEachRowOf(p.transposed_pattern, p.batch, 2 * heads * sizes, workers,
               [&](int64_t entry, int64_t row) {
                 for (int64_t group = 0; group < p.groups; ++group) {
                   CsrCotangentRow<T, CsrOwner::kKeys>(p, entry, group).Run(row);
                 }
               });
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
