// What attention over a block mask writes, once a row of tiles is done (tiles.cu): results, lse,
// and rows anew whose sums are not finite.
#pragma once

#include "attention/kernels/exact_rows.cuh"
#include "attention/kernels/scores.cuh"
#include "attention/kernels/tiles_schedule.cuh"

namespace jaxsparse {

// Of a warp, 16 rows of an item.
template <typename T, AttentionTilesConfig kConfig, typename Scoring>
class TilesResults {
  static constexpr int kHeadSize = kConfig.head_size, kValueSize = kConfig.value_size;
  static constexpr int kSums = kValueSize / 2;  // of a thread

  const AttentionTilesProblem& p_;
  const HeadScores<Scoring>& head_;
  float scale_;         // that turns scores to powers of 2
  uint32_t first_row_;  // of the item's
  int lane_;

  // Writes two rows of a thread, whose neighbours exchange words of 32 columns so that each has
  // 16 bytes of them.
  __device__ __forceinline__ void WriteRows(const AttentionItem& item, const float (&sums)[kSums],
                                            const float (&factors)[2],
                                            const uint32_t (&rows)[2]) const {
    const int64_t step = p_.groups * p_.per_group * kValueSize;
    const bool odd = lane_ % 2 != 0, upper = lane_ / 2 % 2 != 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint16_t* const to = item.out + rows[row] * step + lane_ % 4 * 8;
#pragma unroll
      for (int first = 0; first < kSums; first += 16) {
        Vector<uint32_t, 4> words;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = first + 4 * i + 2 * row;
          words.elements[i] = PairOf(T(), sums[at] * factors[row], sums[at + 1] * factors[row]);
        }
        const auto exchange = [&](int a, int b, bool gives_a, int distance) {
          uint32_t &x = words.elements[a], &y = words.elements[b];
          const uint32_t other = __shfl_xor_sync(kAllLanes, gives_a ? x : y, distance);
          (gives_a ? x : y) = other;
        };
        exchange(0, 1, odd, 1);
        exchange(2, 3, odd, 1);
        exchange(0, 2, upper, 2);
        exchange(1, 3, upper, 2);
        if (rows[row] < p_.queries) {
          *reinterpret_cast<Vector<uint32_t, 4>*>(to + 2 * first) = words;
        }
      }
    }
  }

  // Writes rows anew of which `wrong` has the bits, by the number of the row of this warp.
  __device__ __forceinline__ void WriteExactly(const AttentionItem& item, uint32_t wrong) const {
    const int64_t heads = p_.groups * p_.per_group;
    HeadOperands<T> of;
    of.key = item.place.template At<const T>(p_.batch, p_.key) + item.group * kHeadSize;
    of.value = item.place.template At<const T>(p_.batch, p_.value) + item.group * kValueSize;
    of.key_step = p_.groups * kHeadSize;
    of.value_step = p_.groups * kValueSize;
    of.keys = static_cast<uint32_t>(p_.keys);
    of.head_size = kHeadSize;
    of.value_size = kValueSize;
    of.scale = scale_;
#pragma unroll 1
    for (; wrong != 0; wrong &= wrong - 1) {
      const uint32_t of_item = first_row_ + __ffs(static_cast<int>(wrong)) - 1;
      const uint32_t row = item.first_query + of_item;
      of.query = item.place.template At<const T>(p_.batch, p_.query) +
                 (row * heads + item.head) * kHeadSize;
      float out[kValueSize / kWarp], lse;
      ComputeRow(item.mask, of_item, of, out, lse, RowScores<Scoring>(head_, row));
      T* const to = reinterpret_cast<T*>(item.out) + row * heads * kValueSize;
#pragma unroll
      for (int i = 0; i < kValueSize / kWarp; ++i) FromAccumulator(out[i], &to[i * kWarp + lane_]);
      if (lane_ == 0) item.lse[row] = lse;
    }
  }

 public:
  __device__ __forceinline__ TilesResults(const AttentionTilesProblem& p,
                                          const HeadScores<Scoring>& head, float scale,
                                          uint32_t first_row)
      : p_(p), head_(head), scale_(scale), first_row_(first_row), lane_(threadIdx.x % kWarp) {}

  // `mixed`: whether some of the tiles have positions that are not stored.
  __device__ __forceinline__ void Write(const AttentionItem& item, const OnlineSoftmax& softmax,
                                        const float (&sums)[kSums], bool mixed) const {
    float factors[2];
    uint32_t rows[2], wrong = 0;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      rows[row] = item.first_query + first_row_ + 8 * row + lane_ / 4;
      const float total = softmax.Total(row);
      factors[row] = total == 0 ? 0.0f : 1.0f / total;
      if constexpr (Scoring::kDrops) factors[row] *= head_.KeptScale();
      float not_finite = 0;  // NaN, if a sum is not
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        not_finite += sums[i + 2 * row] * 0.0f;
        not_finite += sums[i + 2 * row + 1] * 0.0f;
      }
      if (lane_ % 4 == 0 && rows[row] < p_.queries) {
        item.lse[rows[row]] = softmax.LogOfSum(row, total);
      }
      const unsigned of_lanes = __ballot_sync(
          kAllLanes, mixed && !(not_finite == 0) && total - total == 0 && rows[row] < p_.queries);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        wrong |= static_cast<uint32_t>((of_lanes >> 4 * i & 15) != 0) << (8 * row + i);
      }
    }
    WriteRows(item, sums, factors, rows);
    if (wrong == 0) return;
    __syncwarp();  // the same rows are written once more
    WriteExactly(item, wrong);
  }
};

}  // namespace jaxsparse
