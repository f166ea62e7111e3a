// The sparse-dense product tile by tile of a row of the result (Gale et al. 2020, "Sparse GPU
// Kernels for Deep Learning"). Lanes own kVector neighbouring columns each, so that an entry costs
// one wide load of x; kLanes of them make a group, as wide as the tile, which adds kAtOnce entries
// at a time. A block takes kRows rows and shares its groups out to them by their lengths, so that a
// long row is shared by many; they add up in a fixed order. Where each row has one group, since
// there are more blocks than run at once, groups help with long ones first, if any is long enough.
//
// Floors: every entry reads kLanes * kVector elements of x from L1, 128 bytes a clock and
// multiprocessor; from memory come the entries, x and the result, once each. A group waits for
// memory once for every kAtOnce entries.
#include "spmm/kernels/entry_runs.cuh"
#include "spmm/kernels/tiled.h"

namespace jaxsparse {

// Neighbouring entries, which a group adds at once.
template <typename T, typename Index, int kAtOnce, bool kPermuted>
struct Entries {
  static constexpr int kCount = kAtOnce, kRuns = kCount / kRun;
  Run<T> values[kRuns];
  Run<Index> columns[kRuns];
  Run<int32_t> sources[kRuns];  // if permuted: where the values stand that are loaded next

  // The runs that begin in front of `end`. What is permuted is not waited for twice: where values
  // stand has been loaded before.
  template <typename M>
  __device__ __forceinline__ void Load(const M& m, int first, int end, int nse, bool wide) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const int at = first + r * kRun;
      if (at >= end) continue;
      if (wide && at + kRun <= nse) {
        columns[r] = *reinterpret_cast<const Run<Index>*>(m.column_indices + at);
        if constexpr (kPermuted) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) values[r].Set(e, m.values + Source(r, e, nse));
        } else {
          values[r] = *reinterpret_cast<const Run<T>*>(m.values + at);
        }
      } else {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          if (at + e >= nse) continue;
          columns[r].Set(e, m.column_indices + at + e);
          values[r].Set(e, m.values + (kPermuted ? Source(r, e, nse) : at + e));
        }
      }
    }
  }
  template <typename M>
  __device__ __forceinline__ void LoadSources(const M& m, int first, int end, int nse, bool wide) {
    if constexpr (!kPermuted) return;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const int at = first + r * kRun;
      if (at >= end) continue;
      if (wide && at + kRun <= nse) {
        sources[r] = *reinterpret_cast<const Run<int32_t>*>(m.permutation + at);
      } else {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          if (at + e < nse) sources[r].Set(e, m.permutation + at + e);
        }
      }
    }
  }

  __device__ __forceinline__ uint32_t Source(int r, int e, int nse) const {
    return Within(sources[r].Get(e), nse);
  }
  // Columns become some of x, whatever they were; it is to wait for them.
  __device__ __forceinline__ static uint32_t BoundOf(int64_t count) {
    return Run<Index>::BoundOf(static_cast<uint32_t>(count) - 1);
  }
  __device__ __forceinline__ void Bound(uint32_t bound) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) columns[r].Bound(bound);
  }
  __device__ __forceinline__ T Value(int e) const { return values[e / kRun].Get(e % kRun); }
  __device__ __forceinline__ uint32_t Column(int e) const {
    return static_cast<uint32_t>(columns[e / kRun].Get(e % kRun));
  }
};

// Entries whose columns become places in x, in bytes, where they are used: the multiplication is
// part of that of the address.
template <typename Chunk, bool kPrescaled>
struct Placed : Chunk {
  __device__ __forceinline__ void Scale(uint32_t, uint32_t) {}
  __device__ __forceinline__ uint64_t Place(int e, uint32_t row_bytes) const {
    return MultiplyWide(Chunk::Column(e), row_bytes);
  }
};
// Or when they are loaded, which is to wait for them; they are kept in 32 bits.
template <typename Chunk>
struct Placed<Chunk, true> : Chunk {
  uint32_t places[Chunk::kCount];

