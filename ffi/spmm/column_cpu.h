// The CPU kernel of the product with a single column. Compiled once for each instruction set, as
// the other kernels are.
#pragma once

#include "spmm/matrices_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// The entries fill the lanes: the products of many entries are taken first, one
// behind the other however short rows are, and then the sum of each row.
template <typename T>
class ColumnKernel {
  using Acc = typename Accumulator<T>::type;
  static constexpr int kLanes = kMaxLanes<Acc>;
  static constexpr int kStep = 64 / sizeof(Acc);  // products that are added without a branch
  static constexpr int64_t kRows = 64;

 public:
  JAXSPARSE_INLINE ColumnKernel(const SpmmProblem& problem, const Matrices<T>& matrices,
                                int64_t limit)
      : problem_(problem), matrices_(matrices), window_{limit} {}

  JAXSPARSE_INLINE void Rows(int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row += kRows) {
      const int64_t count = last - row < kRows ? last - row : kRows;
      const int32_t* offsets = matrices_.row_offsets + row;
      Acc sums[kRows];
      // Many rows may have no entries, and there is no telling which: they are left out together.
      int32_t filled[kRows];
      int64_t filled_count = 0;
      for (int64_t r = 0; r < count; ++r) {
        sums[r] = 0;
        filled[filled_count] = static_cast<int32_t>(r);
        filled_count += offsets[r] != offsets[r + 1];
      }
      int64_t begin = RowBounds(offsets, 0, matrices_.nse).begin;
      for (int64_t i = 0; i < filled_count; ++i) {
        const int64_t end = Between(begin, offsets[filled[i] + 1], matrices_.nse);
        sums[filled[i]] = SumRow(begin, end);
        begin = end;
      }
      int64_t r = 0;
      for (; r + kLanes <= count; r += kLanes) Write<kLanes>(sums + r, row + r);
      for (; r < count; ++r) Write<1>(sums + r, row + r);
    }
  }

 private:
  JAXSPARSE_INLINE Acc SumRow(int64_t begin, int64_t end) {
    if (begin < window_.begin || window_.end < end) return FillAndSum(begin, end);
    return SumOf(products_ + (begin - window_.begin), end - begin);
  }

  [[gnu::noinline]] Acc FillAndSum(int64_t begin, int64_t end) {
    Acc sum = 0;
    while (begin < end) {
      Fill(begin, end);
      sum += SumOf(products_, window_.end < end ? window_.end - begin : end - begin);
      begin = window_.end;
    }
    return sum;
  }

  JAXSPARSE_INLINE void Fill(int64_t begin, int64_t end) {
    window_.MoveTo(begin, end);
    const IndexReader& columns = matrices_.column_indices;
    const bool is_permuted = matrices_.permutation != nullptr;
    if (columns.wide != nullptr) {
      is_permuted ? Multiply<true>(columns.wide) : Multiply<false>(columns.wide);
    } else {
      is_permuted ? Multiply<true>(columns.narrow) : Multiply<false>(columns.narrow);
    }
  }

  template <bool kPermuted, typename Index>
  JAXSPARSE_INLINE void Multiply(const Index* columns) {
    const Matrices<T> matrices = matrices_;  // which no store can change, as GCC knows of a copy
    const int64_t begin = window_.begin, count = window_.end - begin;
    const auto multiply = [&]<int kCount>(int64_t i) __attribute__((always_inline)) {
      const auto factors = Gather<kCount>(matrices.x, matrices.columns, columns + begin + i);
      const auto values = matrices.template Values<kCount, kPermuted>(begin + i);
      Store<kCount, Acc>(values * factors, products_ + i);
    };
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) multiply.template operator()<kLanes>(i);
    for (; i < count; ++i) multiply.template operator()<1>(i);
  }

  // The last step reads what lies behind the products, too, and leaves it out.
  JAXSPARSE_INLINE Acc SumOf(const Acc* from, int64_t count) const {
    constexpr int kVectors = kStep / kLanes;
    using Int = std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>;
    Vector<Acc, kLanes> sums[kVectors] = {};
    for (; count > kStep; count -= kStep, from += kStep) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[v] += Load<kLanes>(from + v * kLanes);
    }
    const auto left = Broadcast<kLanes>(static_cast<Int>(count));
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Vector<Int, kLanes> lane;
      for (int l = 0; l < kLanes; ++l) lane[l] = v * kLanes + l;
      sums[v] += lane < left ? Load<kLanes>(from + v * kLanes) : Vector<Acc, kLanes>{};
      if (v > 0) sums[0] += sums[v];
    }
    return Sum<kLanes, Acc>(sums[0]);
  }

  template <int kCount>
  JAXSPARSE_INLINE void Write(const Acc* sums, int64_t row) const {
    auto z = Load<kCount>(sums);
    if (matrices_.bias != nullptr) z += Load<kCount>(matrices_.bias + row);
    Finish<kCount, T, Acc>(problem_, matrices_, z, row);
  }

  const SpmmProblem& problem_;
  const Matrices<T>& matrices_;
  Window window_;
  Acc products_[Window::kSize + kStep] = {};
};

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
