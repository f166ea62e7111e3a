// The product of one row's entries with some columns of a dense matrix. Compiled once for each
// instruction set, as the kernels are.
#pragma once

#include "spmm/matrices_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// A stretch of one row's entries, values as accumulators, in their order in the row.
template <typename Acc, typename Index>
struct Entries {
  const Acc* values;
  const Index* columns;
  int64_t count;
};

// Hands out rows in stretches. Values that are permuted or of 16 bits are staged in a buffer, for
// several rows at once; so are 16-bit indices beside 16-bit values, so that fewer kernels are
// instantiated. `Index` is what the kernel then sees.
template <typename T, typename Index>
class RowReader {
  using Acc = typename Accumulator<T>::type;
  static constexpr bool kDirect = std::is_same_v<T, Acc>;

 public:
  JAXSPARSE_INLINE RowReader(const Matrices<T>& matrices, int64_t limit)
      : matrices_(matrices), window_{limit} {}

  // Entries [begin, end) or the first of them.
  JAXSPARSE_INLINE Entries<Acc, Index> Next(int64_t begin, int64_t end) {
    if constexpr (kDirect) {
      if (matrices_.permutation == nullptr) {
        return {matrices_.values + begin, Columns() + begin, end - begin};
      }
    }
    if (!window_.Holds(begin, end)) Stage(begin, end);
    const int64_t at = begin - window_.begin;
    const int64_t last = end < window_.end ? end : window_.end;
    return {values_ + at, Columns() == nullptr ? columns_ + at : Columns() + begin, last - begin};
  }

 private:
  JAXSPARSE_INLINE const Index* Columns() const {
    if constexpr (sizeof(Index) == 4) return matrices_.column_indices.wide;
    else return matrices_.column_indices.narrow;
  }

  [[gnu::noinline]] void Stage(int64_t begin, int64_t end) {
    window_.MoveTo(begin, end);
    matrices_.permutation != nullptr ? StageValues<true>() : StageValues<false>();
    if constexpr (!kDirect) {
      if (const uint16_t* narrow = matrices_.column_indices.narrow) {
        const int64_t count = window_.end - begin;
        for (int64_t i = 0; i < count; ++i) columns_[i] = narrow[begin + i];
      }
    }
  }

  template <bool kPermuted>
  JAXSPARSE_INLINE void StageValues() {
    constexpr int kLanes = kMaxLanes<Acc>;
    const Matrices<T> matrices = matrices_;  // which no store can change, as GCC knows of a copy
    const int64_t begin = window_.begin, count = window_.end - begin;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Store<kLanes, Acc>(matrices.template Values<kLanes, kPermuted>(begin + i), values_ + i);
    }
    for (; i < count; ++i) values_[i] = matrices.template Values<1, kPermuted>(begin + i)[0];
  }

  const Matrices<T>& matrices_;
  Window window_;
  Acc values_[Window::kSize];
  Index columns_[kDirect ? 1 : Window::kSize];
};

// Columns of a dense matrix, by vectors that follow one another, but for the last one: that begins
// at `last`, so that it may overlap the one before.
template <typename X>
struct Columns {
  const X* data;
  uint32_t rows;
  int64_t stride, last;
};

// sums[v] += the product of an entry with kVectors * kLanes columns of x.
template <int kLanes, int kVectors, typename Acc, typename X, typename Index>
JAXSPARSE_INLINE void MultiplyEntry(const Entries<Acc, Index>& entries, int64_t i,
                                    const Columns<X>& x, Vector<Acc, kLanes>* sums) {
  const X* from = x.data + Within(static_cast<uint32_t>(entries.columns[i]), x.rows) * x.stride;
  // Or GCC keeps an address for each vector, in more registers than there are.
  if constexpr (kVectors > 2) asm("" : "+r"(from));
  const auto value = Broadcast<kLanes>(entries.values[i]);
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    sums[v] += value * Load<kLanes>(from + (v + 1 < kVectors ? v * kLanes : x.last));
  }
}

// sums[v] = the products of one row. Narrow tiles interleave kChains partial sums, since one chain
// would wait for each multiply-add to finish; short rows do not gain by that.
template <int kLanes, int kVectors, typename Acc, typename X, typename T, typename Index>
JAXSPARSE_INLINE void MultiplyRow(RowReader<T, Index>& row, int64_t begin, int64_t end,
                                  const Columns<X>& x, Vector<Acc, kLanes>* sums) {
  constexpr int kChains = kVectors >= 8 ? 1 : kVectors >= 4 ? 2 : 4;
  constexpr int kStep = kVectors == 1 ? 2 * kChains : kChains;
  constexpr int64_t kLong = 16;
  Vector<Acc, kLanes> partial[kChains][kVectors] = {};
  while (begin < end) {
    const Entries<Acc, Index> entries = row.Next(begin, end);
    int64_t i = 0;
    if (entries.count >= kLong) {
      for (; i + kStep <= entries.count; i += kStep) {
#pragma GCC unroll 8
        for (int c = 0; c < kStep; ++c) {
          MultiplyEntry<kLanes, kVectors>(entries, i + c, x, partial[c % kChains]);
        }
      }
    }
#pragma GCC unroll 1
    for (; i < entries.count; ++i) {
      MultiplyEntry<kLanes, kVectors>(entries, i, x, partial[0]);
    }
    begin += entries.count;
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    sums[v] = partial[0][v];
#pragma GCC unroll 4
    for (int c = 1; c < kChains; ++c) sums[v] += partial[c][v];
  }
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
