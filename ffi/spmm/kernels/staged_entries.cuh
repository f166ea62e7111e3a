// The stored entries of a staged block's rows: how a warp walks over them, panel by panel, and adds
// what they multiply in the panel.
#pragma once

#include "cuda/vector_access.cuh"
#include "spmm/kernels/staged.h"
#include "spmm/problem.h"

namespace jaxsparse {

// Where an entry's row of x lies in the pipeline's stages, and what it is multiplied by.
struct alignas(8) StagedEntry {
  uint32_t at;
  float value;
};

// The arrays of a batch entry that a walk over rows reads.
template <typename T, typename Index, bool kPermuted>
struct StagedArrays {
  const T* values;
  const Index* columns;
  const int32_t* permutation;
  const int64_t& nse;

  template <typename M>
  __device__ explicit StagedArrays(const M& m)
      : values(m.values),
        columns(m.column_indices),
        permutation(m.permutation),
        nse(m.pattern.nse) {}
};

// What a warp knows of its rows and parts: lane `slot` of slot `slot`, so that it takes no register
// for each. Of a row, `next` is the entry to go on with. Of a part it counts the part's entries:
// these are the runs of 32 from `begin` on of which each is `parts` behind another.
struct StagedSlots {
  int next = 0, end = 0;
  int row = kNone;  // of the result, if the warp is to write it: of parts the first one's warp is
  int begin = 0, parts = 0;

  static constexpr int kNone = -1;
};

// The next 32 entries of a row or part, one a lane, loaded while the warp multiplies others.
template <typename T, typename Index, bool kPermuted, bool kPrefetch>
struct StagedRow {
  static constexpr uint32_t kNone = ~0u;  // no column
  uint32_t column = kNone;
  uint32_t place = 0;
  T value = {};

  using Arrays = StagedArrays<T, Index, kPermuted>;
  template <bool kPart>
  __device__ __forceinline__ void Load(const Arrays& from, const StagedSlots& slots, int slot) {
    int i = __shfl_sync(kAllLanes, slots.next, slot) + static_cast<int>(threadIdx.x % kWarp);
    const int end = __shfl_sync(kAllLanes, slots.end, slot);
    int behind = i + kWarp;
    if constexpr (kPart) {
      const int parts = __shfl_sync(kAllLanes, slots.parts, slot);
      i = __shfl_sync(kAllLanes, slots.begin, slot) + i / kWarp * (parts * kWarp) + i % kWarp;
      behind = i + parts * kWarp;
    }
    if constexpr (kPrefetch) {
      if (behind < end) {
        Prefetch(from.columns + behind);
        if constexpr (kPermuted) Prefetch(from.permutation + behind);
        else Prefetch(from.values + behind);
      }
    }
    const bool stored = i < end;
    column = kNone;
    if (stored) column = static_cast<uint32_t>(from.columns[i]);
    if constexpr (kPermuted) {
      place = stored ? static_cast<uint32_t>(from.permutation[i]) : 0;
    } else {
      if (stored) value = from.values[i];
    }
  }
  // What has to wait for the first load, and is waited for when the warp has multiplied.
  __device__ __forceinline__ void LoadPermuted(const Arrays& from) {
    if constexpr (kPermuted) {
      value = column != kNone ? from.values[Within(place, from.nse)] : T{};
    }
  }
};

// What all rows of a warp have in common in a panel. Places in shared memory are addresses.
template <typename T, typename Shape>
struct PanelView {
  uint32_t stages;    // address of the first one
  uint32_t buffers;   // of the warp, two: all lanes have read the one before the last one
  uint32_t last = 0;  // which one that is, in bytes
  const T* x;         // the lane's part of the tile, in memory
  int owned;          // columns that x has there
  int64_t n;
  uint32_t begin, end;  // columns of the matrix
  uint32_t first_row;   // the panel's

  using RowVector = Vector<T, Shape::kVector>;

  __device__ __forceinline__ uint32_t NextBuffer() {
    last ^= Shape::kBufferBytes;
    return buffers + last;
  }
  __device__ __forceinline__ static RowVector ReadRow(uint32_t row) {
    return SharedAt<const RowVector>(row + Shape::Lane() * 16);
  }
  __device__ __forceinline__ static void Add(float value, const RowVector& of_x,
                                             float (&sums)[Shape::kVector]) {
#pragma unroll
    for (int c = 0; c < Shape::kVector; ++c) sums[c] += value * ToAccumulator(of_x.elements[c]);
  }

  __device__ __forceinline__ StagedEntry Entry(uint32_t column, float value) const {
    return {first_row + (column - begin) * Shape::kRowBytes, value};
  }

