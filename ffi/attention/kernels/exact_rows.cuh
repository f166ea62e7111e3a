// Attention of a single row, key by key, by a warp. Products of tiles take keys that a row does not
// see by probabilities of 0, which a NaN or an infinity in their values makes NaN: such rows, of
// which there are few or none, are computed once more from the keys that they see.
#pragma once

#include "attention/kernels/mask_cells.cuh"
#include "attention/kernels/scores.cuh"
#include "attention/kernels/softmax.cuh"

namespace jaxsparse {

// Operands of a head: positions lie so many numbers apart.
template <typename T>
struct HeadOperands {
  const T* query;  // of the row
  const T* key;
  const T* value;
  int64_t key_step, value_step;
  uint32_t keys;
  int head_size, value_size;
  float scale;  // of powers of 2, as of an OnlineSoftmax
};

// What becomes of the products of a row, of all queries.
template <typename Scoring>
struct RowScores {
  const HeadScores<Scoring>& head;
  uint32_t row;

  __device__ __forceinline__ RowScores(const HeadScores<Scoring>& head, uint32_t row)
      : head(head), row(row) {}
};
template <>
struct RowScores<NoScoring> {
  RowScores() = default;
  __device__ __forceinline__ RowScores(const HeadScores<NoScoring>&, uint32_t) {}
};

// `row`: of its row of tiles; `position_of`: where a key of the mask lies. All lanes get `lse`;
// each has the results from its number `lane` on, kWarp apart, kOfLane ones or as many as values
// have.
template <int kOfLane, typename T, typename PositionOf, typename Scoring = NoScoring>
__device__ __forceinline__ void ComputeRow(const MaskRow& mask, uint32_t row,
                                           const HeadOperands<T>& of, PositionOf position_of,
                                           float (&out)[kOfLane], float& lse,
                                           const RowScores<Scoring>& scores = {}) {
  const uint32_t lane = threadIdx.x % kWarp, down = row / kMaskCell;
  float most = kNoScore, total = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) out[i] = 0;
#pragma unroll 1
  for (uint32_t number = 0; number < mask.count; ++number) {
    const uint32_t entry = mask.entries[number];
    const uint32_t partial = CountPartialCells(entry);
#pragma unroll 1
    for (uint32_t part = 0; part < kMaskTile / kWarp; ++part) {
      const uint32_t across = part / 2, column = part % 2 * kWarp + lane;
      const MaskCell cell = MaskCellOf(entry, down, across);
      const uint32_t u = mask.ColumnOf(entry) * kMaskTile + across * kMaskCell + column;
      bool seen = cell == MaskCell::kFull;
      if (cell == MaskCell::kPartial && partial <= mask.cells) {
        const uint32_t* words = mask.WordsAt(mask.bits_at[number], partial) +
                                CountPartialCells(entry, down, across) * kMaskCellWords;
        seen = IsStored(words, row % kMaskCell, column);
      }
      seen = seen && u < of.keys;
      float score = 0;
      if (seen) {
        const T* key = of.key + position_of(u) * of.key_step;
#pragma unroll 1
        for (int i = 0; i < of.head_size; ++i) {
          score += ToAccumulator(of.query[i]) * ToAccumulator(key[i]);
        }
      }
      if constexpr (Scoring::Function::kExists) score = scores.head.Of(score, scores.row, u);
      score = seen ? score * of.scale : kNoScore;
      float now = fmaxf(most, score);
#pragma unroll
      for (int distance = 1; distance < kWarp; distance *= 2) {
        now = fmaxf(now, __shfl_xor_sync(kAllLanes, now, distance));
      }
      const float factor = now > most ? ApproximateExp2(most - now) : 1.0f;
      most = now;
      float p = ApproximateExp2(score - (now == kNoScore ? 0.0f : now));
      total = total * factor + p;
      if constexpr (Scoring::kDrops) {
        p = scores.head.Keeps(scores.head.HashOfRow(scores.row), u) ? p : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) out[i] *= factor;
#pragma unroll 1
      for (unsigned left = __ballot_sync(kAllLanes, seen); left != 0; left &= left - 1) {
        const int from = __ffs(static_cast<int>(left)) - 1;
        const float of_key = __shfl_sync(kAllLanes, p, from);
        const T* value = of.value + position_of(__shfl_sync(kAllLanes, u, from)) * of.value_step;
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          const int at = i * kWarp + static_cast<int>(lane);
          if (at < of.value_size) out[i] += of_key * ToAccumulator(value[at]);
        }
      }
    }
    // All results are NaN then, which nothing that is added changes.
    if (__any_sync(kAllLanes, total != total)) break;
  }
  total = SumOverLanes(total, kWarp);
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) out[i] = total == 0 ? 0 : out[i] / total;
  if constexpr (Scoring::kDrops) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) out[i] *= scores.head.KeptScale();
  }
  lse = LogOfSums(most, total);
}
// Where keys lie in their order.
template <int kOfLane, typename T, typename Scoring = NoScoring>
__device__ __forceinline__ void ComputeRow(const MaskRow& mask, uint32_t row,
                                           const HeadOperands<T>& of, float (&out)[kOfLane],
                                           float& lse, const RowScores<Scoring>& scores = {}) {
  ComputeRow(mask, row, of, [](uint32_t u) { return u; }, out, lse, scores);
}

}  // namespace jaxsparse
