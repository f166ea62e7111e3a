// How CPU kernels of the sparse-dense product read the rows of a pattern. Compiled once for each
// instruction set, as the kernels are.
#pragma once

#include "common/pattern_cpu.h"
#include "spmm/problem.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// The arrays of one batch entry, and all else that loops over rows need: a copy of their own, which
// stores into results can't change as far as the compiler knows.
template <typename T>
struct Matrices {
  const T* values;
  const int32_t* row_offsets;
  IndexReader column_indices;
  const int32_t* permutation;
  const T* x;
  const T* bias;
  OutWriter<T> out;
  OutWriter<T> preactivation;
  int64_t columns, nse, n;
  Activation activation;

  JAXSPARSE_INLINE Matrices(const SpmmProblem& p, int64_t entry)
      : values(p.values.At<const T>(p.batch, entry)),
        row_offsets(p.pattern.row_offsets.At<const int32_t>(p.batch, entry)),
        column_indices(p.pattern, p.batch, entry),
        permutation(p.pattern.permutation.data == nullptr
                        ? nullptr
                        : p.pattern.permutation.At<const int32_t>(p.batch, entry)),
        x(p.x.At<const T>(p.batch, entry)),
        bias(p.bias.data == nullptr ? nullptr : p.bias.At<const T>(p.batch, entry)),
        out(p.out, p.out_dtype, p.batch, entry),
        preactivation(p.preactivation, p.out_dtype, p.batch, entry),
        columns(p.pattern.columns),
        nse(p.pattern.nse),
        n(p.n),
        activation(p.activation) {}
};

// A stretch of entries, values as accumulators. Whoever reads x by `columns` looks whether they are
// in range.
template <typename Acc, typename Index>
struct Entries {
  const Acc* values;
  const Index* columns;
  int64_t count;
};

// Rows [row, last_row), whose entries [begin, begin + count) follow one another.
struct RowGroup {
  int64_t row, last_row, begin, count;

  // Where an offset leads among the group's entries, or their end if it leads elsewhere.
  JAXSPARSE_INLINE int64_t Place(int32_t offset) const {
    const auto place = static_cast<uint64_t>(offset - begin), end = static_cast<uint64_t>(count);
    return static_cast<int64_t>(place < end ? place : end);
  }
};

// Hands out rows in groups, and a group's entries. Values that are permuted or of 16 bits are
// staged in a small buffer, once for a group that fits it, however many column tiles then read
// them; so are 16-bit indices beside 16-bit values, so that fewer kernels are instantiated. `Index`
// is what the kernel then sees.
template <typename T, typename Index>
class RowReader {
  using Acc = typename Accumulator<T>::type;
  static constexpr bool kDirect = std::is_same_v<T, Acc>;

 public:
  static constexpr int64_t kStage = 512;

  JAXSPARSE_INLINE explicit RowReader(const Matrices<T>& matrices) : matrices_(matrices) {}

  // Rows from `row` on, at most kStage of them with at most as many entries, or one that is longer.
  JAXSPARSE_INLINE RowGroup Group(int64_t row, int64_t last_row) const {
    const int32_t* offsets = matrices_.row_offsets;
    const RowBounds first(offsets, row, matrices_.nse);
    // A binary search without a branch that depends on offsets.
    int64_t low = row, size = last_row - row < kStage ? last_row - row : kStage;
    while (size > 0) {
      const int64_t half = (size + 1) / 2;
      low = offsets[low + half] <= first.begin + kStage ? low + half : low;
      size -= half;
    }
    if (low == row) low = row + 1;
    const int64_t end = RowBounds(offsets, low - 1, matrices_.nse).end;
    return {row, low, first.begin, end < first.begin ? 0 : end - first.begin};
  }

  // A group's entries from the one at `place` on, all of them or as many as the stage holds.
  JAXSPARSE_INLINE Entries<Acc, Index> Read(const RowGroup& group, int64_t place) {
    const int64_t begin = group.begin + place, count = group.count - place;
    if constexpr (kDirect) {
      if (matrices_.permutation == nullptr) {
        return {matrices_.values + begin, Columns() + begin, count};
      }
    }
    const int64_t staged = count < kStage ? count : kStage;
    if (begin != staged_begin_ || staged != staged_count_) Stage(begin, staged);
    return {values_, Columns() == nullptr ? columns_ : Columns() + begin, staged};
  }

 private:
  JAXSPARSE_INLINE const Index* Columns() const {
    if constexpr (sizeof(Index) == 4) return matrices_.column_indices.wide;
    else return matrices_.column_indices.narrow;
  }

  JAXSPARSE_INLINE void Stage(int64_t begin, int64_t count) {
    staged_begin_ = begin;
    staged_count_ = count;
    const T* values = matrices_.values + begin;
    [[maybe_unused]] T gathered[kStage];
    if (matrices_.permutation != nullptr) {
      const int32_t* permutation = matrices_.permutation + begin;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t place = permutation[i];
        gathered[i] = IsBelow(place, matrices_.nse) ? matrices_.values[place] : T{};
      }
      values = gathered;
    }
    constexpr int kLanes = kMaxLanes<Acc>;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Store<kLanes, Acc>(Load<kLanes>(values + i), values_ + i);
    }
    for (; i < count; ++i) values_[i] = ToFloat(values[i]);
    if constexpr (!kDirect) {
      if (const uint16_t* narrow = matrices_.column_indices.narrow) {
        for (i = 0; i < count; ++i) columns_[i] = narrow[begin + i];
      }
    }
  }

  const Matrices<T>& matrices_;
  int64_t staged_begin_ = -1, staged_count_ = 0;
  Acc values_[kStage];
  Index columns_[kDirect ? 1 : kStage];
};

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
