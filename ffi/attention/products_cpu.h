// Products of tiles and of single rows, of which CPU kernels of attention are made. Compiled once
// for each instruction set, as the kernels are.
#pragma once

#include "attention/staged_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

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

// kRows rows and kVectors vectors of c. Unless it `adds`, c is 0 before.
template <LeftFactor kLeft, int kRows, int kVectors, typename Acc>
[[gnu::noinline]] void MultiplyTile(const Acc* a, int64_t a_stride, const Acc* b, int64_t b_stride,
                                    int64_t depth, bool adds, Acc* c, int64_t c_stride) {
  constexpr int kLanes = kMaxLanes<Acc>;
  Vector<Acc, kLanes> sums[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      sums[i][v] = adds ? Load<kLanes>(c + i * c_stride + v * kLanes) : Vector<Acc, kLanes>{};
    }
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
                                      int64_t b_stride, int64_t depth, bool adds, Acc* c,
                                      int64_t c_stride) {
  if constexpr (kVectorsAcross == 4) {
    if (vectors == 4)
      return MultiplyTile<kLeft, kRows, 4>(a, a_stride, b, b_stride, depth, adds, c, c_stride);
    if (vectors == 3)
      return MultiplyTile<kLeft, kRows, 3>(a, a_stride, b, b_stride, depth, adds, c, c_stride);
  }
  if (vectors == 2)
    return MultiplyTile<kLeft, kRows, 2>(a, a_stride, b, b_stride, depth, adds, c, c_stride);
  MultiplyTile<kLeft, kRows, 1>(a, a_stride, b, b_stride, depth, adds, c, c_stride);
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

// scores[j][r] = rows[j] . columns[..][r] for `rows` rows and the 64 columns of a cell, or that is
// added; what `bits` do not have in any row and column of a tile may be left as it is.
template <typename Acc>
[[gnu::noinline]] void AddScores(const Acc* a, int64_t a_stride, int64_t rows, const Acc* columns,
                                 int64_t depth, const uint64_t* bits, UpcomingCell* upcoming,
                                 bool adds, Acc* scores) {
  constexpr int kLanes = kMaxLanes<Acc>, kVectors = kCell / kLanes;
  ForEachRows(rows, [&]<int kRows>(int64_t j) __attribute__((always_inline)) {
    const uint64_t any = bits == nullptr ? ~uint64_t{0} : AnyOf(bits + j, kRows);
    upcoming->FetchSome();
    if (any == 0) return;
    const int64_t last = (63 - __builtin_clzll(any)) / kLanes + 1;
    int64_t v = __builtin_ctzll(any) / kLanes;
    while (v < last) {
      const int64_t count = last - v < kVectorsAcross ? last - v : kVectorsAcross;
      MultiplyVectors<LeftFactor::kByRows, kRows>(count, a + j * a_stride, a_stride,
                                                  columns + v * kLanes, int64_t{kCell}, depth, adds,
                                                  scores + j * kCell + v * kLanes, int64_t{kCell});
      v += count;
    }
  });
  static_assert(kVectors * kLanes == kCell);
}

// sums[i] += weights(i, k) rows[k] for `count` rows of sums and `depth` rows of `size` features, a
// multiple of the lanes; weights (i, k) stand at k * 64 + i if they are by columns, else at
// i * 64 + k. Where `bits` has none of a row of sums, weights are 0.
template <LeftFactor kWeights, typename Acc>
[[gnu::noinline]] void AddWeighted(const Acc* weights, int64_t count, const Acc* rows,
                                   int64_t row_stride, int64_t depth, int64_t size,
                                   const uint64_t* bits, UpcomingCell* upcoming, Acc* sums,
                                   int64_t sums_stride) {
  constexpr int kLanes = kMaxLanes<Acc>;
  constexpr int64_t kRowStep = kWeights == LeftFactor::kByRows ? kCell : 1;
  constexpr int64_t kDepthStep = kWeights == LeftFactor::kByRows ? 1 : kCell;
  const int64_t vectors = size / kLanes;
  for (int64_t v = 0; v < vectors; v += kVectorsAcross) {
    const int64_t width = vectors - v < kVectorsAcross ? vectors - v : kVectorsAcross;
    ForEachRows(count, [&]<int kRows>(int64_t r) __attribute__((always_inline)) {
      const uint64_t any = bits == nullptr ? LowBits(depth) : AnyOf(bits + r, kRows);
      upcoming->FetchSome();
      if (any == 0) return;
      const int64_t first = __builtin_ctzll(any), last = 64 - __builtin_clzll(any);
      MultiplyVectors<kWeights, kRows>(width, weights + first * kDepthStep + r * kRowStep,
                                       int64_t{kCell}, rows + first * row_stride + v * kLanes,
                                       row_stride, last - first, true,
                                       sums + r * sums_stride + v * kLanes, sums_stride);
    });
  }
}

// ---- Products of single rows, which are padded to a multiple of the lanes ----

// products[i] += x[r] . rows[c] for the position i of row r and column c, as many positions at a
// time as a vector has lanes.
template <typename Acc>
[[gnu::noinline]] void AddDots(const Positions& positions, const Acc* x, int64_t x_stride,
                               const Acc* rows, int64_t stride, int64_t size,
                               UpcomingCell* upcoming, Acc* products) {
  constexpr int kLanes = kMaxLanes<Acc>, kTogether = kLanes < 4 ? kLanes : 4;
  for (int first = 0; first < positions.count(); first += kLanes) {
    upcoming->FetchSome();
    Vector<Acc, kLanes> sums[kLanes];
#pragma GCC unroll 4
    for (int at = 0; at < kLanes; at += kTogether) {
      const Acc *a[kTogether], *b[kTogether];
      Vector<Acc, kLanes> v[kTogether] = {};
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) {
        a[i] = x + positions.rows[first + at + i] * x_stride;
        b[i] = rows + positions.columns[first + at + i] * stride;
      }
#pragma GCC unroll 1
      for (int64_t f = 0; f < size; f += kLanes) {
#pragma GCC unroll 4
        for (int i = 0; i < kTogether; ++i) v[i] += Load<kLanes>(a[i] + f) * Load<kLanes>(b[i] + f);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) sums[at + i] = v[i];
    }
    Acc* to = products + first;
    Store<kLanes, Acc>(Load<kLanes>(to) + SumOfEach<kLanes, Acc>(sums), to);
  }
}

