// Products of tiles and of single rows, of which CPU kernels of attention are made. Compiled once
// for each instruction set, as the kernels are.
#pragma once

#include "attention/heads_cpu.h"
#include "cpu/simd.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// The features of a head are worked on in parts of at most so many.
template <typename Acc>
constexpr int64_t kMostFeatures = 1024 / sizeof(Acc);

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

// ---- Products of tiles ----

// Where the left factor a of a product c += a b lies: a row's elements side by side, or a column's.
enum class LeftFactor { kByRows, kByColumns };

// Vectors of a row of c that stay in registers beside those of six rows.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kVectorsAcross = 4;
#else
constexpr int kVectorsAcross = 2;
#endif
constexpr int kRowsAcross = 6;

// kRows rows and kVectors vectors of c.
template <LeftFactor kLeft, int kRows, int kVectors, typename Acc>
[[gnu::noinline]] void MultiplyTile(const Acc* a, int64_t a_stride, const Acc* b, int64_t b_stride,
                                    int64_t depth, Acc* c, int64_t c_stride) {
  constexpr int kLanes = kMaxLanes<Acc>;
  Vector<Acc, kLanes> sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[i][v] = Load<kLanes>(c + i * c_stride + v * kLanes);
  }
#pragma GCC unroll 1
  for (int64_t k = 0; k < depth; ++k) {
    Vector<Acc, kLanes> right[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) right[v] = Load<kLanes>(b + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const auto left = Broadcast<kLanes>(kLeft == LeftFactor::kByRows ? a[i * a_stride] : a[i]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[i][v] += left * right[v];
    }
    a += kLeft == LeftFactor::kByRows ? 1 : a_stride;
    b += b_stride;
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Store<kLanes, Acc>(sums[i][v], c + i * c_stride + v * kLanes);
    }
  }
}

template <LeftFactor kLeft, int kRows, typename Acc>
JAXSPARSE_INLINE void MultiplyVectors(int64_t vectors, const Acc* a, int64_t a_stride, const Acc* b,
                                      int64_t b_stride, int64_t depth, Acc* c, int64_t c_stride) {
  if constexpr (kVectorsAcross == 4) {
    if (vectors == 4)
      return MultiplyTile<kLeft, kRows, 4>(a, a_stride, b, b_stride, depth, c, c_stride);
    if (vectors == 3)
      return MultiplyTile<kLeft, kRows, 3>(a, a_stride, b, b_stride, depth, c, c_stride);
  }
  if (vectors == 2)
    return MultiplyTile<kLeft, kRows, 2>(a, a_stride, b, b_stride, depth, c, c_stride);
  MultiplyTile<kLeft, kRows, 1>(a, a_stride, b, b_stride, depth, c, c_stride);
}

// Calls tile.operator()<number of rows>(first row) for all rows.
template <typename F>
JAXSPARSE_INLINE void ForEachRows(int64_t rows, F&& tile) {
  int64_t i = 0;
  for (; i + kRowsAcross <= rows; i += kRowsAcross) tile.template operator()<kRowsAcross>(i);
  for (; i + 4 <= rows; i += 4) tile.template operator()<4>(i);
  for (; i < rows; ++i) tile.template operator()<1>(i);
}

JAXSPARSE_INLINE uint64_t AnyOf(const uint64_t* bits, int64_t count) {
  uint64_t any = 0;
  for (int64_t i = 0; i < count; ++i) any |= bits[i];
  return any;
}

// scores[j][r] += rows[j] . columns[..][r] for `rows` rows and the 64 columns of a cell; what
// `bits` do not have in any row and column of a tile may be left out. Calls `before` for each tile.
template <typename Acc, typename F>
JAXSPARSE_INLINE void AddScores(const Acc* a, int64_t a_stride, int64_t rows, const Acc* columns,
                                int64_t depth, const uint64_t* bits, F&& before, Acc* scores) {
  constexpr int kLanes = kMaxLanes<Acc>, kVectors = kCell / kLanes;
  ForEachRows(rows, [&]<int kRows>(int64_t j) __attribute__((always_inline)) {
    const uint64_t any = bits == nullptr ? ~uint64_t{0} : AnyOf(bits + j, kRows);
    before();
    if (any == 0) return;
    const int64_t last = (63 - __builtin_clzll(any)) / kLanes + 1;
    int64_t v = __builtin_ctzll(any) / kLanes;
    while (v < last) {
      const int64_t count = last - v < kVectorsAcross ? last - v : kVectorsAcross;
      MultiplyVectors<LeftFactor::kByRows, kRows>(count, a + j * a_stride, a_stride,
                                                  columns + v * kLanes, int64_t{kCell}, depth,
                                                  scores + j * kCell + v * kLanes, int64_t{kCell});
      v += count;
    }
  });
  static_assert(kVectors * kLanes == kCell);
}