  __device__ __forceinline__ void Scale(uint32_t bound, uint32_t row_bytes) {
    Chunk::Bound(bound);
#pragma unroll
    for (int e = 0; e < Chunk::kCount; ++e) places[e] = Chunk::Column(e) * row_bytes;
  }
  __device__ __forceinline__ void Bound(uint32_t) {}  // they are
  __device__ __forceinline__ uint64_t Place(int e, uint32_t) const { return places[e]; }
};

// A row, or -1, and a group's share of it: of every so many chunks of entries one.
struct RowShare {
  int row, begin, end;
  int share, shares;
};

template <bool kWide, typename Chunk, bool kUnrolledRest, int kVector, typename M, typename T,
          typename Acc>
__device__ __forceinline__ void AddShare(const M& m, const RowShare& s, int nse, const T* x,
                                         uint32_t row_bytes, Acc (&sums)[kVector]) {
  const auto load = [&](uint64_t place) {
    const char* from = reinterpret_cast<const char*>(x) + place;
    return LoadVector<kVector>(reinterpret_cast<const T*>(from), kWide);
  };
  const auto add = [&](Acc value, const Vector<T, kVector>& of_x) {
#pragma unroll
    for (int c = 0; c < kVector; ++c) sums[c] += value * ToAccumulator(of_x.elements[c]);
  };
  constexpr int kCount = Chunk::kCount;
  const int step = s.shares * kCount;
  int i = FirstRun(s.begin) + s.share * kCount;
  uint32_t bound = Chunk::BoundOf(m.pattern.columns);
  KeepInRegister(bound);  // or these are computed again for each chunk
  KeepInRegister(x);
  Chunk next = {};
  const auto load_entries = [&](int at) {
    next.Load(m, at, s.end, nse, kWide);
    next.Scale(bound, row_bytes);
    next.LoadSources(m, at + step, s.end, nse, kWide);
  };
  next.LoadSources(m, i, s.end, nse, kWide);
  if (i < s.end) load_entries(i);
  for (; i < s.end; i += step) {
    Chunk entries = next;
    if (i + step < s.end) load_entries(i + step);
    entries.Bound(bound);
    Vector<T, kVector> of_x[kCount];
    if (i >= s.begin && i + kCount <= s.end) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) of_x[e] = load(entries.Place(e, row_bytes));
#pragma unroll
      for (int e = 0; e < kCount; ++e) add(ToAccumulator(entries.Value(e)), of_x[e]);
    } else if constexpr (kUnrolledRest) {
      // What does not belong to the row is not loaded, and counts as 0.
      const auto belongs = [&](int e) { return i + e >= s.begin && i + e < s.end; };
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        of_x[e] = {};
        if (belongs(e)) of_x[e] = load(entries.Place(e, row_bytes));
      }
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        add(belongs(e) ? ToAccumulator(entries.Value(e)) : Acc(0), of_x[e]);
      }
    } else {  // entry by entry, from memory
      const int first = i < s.begin ? s.begin : i, end = i + kCount < s.end ? i + kCount : s.end;
#pragma unroll 1
      for (int e = first; e < end; ++e) {
        add(m.Value(e), load(MultiplyWide(m.Column(e), row_bytes)));
      }
    }
  }
}

// How a block's groups are shared out to its rows by their lengths: lane r % kRows knows row r.
struct GroupShares {
  RowShare of_lane;  // all of the lane's row
  int behind;        // the first group behind those of the row

