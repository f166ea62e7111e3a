// Operands of products of tiles, brought close and converted to accumulators. Compiled once for
// each instruction set, as the kernels are.
#pragma once

#include <utility>

#include "attention/heads_cpu.h"
#include "cpu/simd.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// The features of a head are worked on in parts of at most so many.
template <typename Acc>
constexpr int64_t kMostFeatures = 1024 / sizeof(Acc);

template <typename Acc>
JAXSPARSE_INLINE int64_t PartOf(int64_t size, int64_t feature) {
  return Between(0, size - feature, kMostFeatures<Acc>);
}
// With zeros behind it that fill the last vector.
template <typename Acc>
JAXSPARSE_INLINE int64_t PaddedPart(int64_t size, int64_t feature) {
  return CeilDivide(PartOf<Acc>(size, feature), kMaxLanes<Acc>) * kMaxLanes<Acc>;
}

// The first `count` of kLanes elements, with zeros behind them.
template <int kLanes, typename T>
JAXSPARSE_INLINE auto LoadSome(const T* from, int64_t count) {
  using Acc = typename Accumulator<T>::type;
  if (count >= kLanes) return Load<kLanes>(from);
  Vector<Acc, kLanes> v = {};
  for (int l = 0; l < kLanes && l < count; ++l) v[l] = ToFloat(from[l]);
  return v;
}

template <int kLanes, typename Acc, typename T>
JAXSPARSE_INLINE void StoreSome(Vector<Acc, kLanes> v, int64_t count, T* to) {
  if (count >= kLanes) return Store<kLanes, Acc>(v, to);
  for (int l = 0; l < kLanes && l < count; ++l) FromFloat(v[l], to + l);
}

// All ones in lanes whose bit is set, else 0.
template <int kLanes, typename Acc>
JAXSPARSE_INLINE auto LanesOf(uint64_t bits) {
  using Int = std::conditional_t<sizeof(Acc) == 4, int32_t, int64_t>;
  Vector<Int, kLanes> bit_of;
  for (int l = 0; l < kLanes; ++l) bit_of[l] = Int{1} << l;
  return (Broadcast<kLanes>(static_cast<Int>(bits)) & bit_of) != 0;
}

// Rows that are wanted soon: they come to the cache a few at a time, while products are taken. In
// an array of many heads they lie so far from one another that no processor foresees them.
class UpcomingRows {
 public:
  // Those of [first, first + 64) whose bit is set.
  template <typename T>
  JAXSPARSE_INLINE UpcomingRows(const HeadRows<T>& rows, int64_t first, uint64_t which)
      : rows_(reinterpret_cast<const char*>(rows.data + first * rows.stride)),
        stride_(rows.stride * static_cast<int64_t>(sizeof(T))),
        bytes_(rows.size * static_cast<int64_t>(sizeof(T))),
        left_(which) {}

