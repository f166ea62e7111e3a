// Cotangents of attention that are computed entry by entry, by a warp. In products of tiles a
// factor of 0 that meets NaN makes sums NaN that should not be: such rows, of which there are few
// or none, are computed once more.
#pragma once

#include "attention/kernels/cotangent.h"
#include "attention/kernels/mask_cells.cuh"
#include "attention/kernels/scores.cuh"
#include "attention/kernels/softmax.cuh"

namespace jaxsparse {

// What is added to the scores of a row in base 2, so that their powers are probabilities. Those of
// a row that sees nothing are 0.
__device__ __forceinline__ float ShiftOf(float lse) {
  const float least = __uint_as_float(0xff800000);
  return lse == least ? least : -lse * kLog2OfE<float>;
}

// A row of at most kMost numbers in the registers of a warp; behind its `size` ones there are
// zeros.
template <typename T, int kMost>
struct RowOfWarp {
  static constexpr int kOfLane = (kMost + kWarp - 1) / kWarp;
  float numbers[kOfLane];

  __device__ __forceinline__ void Load(const T* row, int size) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int at = i * kWarp + threadIdx.x % kWarp;
      numbers[i] = at < size ? ToAccumulator(row[at]) : 0;
    }
  }
  __device__ __forceinline__ void Store(T* row, int size, float scale) const {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int at = i * kWarp + threadIdx.x % kWarp;
      if (at < size) FromAccumulator(numbers[i] * scale, &row[at]);
    }
  }
  __device__ __forceinline__ float Dot(const RowOfWarp& other) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) sum += numbers[i] * other.numbers[i];
    return SumOverLanes(sum, kWarp);
  }
  // Whether all are NaN, which nothing that is added changes.
  __device__ __forceinline__ bool IsNan(int size) const {
    bool is_nan = true;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int at = i * kWarp + threadIdx.x % kWarp;
      is_nan = is_nan && (numbers[i] != numbers[i] || at >= size);
    }
    return __all_sync(kAllLanes, is_nan);
  }
  __device__ __forceinline__ void Add(float factor, const RowOfWarp& other) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) numbers[i] += factor * other.numbers[i];
  }
};

// Calls with each stored position of a line of a row of tiles, in their order, as long as it
// returns true. Positions are those along the other dimension, below `positions`.
template <typename Function>
__device__ __forceinline__ void ForEachStored(const MaskRow& row, int line, uint32_t positions,
                                              Function function) {
  const int down = line / kMaskCell, r = line % kMaskCell;
#pragma unroll 1
  for (uint32_t e = 0; e < row.count; ++e) {
    const uint32_t entry = WithWords(row, row.entries[e]);
    const uint32_t first = row.ColumnOf(entry) * kMaskTile;
#pragma unroll 1
    for (int i = 0; i < kMaskTile; ++i) {
      const int across = i / kMaskCell, c = i % kMaskCell;
      const MaskCell cell = MaskCellOf(entry, down, across);
      bool stored = cell != MaskCell::kEmpty && first + i < positions;
      if (cell == MaskCell::kPartial) {
        const uint32_t* words = row.WordsAt(row.bits_at[e], CountPartialCells(entry)) +
                                CountPartialCells(entry, down, across) * kMaskCellWords;
        stored = stored && IsStored(words, r, c);
      }
      if (stored && !function(first + i)) return;
    }
  }
}

// A query as a key meets it, and what follows from both.
template <typename T, int kHeadSize, int kValueSize>
struct StoredEntry {
  RowOfWarp<T, kHeadSize> query;
  RowOfWarp<T, kValueSize> ct_out;
  float lse, ct_sums;

  // `row`: the query, of a head of all.
  __device__ __forceinline__ void Load(const AttentionCotangentWork& p, const BatchPlace& place,
                                       uint32_t head, uint32_t row) {
    const int64_t at = row * (p.groups * p.per_group) + head;
    query.Load(place.At<const T>(p.batch, p.query) + at * p.head_size,
               static_cast<int>(p.head_size));
    ct_out.Load(place.At<const T>(p.batch, p.ct_out) + at * p.value_size,
                static_cast<int>(p.value_size));
    lse = place.At<const float>(p.batch, p.lse)[head * p.queries + row];
    ct_sums = place.At<const float>(p.batch, p.ct_sums)[head * p.queries + row];
  }
  // The probability as it meets the value, and that of the score times the cotangent of its
  // tangent. The entry is at `row` and `column`.
  template <typename Scoring>
  __device__ __forceinline__ void Meet(const AttentionCotangentWork& p,
                                       const HeadScores<Scoring>& head, uint32_t row,
                                       uint32_t column, const RowOfWarp<T, kHeadSize>& key,
                                       const RowOfWarp<T, kValueSize>& value, float* probability,
                                       float* ct_score) const {
    float slope = 1;
    if constexpr (Scoring::Function::kExists) {
      const float score = head.Of(query.Dot(key), row, column, &slope);
      *probability = ApproximateExp2(score * kLog2OfE<float> + ShiftOf(lse));
    } else {
      *probability = ApproximateExp2(query.Dot(key) * p.log2_scale + ShiftOf(lse));
    }
    if constexpr (Scoring::kDrops) {
      const bool kept = head.Keeps(head.HashOfRow(row), column);
      const float ct_probability = kept ? ct_out.Dot(value) * head.KeptScale() : 0.0f;
      *ct_score = *probability * (ct_probability + ct_sums);
      *probability = kept ? *probability : 0.0f;
    } else {
      *ct_score = *probability * (ct_out.Dot(value) + ct_sums);
    }
    if constexpr (Scoring::Function::kExists) *ct_score *= slope;
  }
};