  // If kAll, rows without entries get a group, too.
  template <int kGroups, int kRows, int kCount, bool kAll>
  __device__ __forceinline__ static GroupShares Of(const RowShare& row) {
    const auto divide = [](int a, int b) { return (a + b - 1) / b; };  // rounded up
    const int length = row.end > row.begin ? row.end - FirstRun(row.begin) : 0;
    // So many that a warp's sum of them fits, whatever offsets are; no others are shared out.
    constexpr int kMost = 1 << 25;
    const int all = kAll && length <= kCount ? 1 : divide(length, kCount);
    const int chunks = all < kMost ? all : kMost;
    // With at most so many chunks for each group, rows never take more groups than there are.
    const int rows = kAll ? kRows : SumOverLanes(chunks > 0 ? 1 : 0, kRows);
    const int most = divide(SumOverLanes(chunks, kRows), kGroups - rows + 1);
    GroupShares shares{row, 0};
    shares.of_lane.shares = chunks > 0 ? divide(chunks, most) : 0;
    shares.behind = shares.of_lane.shares;
#pragma unroll
    for (int distance = 1; distance < kRows; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, shares.behind, distance);
      if (static_cast<int>(threadIdx.x) % kRows >= distance) shares.behind += before;
    }
    return shares;
  }

  // What is a group's own; without a share it has an empty row.
  template <int kRows>
  __device__ __forceinline__ RowShare ShareOf(int group) const {
    int mine = 0;
#pragma unroll
    for (int k = 0; k + 1 < kRows; ++k) mine += __shfl_sync(kAllLanes, behind, k) <= group;
    const auto of_mine = [&](int x) { return __shfl_sync(kAllLanes, x, mine); };
    RowShare own{of_mine(of_lane.row), of_mine(of_lane.begin), of_mine(of_lane.end),
                 group - of_mine(behind - of_lane.shares), of_mine(of_lane.shares)};
    if (own.share >= own.shares) own.begin = own.end = 0;
    return own;
  }
};

// Where rows get one group each: of a long row it adds so many entries, and what is left is shared
// out to all groups of the block.
template <int kRows, int kCount>
struct LongRows {
  RowShare of_lane;
  int first_left;  // entry of the lane's row

  __device__ __forceinline__ LongRows(const RowShare& row, int most)
      : of_lane(row), first_left(row.end) {
    if (row.end - row.begin <= most) return;  // the sum may be too large otherwise
    const int behind = FirstRun(row.begin) + (most / kCount + 1) * kCount;
    if (behind < row.end) first_left = behind;
  }
  __device__ __forceinline__ RowShare Own(int group) const {
    const auto of_row = [&](int x) { return __shfl_sync(kAllLanes, x, group % kRows); };
    return {of_row(of_lane.row), of_row(of_lane.begin), of_row(first_left), 0, 1};
  }
  __device__ __forceinline__ GroupShares Left() const {
    RowShare left = of_lane;
    left.begin = first_left;
    return GroupShares::Of<kRows, kRows, kCount, false>(left);
  }
};