  // Adds the first `count` entries of a buffer: of each 2 * kGroups every group takes two. Half of
  // the time later `meanwhile` is called.
  template <typename Meanwhile>
  __device__ __forceinline__ void AddFromStage(uint32_t buffer, int count,
                                               float (&sums)[Shape::kVector],
                                               Meanwhile meanwhile) const {
    using Pair = Vector<StagedEntry, 2>;
    constexpr int kPairs = 2;  // of a group, at a time
    constexpr uint32_t kStep = Shape::kGroups * sizeof(Pair);
    const uint32_t ahead = Shape::Group() * sizeof(Pair);
    const uint32_t end = buffer + ahead + count * sizeof(StagedEntry);
    uint32_t at = buffer + ahead;
    const uint32_t half = at + count / (4 * kPairs * Shape::kGroups) * (kPairs * kStep);
#pragma unroll 1
    for (const uint32_t last = end - kPairs * kStep; at <= last; at += kPairs * kStep) {
      if (at == half) meanwhile();
      Pair pairs[kPairs];
      RowVector of_x[2 * kPairs];
#pragma unroll
      for (int k = 0; k < kPairs; ++k) pairs[k] = SharedAt<const Pair>(at + k * kStep);
#pragma unroll
      for (int k = 0; k < 2 * kPairs; ++k) of_x[k] = ReadRow(pairs[k / 2].elements[k % 2].at);
#pragma unroll
      for (int k = 0; k < 2 * kPairs; ++k) {
        Add(pairs[k / 2].elements[k % 2].value, of_x[k], sums);
      }
    }
    if (at <= half) meanwhile();
#pragma unroll 1
    for (; at < end; at += kStep) {
      const Pair pair = SharedAt<const Pair>(at);
      // What lies behind the last entry may be anything: not even its product with 0 is added.
      const int left = static_cast<int>(end - ahead - at);
      if (left > 0) Add(pair.elements[0].value, ReadRow(pair.elements[0].at), sums);
      if (left > static_cast<int>(sizeof(StagedEntry))) {
        Add(pair.elements[1].value, ReadRow(pair.elements[1].at), sums);
      }
    }
  }

  // The same from memory, for entries that need not lie in the panel.
  __device__ __forceinline__ void AddFromMemory(uint32_t buffer, int count,
                                                float (&sums)[Shape::kVector]) const {
#pragma unroll 1
    for (int i = Shape::Group(); i < count; i += Shape::kGroups) {
      const StagedEntry entry = SharedAt<const StagedEntry>(buffer + i * sizeof(StagedEntry));
      const int from_begin = static_cast<int>(entry.at - first_row) / Shape::kRowBytes;
      const T* row = x + (static_cast<int64_t>(begin) + from_begin) * n;
      RowVector of_x = {};
#pragma unroll
      for (int c = 0; c < Shape::kVector; ++c) {
        if (c < owned) of_x.elements[c] = row[c];
      }
      Add(entry.value, of_x, sums);
    }
  }
};

// Adds those of a row's or part's next entries that lie in a panel, or in front of it.
template <bool kPart, typename Row, typename View, int kVector>
__device__ __forceinline__ void AddEntries(Row& row, const typename Row::Arrays& arrays,
                                           StagedSlots& slots, int slot, View& view,
                                           float (&sums)[kVector]) {
  const int lane = threadIdx.x % kWarp;
  for (;;) {
    const unsigned inside = __ballot_sync(kAllLanes, row.column < view.end);
    const int count = inside == kAllLanes ? kWarp : __ffs(static_cast<int>(~inside)) - 1;
    if (count == 0) return;
    const bool in_front = __any_sync(kAllLanes, lane < count && row.column < view.begin);
    const uint32_t buffer = view.NextBuffer();
    if (lane < count) {
      SharedAt<StagedEntry>(buffer + lane * sizeof(StagedEntry)) =
          view.Entry(row.column, ToAccumulator(row.value));
    }
    if (lane == slot) slots.next += count;
    row.template Load<kPart>(arrays, slots, slot);
    __syncwarp();
    if (in_front) {
      view.AddFromMemory(buffer, count, sums);
      row.LoadPermuted(arrays);
    } else {
      view.AddFromStage(buffer, count, sums, [&] { row.LoadPermuted(arrays); });
    }
    if (count < kWarp) return;
  }
}

// Of partial sums of groups the whole, in each of them.
template <typename Shape>
__device__ __forceinline__ void AddUpGroups(float (&sums)[Shape::kVector]) {
  __syncwarp();
#pragma unroll
  for (int distance = kWarp / Shape::kGroups; distance < kWarp; distance *= 2) {
#pragma unroll
    for (int c = 0; c < Shape::kVector; ++c) {
      sums[c] += __shfl_xor_sync(kAllLanes, sums[c], distance);
    }
  }
}

}  // namespace jaxsparse
