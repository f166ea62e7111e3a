// Scans over the entries of rows that a warp's lanes have in registers, which begin anew with each
// row.
#pragma once

#include "cuda/vector_access.cuh"

namespace jaxsparse {

// In shared memory, a byte for each of so many entries and for what stands behind them: whether a
// row begins.
template <int kEntries>
struct alignas(16) MarkedBegins {
  unsigned char of_entries[kEntries + 16];

  __device__ __forceinline__ void Clear(int lane) {
    static_assert(kEntries <= 16 * kWarp);
    if (lane < kEntries / 16) reinterpret_cast<Vector<uint32_t, 4>*>(of_entries)[lane] = {};
  }
  // Of a lane's entries, as RowBegins has them.
  template <int kCount>
  __device__ __forceinline__ uint32_t OfLane(int lane) const {
    const auto* words = reinterpret_cast<const uint32_t*>(of_entries + lane * kCount);
    uint32_t bits = 0;
#pragma unroll
    for (int w = 0; w < kCount / 4; ++w) bits |= words[w] << w;
    return bits;
  }
};

// Where rows begin among the entries of a warp's lanes.
struct RowBegins {
  uint32_t own;    // a bit for each of the lane's entries
  unsigned lanes;  // in which any begins
  int lane;
  int first_lane;  // in which, or in front of which, the row of the lane's last entry begins

  // Four bytes of marks are a word, and those of the next four entries are a bit further left.
  __device__ __forceinline__ static constexpr uint32_t BitOf(int k) {
    return 1u << (k % 4 * 8 + k / 4);
  }
  __device__ __forceinline__ static constexpr uint32_t BitsUpTo(int k) {
    const uint32_t each = 0x01010101;
    return each * ((1u << k / 4) - 1) | each >> (3 - k % 4) * 8 << k / 4;
  }

  __device__ __forceinline__ RowBegins(uint32_t own_begins)
      : own(own_begins),
        lanes(__ballot_sync(kAllLanes, own_begins != 0)),
        lane(static_cast<int>(threadIdx.x % kWarp)) {
    const unsigned up_to = lanes & (0xffffffffu >> (kWarp - 1 - lane));
    first_lane = up_to == 0 ? 0 : kWarp - 1 - __clz(static_cast<int>(up_to));
  }

  // For each entry x what its row has in all, of an operation in the order of lanes; of the run's
  // first and last rows what it has of them.
  template <int kCount, typename Acc, typename Operation>
  __device__ __forceinline__ void OfRows(const Acc (&x)[kCount], Operation operation,
                                         Acc (&all)[kCount]) {
    all[0] = x[0];  // of the entry's row, what the lane has of it up to there
#pragma unroll
    for (int k = 1; k < kCount; ++k) {
      const Acc both = operation(all[k > 0 ? k - 1 : 0], x[k]);
      all[k] = (own & BitOf(k)) != 0 ? x[k] : both;
    }
    Acc behind = all[kCount - 1];
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const Acc before = __shfl_up_sync(kAllLanes, behind, distance);
      if (lane - distance >= first_lane) behind = operation(before, behind);
    }
    // The row of the first entry, as far as that is in the lane, goes on from lanes in front.
    const Acc before = __shfl_up_sync(kAllLanes, behind, 1);
    const uint32_t from_before = lane > 0 ? own : ~0u;
    Acc of_first = before;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if ((from_before & BitsUpTo(k)) == 0) of_first = all[k] = operation(before, all[k]);
    }
    // The same bits, but not the predicates that the first pass has made of them: there are not as
    // many, and to bring them back takes longer.
    const uint32_t begins = __shfl_sync(kAllLanes, own, lane);
    // The lane in which the row of the own last entry ends.
    const unsigned later = lane == kWarp - 1 ? 0 : lanes >> (lane + 1) << (lane + 1);
    const int last_lane = later == 0 ? kWarp - 1 : __ffs(static_cast<int>(later)) - 1;
    const Acc of_last = __shfl_sync(kAllLanes, of_first, last_lane);
    Acc of_row = lane == kWarp - 1 ? all[kCount - 1] : of_last;
#pragma unroll
    for (int k = kCount - 1; k >= 0; --k) {
      const Acc of_next = of_row;
      if (k > 0 && (begins & BitOf(k)) != 0) of_row = all[k > 0 ? k - 1 : 0];
      all[k] = of_next;
    }
  }
};

}  // namespace jaxsparse