// Of query `at` of a head of its batch entry's, which row `row` of tiles has: writes ct_query.
template <typename T, int kHeadSize, int kValueSize, typename Scoring = NoScoring>
__device__ __forceinline__ void WriteQueryByEntries(const AttentionCotangentWork& p,
                                                    const BatchPlace& place, uint32_t head,
                                                    uint32_t row, uint32_t at) {
  const auto per_group = static_cast<uint32_t>(p.per_group);
  const uint32_t group = head / per_group;
  const auto head_size = static_cast<int>(p.head_size);
  const auto value_size = static_cast<int>(p.value_size);
  const T* keys = place.At<const T>(p.batch, p.key) + group * head_size;
  const T* values = place.At<const T>(p.batch, p.value) + group * value_size;
  StoredEntry<T, kHeadSize, kValueSize> entry;
  entry.Load(p, place, head, at);
  RowOfWarp<T, kHeadSize> sums = {};
  MaskRow mask;
  mask.Set(p.mask, p.batch, place, static_cast<uint32_t>(p.mask.Own(group, head % per_group)), row);
  HeadScores<Scoring> scores(p);
  scores.Set(place, head);
  const auto add = [&](uint32_t u) {
    RowOfWarp<T, kHeadSize> key;
    RowOfWarp<T, kValueSize> value;
    key.Load(keys + u * p.groups * head_size, head_size);
    value.Load(values + u * p.groups * value_size, value_size);
    float probability, ct_score;
    entry.Meet(p, scores, at, u, key, value, &probability, &ct_score);
    sums.Add(ct_score, key);
    return !sums.IsNan(head_size);
  };
  ForEachStored(mask, at % kMaskTile, static_cast<uint32_t>(p.keys), add);
  T* ct_query = place.At<T>(p.batch, p.ct_query) + (at * p.groups * per_group + head) * head_size;
  sums.Store(ct_query, head_size, static_cast<float>(p.scale));
}

// Of key `at` of a group of its batch entry's, which row `row` of the transposed mask's tiles has:
// writes ct_key, ct_value or both.
template <typename T, int kHeadSize, int kValueSize, bool kOfKeys = true, bool kOfValues = true,
          typename Scoring = NoScoring>
__device__ __forceinline__ void WriteKeyByEntries(const AttentionCotangentWork& p,
                                                  const BatchPlace& place, uint32_t group,
                                                  uint32_t row, uint32_t at) {
  const auto heads = static_cast<uint32_t>(p.per_group);
  const auto head_size = static_cast<int>(p.head_size);
  const auto value_size = static_cast<int>(p.value_size);
  const int64_t vector = at * p.groups + group;
  RowOfWarp<T, kHeadSize> key, key_sums = {};
  RowOfWarp<T, kValueSize> value, value_sums = {};
  HeadScores<Scoring> scores(p);
  key.Load(place.At<const T>(p.batch, p.key) + vector * head_size, head_size);
  value.Load(place.At<const T>(p.batch, p.value) + vector * value_size, value_size);
#pragma unroll 1
  for (uint32_t of_group = 0; of_group < heads; ++of_group) {
    const auto own = static_cast<uint32_t>(p.transposed_mask.Own(group, of_group));
    MaskRow mask;
    mask.Set(p.transposed_mask, p.batch, place, own, row);
    scores.Set(place, group * heads + of_group);
    const auto add = [&](uint32_t query) {
      StoredEntry<T, kHeadSize, kValueSize> entry;
      entry.Load(p, place, group * heads + of_group, query);
      float probability, ct_score;
      entry.Meet(p, scores, query, at, key, value, &probability, &ct_score);
      value_sums.Add(probability, entry.ct_out);
      key_sums.Add(ct_score, entry.query);
      return !((!kOfValues || value_sums.IsNan(value_size)) &&
               (!kOfKeys || key_sums.IsNan(head_size)));
    };
    ForEachStored(mask, at % kMaskTile, static_cast<uint32_t>(p.queries), add);
  }
  if constexpr (kOfKeys) {
    key_sums.Store(place.At<T>(p.batch, p.ct_key) + vector * head_size, head_size,
                   static_cast<float>(p.scale));
  }
  if constexpr (kOfValues) {
    value_sums.Store(place.At<T>(p.batch, p.ct_value) + vector * value_size, value_size,
                     scores.KeptScale());
  }
}

}  // namespace jaxsparse
