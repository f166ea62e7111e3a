// The sparse-dense product tile by tile of a row of the result (Gale et al. 2020, "Sparse GPU
// Kernels for Deep Learning"). Lanes own kVector neighbouring columns each, so that an entry costs
// one wide load of x; kLanes of them make a group, as wide as the tile, and kGroups of groups share
// a row's entries where there are too few rows to fill the GPU, and add up in a fixed order.
//
// Floors: every entry reads kLanes * kVector elements of x from L1, 128 bytes a clock and
// multiprocessor; from memory come the entries, x and the result, once each.
#include "spmm/matrices.cuh"

namespace jaxsparse {

// A run of neighbouring entries. A row's first run begins in front of the row, where a load is
// aligned; what does not belong to the row is not used.
template <typename T, typename Index, bool kPermuted>
struct Entries {
  static constexpr int kCount = 4;
  Packet<T, kCount> values;
  Packet<Index, kCount> columns;

  // `wide`: by one load each.
  template <typename M>
  __device__ __forceinline__ void Load(const M& m, int first, int nse, bool wide) {
    if (first + kCount <= nse) {
      columns = LoadPacket<kCount>(m.column_indices + first, wide);
      if constexpr (kPermuted) {
        const auto from = LoadPacket<kCount>(m.permutation + first, wide);
#pragma unroll
        for (int e = 0; e < kCount; ++e) values.elements[e] = m.values[from.elements[e]];
      } else {
        values = LoadPacket<kCount>(m.values + first, wide);
      }
    } else {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        if (first + e >= nse) continue;
        columns.elements[e] = m.column_indices[first + e];
        values.elements[e] = m.values[kPermuted ? m.permutation[first + e] : first + e];
      }
    }
  }
};

// Adds one group's share of a row's entries: runs `group`, `group` + kGroups, ...
template <int kGroups, typename Run, bool kWide, int kVector, typename M, typename T, typename Acc>
__device__ __forceinline__ void AddRuns(const M& m, int begin, int end, int nse, int group,
                                        const T* x, uint32_t row_bytes, Acc (&sums)[kVector]) {
  constexpr int kStep = Run::kCount * kGroups;
  const auto load = [&](uint32_t k) {
    const char* from = reinterpret_cast<const char*>(x) + static_cast<uint64_t>(k) * row_bytes;
    return LoadPacket<kVector>(reinterpret_cast<const T*>(from), kWide);
  };
  const auto add = [&](T value, const Packet<T, kVector>& of_x) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      sums[c] += ToAccumulator(value) * ToAccumulator(of_x.elements[c]);
    }
  };
  int i = begin / Run::kCount * Run::kCount + group * Run::kCount;
  Run next = {};
  if (i < end) next.Load(m, i, nse, kWide);
  for (; i < end; i += kStep) {
    const Run run = next;
    if (i + kStep < end) next.Load(m, i + kStep, nse, kWide);
    if (i >= begin && i + Run::kCount <= end) {
      Packet<T, kVector> of_x[Run::kCount];
#pragma unroll
      for (int e = 0; e < Run::kCount; ++e) of_x[e] = load(run.columns.elements[e]);
#pragma unroll
      for (int e = 0; e < Run::kCount; ++e) add(run.values.elements[e], of_x[e]);
    } else {
#pragma unroll
      for (int e = 0; e < Run::kCount; ++e) {
        if (i + e < begin || i + e >= end) continue;
        add(run.values.elements[e], load(run.columns.elements[e]));
      }
    }
  }
}

template <typename T, typename Out, typename Index, int kVector, int kLanes, int kGroups,
          bool kPermuted, bool kOrdered>
__global__ void __launch_bounds__(kSpmmTiledThreads)
    SpmmTiled(const __grid_constant__ SpmmProblem p) {
  using Acc = Accumulator<T>;
  using Run = Entries<T, Index, kPermuted>;
  constexpr int kSharing = kLanes * kGroups;  // threads of a row
  constexpr int kRows = kSpmmTiledThreads / kSharing;
  constexpr int kWarps = kSharing / kWarp;  // of a row, if there is more than one
  static_assert(kSharing <= kSpmmTiledThreads && kSpmmTiledThreads % kSharing == 0);
  __shared__ Acc parts[kWarps > 1 ? kRows * (kWarps - 1) * kLanes * kVector : 1];

  const int member = threadIdx.x % kSharing;
  const int lane = member % kLanes, group = member / kLanes;
  const uint32_t rows = static_cast<uint32_t>(p.pattern.rows);
  const uint32_t tiles = static_cast<uint32_t>(CeilDivide(p.n, kLanes * kVector));
  const uint32_t units = static_cast<uint32_t>(p.batch.count) * tiles * rows;
  const uint32_t row_bytes = static_cast<uint32_t>(p.n * sizeof(T));

  for (uint32_t first = blockIdx.x * kRows; first < units; first += gridDim.x * kRows) {
    const uint32_t unit = first + threadIdx.x / kSharing;
    const bool exists = unit < units;
    const uint32_t at_row = exists ? unit % rows : 0, tile = exists ? unit / rows % tiles : 0;
    const Matrices<T, Out, Index> m(p, exists ? unit / rows / tiles : 0);
    const int64_t row = kOrdered ? m.row_order[at_row] : at_row;
    const RowBounds bounds(m.row_offsets, row, exists ? p.pattern.nse : 0);
    const int64_t column = (static_cast<int64_t>(tile) * kLanes + lane) * kVector;
    const bool owns = exists && column < p.n;
    // Lanes behind the last column read the first ones, and write nothing.
    const T* x = m.x + (owns ? column : 0);
    const bool wide = IsAligned<Packet<T, kVector>>(m.x) &&
                      IsAligned<Packet<T, Run::kCount>>(m.values) &&
                      IsAligned<Packet<Index, Run::kCount>>(m.column_indices) &&
                      (!kPermuted || IsAligned<Packet<int32_t, Run::kCount>>(m.permutation));

    Acc sums[kVector] = {};
    const auto add = [&]<bool kWide>() {
      AddRuns<kGroups, Run, kWide>(m, static_cast<int>(bounds.begin), static_cast<int>(bounds.end),
                                   static_cast<int>(p.pattern.nse), group, x, row_bytes, sums);
    };
    if (wide) {
      add.template operator()<true>();
    } else {
      add.template operator()<false>();
    }
    __syncwarp();
#pragma unroll
    for (int distance = kLanes; distance < kSharing && distance < kWarp; distance *= 2) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) sums[c] += __shfl_xor_sync(kAllLanes, sums[c], distance);
    }
    if constexpr (kWarps > 1) {
      const int warp = member / kWarp;
      Acc* of_row = parts + threadIdx.x / kSharing * ((kWarps - 1) * kLanes * kVector);
      const auto part = [&](int w, int c) -> Acc& {
        return of_row[((w - 1) * kVector + c) * kLanes + lane];
      };
      __syncthreads();  // the last row's parts have been read
      if (warp > 0 && member % kWarp < kLanes) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) part(warp, c) = sums[c];
      }
      __syncthreads();
      if (group == 0) {
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
#pragma unroll
          for (int c = 0; c < kVector; ++c) sums[c] += part(w, c);
        }
      }
    }
    if (group == 0 && owns) m.WriteRun(p.activation, row, row * p.n + column, sums);
  }
}

}  // namespace jaxsparse