template <int kVectors, typename Acc>
JAXSPARSE_INLINE void AddRowsTile(const Acc* weights, const Acc* rows, int64_t stride,
                                  const uint8_t* columns, int count, Acc factor, Acc* sums) {
  constexpr int kLanes = kMaxLanes<Acc>;
  Vector<Acc, kLanes> v[kVectors];
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) v[j] = Load<kLanes>(sums + j * kLanes) * factor;
  for (int i = 0; i < count; ++i) {
    const auto weight = Broadcast<kLanes>(weights[i]);
    const Acc* from = rows + columns[i] * stride;
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) v[j] += weight * Load<kLanes>(from + j * kLanes);
  }
#pragma GCC unroll 8
  for (int j = 0; j < kVectors; ++j) Store<kLanes, Acc>(v[j], sums + j * kLanes);
}

// sums[r] = factors[r] * sums[r] + the weights[i] rows[c] of row r's positions i, of column c. Null
// factors are 1.
template <typename Acc>
[[gnu::noinline]] void AddRows(const Positions& positions, const Acc* weights, const Acc* rows,
                               int64_t stride, int64_t size, uint64_t used_rows, const Acc* factors,
                               Acc* sums, int64_t sums_stride) {
  constexpr int kLanes = kMaxLanes<Acc>;
  for (; used_rows != 0; used_rows &= used_rows - 1) {
    const int r = __builtin_ctzll(used_rows), begin = positions.begins[r];
    const Acc factor = factors == nullptr ? 1 : factors[r];
    int64_t f = 0;
    const auto tiles = [&]<int kVectors>() __attribute__((always_inline)) {
      for (; f + kVectors * kLanes <= size; f += kVectors * kLanes) {
        AddRowsTile<kVectors>(weights + begin, rows + f, stride, positions.columns + begin,
                              positions.begins[r + 1] - begin, factor, sums + r * sums_stride + f);
      }
    };
    tiles.template operator()<8>();
    tiles.template operator()<2>();
    tiles.template operator()<1>();
  }
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