  JAXSPARSE_INLINE void Fetch(int count) {
    for (; count > 0 && left_ != 0; --count, left_ &= left_ - 1) {
      const char* row = rows_ + __builtin_ctzll(left_) * stride_;
      for (int64_t at = 0; at < bytes_; at += kLine) __builtin_prefetch(row + at, 0, 2);
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  const char* rows_;
  int64_t stride_, bytes_;
  uint64_t left_;
};

// The rows of two matrices that the next cell wants and this one does not have.
class UpcomingCell {
 public:
  template <typename T>
  JAXSPARSE_INLINE UpcomingCell(const HeadRows<T>& a, const HeadRows<T>& b, const Cell& cell,
                                const Cell& next)
      : UpcomingCell(a, b, next.stored > 0 ? next.first : 0, Missing(cell, next)) {}

  template <typename T>
  JAXSPARSE_INLINE UpcomingCell(const HeadRows<T>& a, const HeadRows<T>& b, int64_t first,
                                uint64_t which)
      : a_(a, first, which), b_(b, first, which) {}

  // As many as are to come while one tile of products is computed.
  JAXSPARSE_INLINE void FetchSome() {
    a_.Fetch(3);
    b_.Fetch(3);
  }
  JAXSPARSE_INLINE void FetchAll() {
    a_.Fetch(kCell);
    b_.Fetch(kCell);
  }

 private:
  JAXSPARSE_INLINE static uint64_t Missing(const Cell& cell, const Cell& next) {
    if (next.stored == 0) return 0;
    return next.used_columns & ~(next.first == cell.first ? cell.used_columns : 0);
  }

  UpcomingRows a_, b_;
};

// Some features of 64 rows, as accumulators: rows are copied where they are used. In an array of
// many heads they lie a power of 2 apart, so that few of them could stay in the fastest cache.
template <typename T>
class StagedRows {
  using Acc = typename Accumulator<T>::type;
  static constexpr int kLanes = kMaxLanes<Acc>;

 public:
  const Acc* data = nullptr;
  int64_t stride = 0;

  // Those of [first, first + 64) whose bit is set, with zeros up to a multiple of the lanes.
  JAXSPARSE_INLINE void Stage(const HeadRows<const T>& rows, int64_t first, int64_t feature,
                              uint64_t which) {
    data = copy_;
    stride = PaddedPart<Acc>(rows.size, feature);
    if (rows.data != from_ || first != first_ || feature != feature_) {
      from_ = rows.data, first_ = first, feature_ = feature;
      staged_ = 0;
    }
    const int64_t size = PartOf<Acc>(rows.size, feature);
    uint64_t missing = which & ~staged_;
    for (staged_ |= which; missing != 0; missing &= missing - 1) {
      const int64_t row = __builtin_ctzll(missing);
      const T* from = rows.Row(first + row) + feature;
      for (int64_t f = 0; f < size; f += kLanes) {
        Store<kLanes, Acc>(LoadSome<kLanes>(from + f, size - f), copy_ + row * stride + f);
      }
    }
  }

  // For the left factor of a product, which is read but once: in place where that is possible, and
  // without zeros.
  JAXSPARSE_INLINE void StageLeft(const HeadRows<const T>& rows, int64_t first, int64_t feature,
                                  uint64_t which) {
    if constexpr (std::is_same_v<T, Acc>) {
      data = rows.Row(first) + feature;
      stride = rows.stride;
    } else {
      Stage(rows, first, feature, which);
    }
  }

  // Whether 0 times any of the first `count`, which are copies, is 0.
  JAXSPARSE_INLINE bool IsFinite(int64_t count) const {
    constexpr int kSums = 4;  // a sum waits for the one before it
    Vector<Acc, kLanes> zeros[kSums] = {};
    const int64_t end = count * stride;
    int64_t at = 0;
    for (; at + kSums * kLanes <= end; at += kSums * kLanes) {
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) zeros[i] += Load<kLanes>(data + at + i * kLanes) * Acc(0);
    }
    for (; at < end; at += kLanes) zeros[0] += Load<kLanes>(data + at) * Acc(0);
    return Sum<kLanes, Acc>((zeros[0] + zeros[1]) + (zeros[2] + zeros[3])) == 0;
  }

 private:
  const T* from_ = nullptr;
  int64_t first_ = -1, feature_ = -1;
  uint64_t staged_ = 0;
  alignas(64) Acc copy_[kCell * kMostFeatures<Acc>];
};

// Elements of the first halves of two vectors in turn, or of their second halves.
template <bool kSecond, typename Acc, int kLanes, size_t... kIndex>
JAXSPARSE_INLINE Vector<Acc, kLanes> Interleave(Vector<Acc, kLanes> a, Vector<Acc, kLanes> b,
                                                std::index_sequence<kIndex...>) {
  constexpr size_t kFirst = kSecond ? kLanes / 2 : 0;
  return Vector<Acc, kLanes>{(kIndex % 2 == 0 ? a : b)[kFirst + kIndex / 2]...};
}

// Rows become columns when half of them are interleaved with the others as often as halves of their
// number can be taken.
template <int kLanes, typename Acc>
JAXSPARSE_INLINE void Transpose(Vector<Acc, kLanes>* rows) {
  constexpr std::make_index_sequence<kLanes> kIndex;
#pragma GCC unroll 4
  for (int times = kLanes; times > 1; times /= 2) {
    Vector<Acc, kLanes> result[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      result[2 * i] = Interleave<false, Acc, kLanes>(rows[i], rows[i + kLanes / 2], kIndex);
      result[2 * i + 1] = Interleave<true, Acc, kLanes>(rows[i], rows[i + kLanes / 2], kIndex);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = result[i];
  }
}

// The sum of each vector: those of halves come to lie side by side until one vector is left.
template <int kLanes, typename Acc>
JAXSPARSE_INLINE Vector<Acc, kLanes> SumOfEach(Vector<Acc, kLanes>* v) {
  constexpr std::make_index_sequence<kLanes> kIndex;
#pragma GCC unroll 4
  for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; ++i) {
      v[i] = Interleave<false, Acc, kLanes>(v[i], v[i + half], kIndex) +
             Interleave<true, Acc, kLanes>(v[i], v[i + half], kIndex);
    }
  }
  return v[0];
}

// Staged rows transposed: a feature of 64 rows side by side, with zeros in place of missing rows.
template <typename T>
class StagedColumns {
  using Acc = typename Accumulator<T>::type;
  static constexpr int kLanes = kMaxLanes<Acc>;

 public:
  JAXSPARSE_INLINE void Stage(const HeadRows<const T>& rows, int64_t first, int64_t feature,
                              int64_t count) {
    if (feature == feature_) return;
    feature_ = feature;
    const int64_t size = PartOf<Acc>(rows.size, feature);
    for (int64_t r = 0; r < kCell; r += kLanes) {
      for (int64_t f = 0; f < size; f += kLanes) {
        Vector<Acc, kLanes> block[kLanes] = {};
        for (int64_t i = 0; i < kLanes && r + i < count; ++i) {
          block[i] = LoadSome<kLanes>(rows.Row(first + r + i) + feature + f, size - f);
        }
        Transpose<kLanes, Acc>(block);
        for (int64_t i = 0; i < kLanes; ++i) {
          Store<kLanes, Acc>(block[i], data + (f + i) * kCell + r);
        }
      }
    }
  }

  alignas(64) Acc data[kMostFeatures<Acc> * kCell];

 private:
  int64_t feature_ = -1;
};

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
