// Scans over the entries of rows that a warp's lanes have in registers, which begin anew with each
// row.
#pragma once

#include "cuda/device.cuh"

namespace jaxsparse {

// Where rows begin among the entries of a warp's lanes.
struct RowBegins {
  uint32_t own;    // bit k: at the lane's entry k
  unsigned lanes;  // in which any begins
  int lane;
  int first_lane;  // in which, or in front of which, the row of the lane's last entry begins

  __device__ __forceinline__ RowBegins(uint32_t own_begins)
      : own(own_begins),
        lanes(__ballot_sync(kAllLanes, own_begins != 0)),
        lane(static_cast<int>(threadIdx.x % kWarp)) {
    const unsigned up_to = lanes & (0xffffffffu >> (kWarp - 1 - lane));
    first_lane = up_to == 0 ? 0 : kWarp - 1 - __clz(static_cast<int>(up_to));
  }

  // For each entry x what its row has in all, of an operation in the order of entries; of the
  // run's first and last rows what it has of them.
  template <int kCount, typename Acc, typename Operation>
  __device__ __forceinline__ void OfRows(const Acc (&x)[kCount], Operation operation,
                                         Acc (&all)[kCount]) {
    // Each pass takes bits out anew: for all of them there are no predicates, and to bring them
    // back takes longer.
    uint32_t bits = own;
    const auto begins_at = [&](int k) { return (bits >> k & 1) != 0; };
    KeepInRegister(bits);
    Acc behind = x[0];  // of the row that the lane's last entry is of, what the lane has
#pragma unroll
    for (int k = 1; k < kCount; ++k) {
      const Acc both = operation(behind, x[k]);
      behind = begins_at(k) ? x[k] : both;
    }
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const Acc before = __shfl_up_sync(kAllLanes, behind, distance);
      if (lane - distance >= first_lane) behind = operation(before, behind);
    }
    const Acc before = __shfl_up_sync(kAllLanes, behind, 1);
    Acc of_first = before;  // of the row of the lane's first entry, as far as that is in the lane
    KeepInRegister(bits);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const bool is_new = begins_at(k) || (k == 0 && lane == 0);
      const Acc both = operation(k == 0 ? before : all[k > 0 ? k - 1 : 0], x[k]);
      all[k] = is_new ? x[k] : both;
    }
    KeepInRegister(bits);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if ((bits & ((2u << k) - 1)) == 0) of_first = all[k];
    }
    // The lane in which the row of the own last entry ends.
    const unsigned later = lane == kWarp - 1 ? 0 : lanes >> (lane + 1) << (lane + 1);
    const int last_lane = later == 0 ? kWarp - 1 : __ffs(static_cast<int>(later)) - 1;
    const Acc of_last = __shfl_sync(kAllLanes, of_first, last_lane);
    Acc of_row = lane == kWarp - 1 ? all[kCount - 1] : of_last;
    KeepInRegister(bits);
#pragma unroll
    for (int k = kCount - 1; k >= 0; --k) {
      const Acc of_next = of_row;
      if (k > 0 && begins_at(k)) of_row = all[k > 0 ? k - 1 : 0];
      all[k] = of_next;
    }
  }
};

}  // namespace jaxsparse