template <typename T, typename Out, typename Index, SpmmTiledConfig kConfig>
__global__ void __launch_bounds__(kSpmmTiledThreads, SpmmTiledBlocks(sizeof(T)))
    SpmmTiled(const __grid_constant__ SpmmTiledProblem p) {
  using Acc = Accumulator<T>;
  constexpr int kVector = kConfig.vector, kLanes = kConfig.lanes, kRows = kConfig.rows;
  constexpr int kAtOnce = kConfig.at_once, kGroups = kConfig.Groups();
  constexpr bool kPermuted = kConfig.permuted, kBatched = kConfig.batched;
  using Chunk =
      Placed<Entries<T, Index, kAtOnce, kPermuted>, kConfig.without == SpmmTechnique::kLateScaling>;
  constexpr bool kOrdered = kConfig.without != SpmmTechnique::kOrder;
  constexpr bool kUnrolledRest = kConfig.without != SpmmTechnique::kUnrolledRest;
  constexpr int kShares = kGroups / kRows;
  static_assert(kShares >= 1 && kShares * kRows == kGroups);
  constexpr bool kSharesByLength =
      kShares > 1 && kRows <= kWarp;  // more rows get as many groups each
  constexpr bool kMayHelp = kConfig.GroupsMayHelp();
  extern __shared__ __align__(64) unsigned char spmm_parts[];
  auto* parts = reinterpret_cast<Vector<Acc, kVector>*>(spmm_parts);

  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const uint32_t rows = static_cast<uint32_t>(p.pattern.rows);
  const uint32_t down = (rows + kRows - 1) / kRows;
  const uint32_t tiles = static_cast<uint32_t>(CeilDivide(p.n, kLanes * kVector));
  const uint32_t blocks = static_cast<uint32_t>(p.batch.count) * tiles * down;
  const uint32_t row_bytes = static_cast<uint32_t>(p.n * sizeof(T));

  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const uint32_t at = block % down;
    const uint32_t tile = kBatched ? block / down % tiles : block / down;
    const Matrices<T, Out, Index> m(p, kBatched ? block / down / tiles : 0);
    const auto row_at = [&](uint32_t place) {
      const bool exists = place < rows;
      const int row = !exists ? 0 : static_cast<int>(kOrdered ? m.RowAt(place) : place);
      const int nse = exists ? static_cast<int>(p.pattern.nse) : 0;
      return RowShare{exists ? row : -1, Clamp(m.row_offsets[row], 0, nse),
                      Clamp(m.row_offsets[row + 1], 0, nse), group % kShares, kShares};
    };
    // From all over the order, there and back, so that every block has about as much to do.
    const auto row_of_lane = [&] {
      const uint32_t r = threadIdx.x % kRows;
      return row_at(r * down + (r % 2 == 0 ? at : down - 1 - at));
    };
    RowShare share;
    bool helps = false;
    if constexpr (kSharesByLength) {
      share = GroupShares::Of<kGroups, kRows, kAtOnce, true>(row_of_lane())
                  .template ShareOf<kRows>(group);
    } else {
      share = row_at(at * kRows + group / kShares);  // neighbours are of about one length
    }
    [[maybe_unused]] RowShare own;  // if the group helps first
    [[maybe_unused]] int helpers, first_helper;
    if constexpr (kMayHelp) {
      const uint32_t longest = m.RowAt(0);
      const int begin = m.row_offsets[longest], end = m.row_offsets[longest + 1];
      helps = static_cast<uint32_t>(end) - static_cast<uint32_t>(begin) >= p.long_row;
      if (helps) {
        const uint32_t mean = static_cast<uint32_t>(p.pattern.nse) / rows;
        const LongRows<kRows, kAtOnce> long_rows(row_of_lane(), static_cast<int>(mean + mean / 4));
        const GroupShares left = long_rows.Left();
        own = long_rows.Own(group);
        share = left.template ShareOf<kRows>(group);
        helpers = __shfl_sync(kAllLanes, left.of_lane.shares, group);
        first_helper = __shfl_sync(kAllLanes, left.behind, group) - helpers;
      }
    }
    const int64_t column = (static_cast<int64_t>(tile) * kLanes + lane) * kVector;
    // Lanes behind the last column read the first ones, and write nothing.
    const T* x = m.x + (column < p.n ? column : 0);
    const bool wide =
        IsAligned<Vector<T, kVector>>(m.x) && IsAligned<Run<Index>>(m.column_indices) &&
        (kPermuted ? IsAligned<Run<int32_t>>(m.permutation) : IsAligned<Run<T>>(m.values));

    Vector<Acc, kVector> sums = {};
    const auto add = [&]<bool kWide>() {
      AddShare<kWide, Chunk, kUnrolledRest>(m, share, static_cast<int>(p.pattern.nse), x, row_bytes,
                                            sums.elements);
    };
#pragma unroll 1
    for (;; helps = false) {
      if (wide) {
        add.template operator()<true>();
      } else {
        add.template operator()<false>();
      }
      if (!kMayHelp || !helps) break;
      if constexpr (kMayHelp) {
        // Column by column: L1 has the more room.
        auto* of_column = reinterpret_cast<Acc*>(spmm_parts);
#pragma unroll
        for (int c = 0; c < kVector; ++c) {
          __syncthreads();  // the last parts have been read
          of_column[threadIdx.x] = sums.elements[c];
          __syncthreads();
          sums.elements[c] = 0;
#pragma unroll 1
          for (int g = first_helper; g < first_helper + helpers; ++g) {
            sums.elements[c] += of_column[g * kLanes + lane];
          }
        }
        share = own;
      }
    }
    if constexpr (kShares > 1) {
      __syncthreads();  // the last rows' parts have been read
      if (share.share > 0) parts[threadIdx.x] = sums;
      __syncthreads();
      if (share.share == 0) {
#pragma unroll 4
        for (int s = 1; s < share.shares; ++s) {
          const Vector<Acc, kVector> part = parts[threadIdx.x + s * kLanes];
#pragma unroll
          for (int c = 0; c < kVector; ++c) sums.elements[c] += part.elements[c];
        }
      }
    }
    if (share.share == 0 && share.row >= 0 && column < p.n) {
      m.WriteRun(p.activation, share.row, share.row * p.n + column, sums.elements);
    }
  }
}

}  // namespace jaxsparse