// sums[r] += weights[..][r] rows[..] for `count` of the 64 columns of weights, with `depth` rows of
// `size` features, a multiple of the lanes. Where `bits` has none of a row, weights are 0. Calls
// `before` for each tile.
template <typename Acc, typename F>
JAXSPARSE_INLINE void AddWeighted(const Acc* weights, int64_t count, const Acc* rows,
                                  int64_t row_stride, int64_t depth, int64_t size,
                                  const uint64_t* bits, F&& before, Acc* sums) {
  constexpr int kLanes = kMaxLanes<Acc>;
  const int64_t vectors = size / kLanes;
  for (int64_t v = 0; v < vectors; v += kVectorsAcross) {
    const int64_t width = vectors - v < kVectorsAcross ? vectors - v : kVectorsAcross;
    ForEachRows(count, [&]<int kRows>(int64_t r) __attribute__((always_inline)) {
      const uint64_t any = bits == nullptr ? LowBits(depth) : AnyOf(bits + r, kRows);
      before();
      if (any == 0) return;
      const int64_t first = __builtin_ctzll(any), last = 64 - __builtin_clzll(any);
      MultiplyVectors<LeftFactor::kByColumns, kRows>(
          width, weights + first * kCell + r, int64_t{kCell},
          rows + first * row_stride + v * kLanes, row_stride, last - first,
          sums + r * kMostFeatures<Acc> + v * kLanes, kMostFeatures<Acc>);
    });
  }
}

// ---- Operands of these products ----

// Rows that are wanted next: they come to the cache a few at a time, while products are taken. In
// an array of many heads they lie so far from one another that no processor foresees them.
class UpcomingRows {
 public:
  UpcomingRows() = default;
  template <typename T>
  JAXSPARSE_INLINE UpcomingRows(const HeadRows<T>& rows, int64_t first, int64_t count)
      : next_(reinterpret_cast<const char*>(rows.Row(Between(0, first, rows.count)))),
        stride_(rows.stride * static_cast<int64_t>(sizeof(T))),
        bytes_(rows.size * static_cast<int64_t>(sizeof(T))),
        left_(Between(0, rows.count - first, count)) {}

  JAXSPARSE_INLINE void Fetch(int rows) {
    for (; rows > 0 && left_ > 0; --rows, --left_, next_ += stride_) {
      for (int64_t at = 0; at < bytes_; at += kLine) __builtin_prefetch(next_ + at, 0, 2);
    }
  }

 private:
  static constexpr int64_t kLine = 64;
  const char* next_ = nullptr;
  int64_t stride_ = 0, bytes_ = 0, left_ = 0;
};

// Which factor of a product rows are. A left one is read where it lies if it has accumulators. A
// right one is copied: in an array of many heads its rows lie a power of 2 apart, so that few of
// them could stay in the fastest cache.
enum class Factor { kLeft, kRight };

// Some features of up to 64 rows, as accumulators; those of a right factor with zeros up to a
// multiple of the lanes.
template <typename T, Factor kFactor>
class StagedRows {
  using Acc = typename Accumulator<T>::type;
  static constexpr int kLanes = kMaxLanes<Acc>;
  static constexpr bool kInPlace = kFactor == Factor::kLeft && std::is_same_v<T, Acc>;

 public:
  const Acc* data = nullptr;
  int64_t stride = 0;

  // Of rows [row, row + count) and features from `feature` on.
  JAXSPARSE_INLINE void Stage(const HeadRows<const T>& rows, int64_t row, int64_t count,
                              int64_t feature) {
    if constexpr (kInPlace) {
      data = rows.Row(row) + feature;
      stride = rows.stride;
    } else {
      if (rows.data == staged_ && row == row_ && feature == feature_) return;
      staged_ = rows.data, row_ = row, feature_ = feature;
      const int64_t size = Between(0, rows.size - feature, kMostFeatures<Acc>);
      data = copy_;
      stride = CeilDivide(size, kLanes) * kLanes;
      for (int64_t r = 0; r < count; ++r) {
        const T* from = rows.Row(row + r) + feature;
        for (int64_t f = 0; f < size; f += kLanes) {
          Store<kLanes, Acc>(LoadSome<kLanes>(from + f, size - f), copy_ + r * stride + f);
        }
      }
    }
  }

  // Whether 0 times any of them is 0.
  JAXSPARSE_INLINE bool IsFinite(int64_t count, int64_t size) const {
    Vector<Acc, kLanes> zeros = {};
    for (int64_t r = 0; r < count; ++r) {
      for (int64_t f = 0; f < size; f += kLanes) {
        zeros += Load<kLanes>(data + r * stride + f) * Acc(0);
      }
    }
    return Sum<kLanes, Acc>(zeros) == 0;
  }

 private:
  const T* staged_ = nullptr;
  int64_t row_ = -1, feature_ = -1;
  alignas(64) Acc copy_[kInPlace ? 1 : kCell * kMostFeatures<Acc>];
};

// The same transposed: a feature of 64 rows side by side, with zeros in place of missing rows.
template <typename T>
class StagedColumns {
  using Acc = typename Accumulator<T>::type;
  static constexpr int kLanes = kMaxLanes<Acc>;

 public:
  JAXSPARSE_INLINE void Stage(const HeadRows<const T>& rows, int64_t row, int64_t count,
                              int64_t feature) {
    if (feature == feature_) return;
    feature_ = feature;
    UpcomingRows(rows, row, count).Fetch(kCell);
    const int64_t size = Between(0, rows.size - feature, kMostFeatures<Acc>);
    for (int64_t r = 0; r < kCell; ++r) {
      for (int64_t f = 0; f < size; f += kLanes) {
        Vector<Acc, kLanes> v = {};
        if (r < count) v = LoadSome<kLanes>(rows.Row(row + r) + feature + f, size - f);
        for (int l = 0; l < kLanes && f + l < size; ++l) data[(f + l) * kCell + r] = v[l];
      }
    }
  }

  alignas(64) Acc data[kMostFeatures<Acc> * kCell];

 private:
  int64_t feature_ = -1;
};

// ---- Products of single rows ----

// out[i] = x . y[i], kCount of them.
template <int kCount, typename T, typename Acc>
JAXSPARSE_INLINE void Dot(const T* x, const T* const* y, int64_t size, Acc* out) {
  constexpr int kLanes = kMaxLanes<Acc>;
  Vector<Acc, kLanes> sums[kCount] = {};
  int64_t f = 0;
  for (; f + kLanes <= size; f += kLanes) {
    const auto left = Load<kLanes>(x + f);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) sums[i] += left * Load<kLanes>(y[i] + f);
  }
  if (f < size) {
    const auto left = LoadSome<kLanes>(x + f, size - f);
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) sums[i] += left * LoadSome<kLanes>(y[i] + f, size - f);
  }
#pragma GCC unroll 4
  for (int i = 0; i < kCount; ++i) out[i] = Sum<kLanes, Acc>(sums[i]);
}

// out[i] = x . rows[columns[i]].
template <typename T, typename Acc>
[[gnu::noinline]] void Dots(const T* x, const HeadRows<const T>& rows, const int32_t* columns,
                            int count, Acc* out) {
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    const T* y[4];
    for (int j = 0; j < 4; ++j) y[j] = rows.Row(columns[i + j]);
    Dot<4>(x, y, rows.size, out + i);
  }
  for (; i < count; ++i) {
    const T* y = rows.Row(columns[i]);
    Dot<1>(x, &y, rows.size, out + i);
  }
}

template <int kVectors, typename T, typename Acc>
JAXSPARSE_INLINE void AddRowsTile(const Acc* weights, const HeadRows<const T>& rows,
                                  const int32_t* columns, int count, int64_t feature, int64_t size,
                                  Acc factor, Acc* sums) {
  constexpr int kLanes = kMaxLanes<Acc>;
  Vector<Acc, kLanes> v[kVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) v[j] = Load<kLanes>(sums + j * kLanes) * factor;
  for (int i = 0; i < count; ++i) {
    const auto weight = Broadcast<kLanes>(weights[i]);
    const T* from = rows.Row(columns[i]) + feature;
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kVectors == 1) v[j] += weight * LoadSome<kLanes>(from, size);
      else v[j] += weight * Load<kLanes>(from + j * kLanes);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) Store<kLanes, Acc>(v[j], sums + j * kLanes);
}

// sums = factor * sums + the weights[i] rows[columns[i]], of features [feature, feature + size).
template <typename T, typename Acc>
[[gnu::noinline]] void AddRows(const Acc* weights, const HeadRows<const T>& rows,
                               const int32_t* columns, int count, int64_t feature, int64_t size,
                               Acc factor, Acc* sums) {
  constexpr int kLanes = kMaxLanes<Acc>;
  int64_t f = 0;
  const auto tiles = [&]<int kVectors>() __attribute__((always_inline)) {
    constexpr int64_t kLeast = kVectors == 1 ? 1 : kVectors * kLanes;
    for (; f + kLeast <= size; f += kVectors * kLanes) {
      AddRowsTile<kVectors>(weights, rows, columns, count, feature + f, size - f, factor, sums + f);
    }
  };
  tiles.template operator()<8>();
  tiles.template operator()<2>();
  tiles.template operator()<1>();
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
