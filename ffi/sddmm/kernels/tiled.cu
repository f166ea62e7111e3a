// The sampled dense-dense product in tiles of a row's entries (Gale et al. 2020, "Sparse GPU
// Kernels for Deep Learning"), cut by entries, so that rows of any length balance. A warp takes
// some chunks of 32 neighbouring entries, one for each lane, and passes over them once for each row
// that has some of the 32. Groups of lanes take the entries of their lanes, and each lane several
// vectors of a row of y at a time, whose size is a divisor of d and 16 bytes if d allows it:
// several entries' loads are in flight. What the lanes of a group have to add up they exchange for
// all their entries at once, so that a lane ends with its own entry's sum.
//
// Where rows are so short, or entries so few, that passes take longer than loads do, there is one,
// in which every entry loads its own row of x, too. Where there are too few entries to fill a GPU,
// several warps share 32: each takes as many of every group's.
//
// Small problems wait more than they load. So a warp asks for its columns and for the ends of rows
// at once: it guesses which rows its entries are in, as if all were of one length, and searches
// only if 32 neighbouring ones do not tell.
//
// Floors: every entry reads d elements of y from L1, 128 bytes a clock and multiprocessor, and from
// L2, 42 bytes, what L1 has no room for, and with rows of x of its own twice that; from memory come
// the columns, x and y once, and the result is written once. Before it is, memory is waited for
// twice: for columns and ends of rows, then for x and y.
#include "cuda/vector_access.cuh"
#include "sddmm/kernels/tiled.h"

namespace jaxsparse {

// The row of an entry, of each lane's its own, which is no row in front of `low`.
__device__ __forceinline__ int SearchRow(const int32_t* row_offsets, int low, int rows, int entry) {
  int high = rows - 1;
#pragma unroll 1
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (row_offsets[middle + 1] <= entry) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The first of at most 32 neighbouring rows from `low` on, one of which has the entry. All lanes of
// a warp look at different rows, so that few loads wait for one another.
__device__ __forceinline__ int SearchRows(const int32_t* row_offsets, int low, int rows,
                                          int entry) {
  const int lane = threadIdx.x % kWarp;
  int high = rows;
#pragma unroll 1
  while (high - low > kWarp) {
    const int step = (high - low + kWarp - 1) / kWarp;
    const int row = low + (lane + 1) * step - 1;
    const bool is_before = row < high && row_offsets[row + 1] <= entry;
    low += __popc(__ballot_sync(kAllLanes, is_before)) * step;
    if (low + step < high) high = low + step;
  }
  return low;
}

// Where 32 neighbouring rows end: lane r knows it of row `first` + r.
struct RowEnds {
  int first, end;

  __device__ __forceinline__ RowEnds(const int32_t* row_offsets, int rows, int from) : first(from) {
    constexpr int kNever = 0x7fffffff;
    const int row = from + static_cast<int>(threadIdx.x % kWarp);
    end = row < rows ? row_offsets[row + 1] : kNever;
  }

  // How many of them end in front of an entry, which is the same in all lanes.
  __device__ __forceinline__ int Before(int entry) const {
    return __popc(__ballot_sync(kAllLanes, end <= entry));
  }

  // Which one is that of an entry, of each lane's its own, if it is one of these. What is stored
  // ends with the last row, so it is none of those that there are not, whatever other offsets say.
  __device__ __forceinline__ int Of(int entry) const {
    int row = 0;
#pragma unroll
    for (int step = kWarp / 2; step > 0; step /= 2) {
      if (__shfl_sync(kAllLanes, end, row + step - 1) <= entry) row += step;
    }
    return row;
  }

  // Goes on to rows among which is that of the entry; returns which it is.
  __device__ __forceinline__ int GoTo(const int32_t* row_offsets, int rows, int entry) {
    int before = Before(entry);
    if (before < kWarp) return before;
    *this = RowEnds(row_offsets, rows, first + kWarp);
    before = Before(entry);
    if (before < kWarp) return before;
    *this = RowEnds(row_offsets, rows, SearchRows(row_offsets, first, rows, entry));
    before = Before(entry);
    return before < kWarp ? before : kWarp - 1;  // it is less, unless offsets do not rise
  }

  // The row of an entry, of each lane's its own, if it is one of those from `from` on and in front
  // of `behind`, of which there are at most 32. If they are scattered over many rows, lanes search.
  __device__ __forceinline__ int RowOf(const int32_t* row_offsets, int rows, int entry, int from,
                                       int behind) {
    constexpr int kMostTimes = 4;
    int row = 0;
    GoTo(row_offsets, rows, from);
#pragma unroll 1
    for (int times = 1;; ++times) {
      const int end_of_rows = __shfl_sync(kAllLanes, end, kWarp - 1);
      const int of_mine = Of(entry);
      if (entry >= from && entry < end_of_rows && entry < behind) row = first + of_mine;
      if (end_of_rows >= behind) return row;
      from = end_of_rows;
      if (times == kMostTimes) break;
      *this = RowEnds(row_offsets, rows, first + kWarp);
    }
    if (entry < from || entry >= behind) return row;
    return SearchRow(row_offsets, first + kWarp, rows, entry);
  }
};

// One of so many runs of equally many rows, and its entries, where work is not cut by entries. The
// last run has the padding, too.
struct RowRun {
  int row, first, behind;

  __device__ __forceinline__ RowRun(const int32_t* row_offsets, int rows, int nse, uint32_t run,
                                    uint32_t runs) {
    const uint32_t all = static_cast<uint32_t>(rows), each = (all + runs - 1) / runs;
    const auto row_of = [&](uint32_t i) { return i * each < all ? i * each : all; };
    const auto begin_of = [&](uint32_t row) {
      return row > 0 ? static_cast<int>(RowBounds::Clamp(row_offsets[row], nse)) : 0;
    };
    row = static_cast<int>(row_of(run));
    first = begin_of(row_of(run));
    behind = run + 1 == runs ? nse : begin_of(row_of(run + 1));
  }
};

// A lane's vectors of kBytes of a row.
template <typename T, SddmmTiledConfig kConfig>
struct RowPart {
  using RowVector = Vector<T, kConfig.vector>;
  static constexpr int kLanes = kConfig.lanes, kVector = kConfig.vector;
  static constexpr int kVectors = kConfig.vectors;
  static constexpr int kVectorBytes = sizeof(RowVector);
  static constexpr int kBytes = kLanes * kVectors * kVectorBytes;

  RowVector vectors[kVectors];

  // From the lane's first vector on, which begins `at` bytes behind the row's begin. Unless all
  // rows are as long as this, vectors behind the end are 0.
  __device__ __forceinline__ static RowPart Load(const char* from, uint32_t at,
                                                 uint32_t row_bytes) {
    RowPart part;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      part.vectors[i] = {};
      if (kConfig.whole || at + i * kLanes * kVectorBytes < row_bytes) {
        part.vectors[i] = *reinterpret_cast<const RowVector*>(from + i * kLanes * kVectorBytes);
      }
    }
    return part;
  }

  __device__ __forceinline__ Accumulator<T> Number(int i) const {
    return ToAccumulator(vectors[i / kVector].elements[i % kVector]);
  }

  // Adds a lane's part of a dot product.
  __device__ __forceinline__ void AddProduct(const RowPart& other, Accumulator<T>* sum) const {
#pragma unroll
    for (int i = 0; i < kVectors * kVector; ++i) *sum += Number(i) * other.Number(i);
  }
};

// A lane's own of the sums of 32 entries, or of those of them that are a warp's share. They are all
// of the row of x that is given first, or each lane's of the so-manieth from there on.
template <SddmmTiledConfig kConfig, typename T>
__device__ __forceinline__ Accumulator<T> SumsOf(const T* x, uint32_t row, const T* y,
                                                 uint32_t column, uint32_t d, uint32_t share) {
  using Part = RowPart<T, kConfig>;
  constexpr int kLanes = kConfig.lanes, kEntries = kConfig.EntriesOfGroup();
  constexpr bool kOwnRows = kConfig.own_rows;
  constexpr int kInFlight = kConfig.EntriesInFlight(sizeof(T));
  constexpr int kCount = kInFlight < kEntries ? kInFlight : kEntries;
  static_assert(kEntries % kCount == 0);
  const uint32_t row_bytes = d * static_cast<uint32_t>(sizeof(T));
  const int first_lane = static_cast<int>(share) * kEntries;
  Accumulator<T> sums[kEntries] = {};
  uint32_t at = threadIdx.x % kLanes * Part::kVectorBytes;
  const auto load = [&](const T* of, uint64_t number) {
    const char* from = reinterpret_cast<const char*>(of) + at;
    return Part::Load(from + number * row_bytes, at, row_bytes);
  };
#pragma unroll 1
  do {
    Part of_x[kOwnRows ? kCount : 1];
    if constexpr (!kOwnRows) of_x[0] = load(x, 0);
#pragma unroll 1
    for (int first = 0; first < kEntries; first += kCount) {
      Part of_y[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const int lane = first_lane + first + k;
        of_y[k] = load(y, __shfl_sync(kAllLanes, column, lane, kLanes));
        if constexpr (kOwnRows) of_x[k] = load(x, __shfl_sync(kAllLanes, row, lane, kLanes));
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) of_x[kOwnRows ? k : 0].AddProduct(of_y[k], &sums[k]);
      // The next ones' sums become the first, since which registers they are in is compiled.
      Accumulator<T> done[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) done[k] = sums[k];
#pragma unroll
      for (int k = 0; k < kEntries; ++k) {
        sums[k] = k + kCount < kEntries ? sums[k + kCount] : done[k + kCount - kEntries];
      }
    }
    at += Part::kBytes;
  } while (!kConfig.whole && at - threadIdx.x % kLanes * Part::kVectorBytes < row_bytes);
  Accumulator<T> own = ExchangeSums(sums);
#pragma unroll
  for (int distance = kEntries; distance < kLanes; distance *= 2) {
    own += __shfl_xor_sync(kAllLanes, own, distance);
  }
  return own;
}

// The same number by number, where arrays are not aligned.
template <SddmmTiledConfig kConfig, typename T>
__device__ __forceinline__ Accumulator<T> SumsByNumber(const T* x, uint32_t row, const T* y,
                                                       uint32_t column, uint32_t d,
                                                       uint32_t share) {
  constexpr int kLanes = kConfig.lanes;
  constexpr uint32_t kEntries = kConfig.EntriesOfGroup();
  const uint32_t lane = threadIdx.x % kLanes;
  Accumulator<T> own = 0;
#pragma unroll 1
  for (uint32_t k = share * kEntries; k < (share + 1) * kEntries; ++k) {
    const auto row_of = [&](const T* of, uint32_t number) {
      const uint64_t of_entry = __shfl_sync(kAllLanes, number, static_cast<int>(k), kLanes);
      return of + of_entry * d;
    };
    const T* of_x = kConfig.own_rows ? row_of(x, row) : x;
    const T* of_y = row_of(y, column);
    Accumulator<T> sum = 0;
#pragma unroll 4
    for (uint32_t c = lane; c < d; c += kLanes) {
      sum += ToAccumulator(of_x[c]) * ToAccumulator(of_y[c]);
    }
    sum = SumOverLanes(sum, kLanes);
    if (lane == k) own = sum;
  }
  return own;
}

template <typename T, typename Out, typename Index, SddmmTiledConfig kConfig>
__global__ void __launch_bounds__(kSddmmTiledThreads, kConfig.BlocksPerSm(sizeof(T)))
    SddmmTiled(const __grid_constant__ SddmmProblem p) {
  using Acc = Accumulator<T>;
  constexpr int kRun = kConfig.chunks * kWarp;
  const int nse = static_cast<int>(p.pattern.nse), rows = static_cast<int>(p.pattern.rows);
  const uint32_t runs = (p.pattern.nse + kRun - 1) / kRun;
  const uint32_t warp = (blockIdx.x * kSddmmTiledThreads + threadIdx.x) / kWarp;
  const uint32_t share = warp % kConfig.sharing, unit = warp / kConfig.sharing;
  // The last block may have more warps than there is work for: what they would guess may not fit
  // 32 bits.
  if (unit >= (kConfig.batched ? runs * static_cast<uint32_t>(p.batch.count) : runs)) return;
  const uint32_t entry = kConfig.batched ? unit / runs : 0;
  const uint32_t run = kConfig.batched ? unit % runs : unit;
  int first = static_cast<int>(run) * kRun;
  int behind = first + kRun < nse ? first + kRun : nse;

  const int lane = threadIdx.x % kWarp;
  const auto of_entry = [&]<typename E>(const Array& array) {
    return kConfig.batched ? array.At<E>(p.batch, entry) : static_cast<E*>(array.data);
  };
  const int32_t* row_offsets = of_entry.template operator()<const int32_t>(p.pattern.row_offsets);
  const Index* columns = of_entry.template operator()<const Index>(p.pattern.column_indices);
  const T* x = of_entry.template operator()<const T>(p.x);
  const T* y = of_entry.template operator()<const T>(p.y);
  Out* out = of_entry.template operator()<Out>(p.out);
  const uint32_t d = static_cast<uint32_t>(p.d);
  using RowVector = Vector<T, kConfig.vector>;
  const bool wide = kConfig.vector == 1 || (IsAligned<RowVector>(x) && IsAligned<RowVector>(y));

  int first_row = 0;
  if constexpr (!kConfig.balanced) {
    const RowRun of_rows(row_offsets, p.pattern.columns > 0 ? rows : 0, nse, run, runs);
    first_row = of_rows.row;
    first = of_rows.first;
    behind = of_rows.behind;
  }

  const auto load_column = [&](int at) -> uint32_t {
    return at < behind ? static_cast<uint32_t>(columns[at]) : 0;
  };
  uint32_t next = load_column(first + lane);
  // Without rows or columns there is nothing to read, whatever the offsets say.
  int stored = rows > 0 && p.pattern.columns > 0 ? row_offsets[rows] : 0;
  // Rows among which the first entry's is, if they are of about one length; of a run it is known.
  const int guess =
      kConfig.balanced
          ? static_cast<int>(__fdividef(static_cast<float>(first) * static_cast<float>(rows),
                                        static_cast<float>(nse))) -
                kWarp / 2
          : first_row;
  RowEnds ends(row_offsets, rows, guess < 0 ? 0 : guess);
  // A run of rows may end within 32 entries, of which the others are not its own.
  const int most = kConfig.balanced ? nse : behind;
  stored = stored < most ? stored : most;
  if (kConfig.balanced && ends.first > 0 && ends.Before(first) == 0) {
    ends = RowEnds(row_offsets, rows, SearchRows(row_offsets, 0, rows, first));
  }

  const bool is_of_share =
      lane % kConfig.lanes / kConfig.EntriesOfGroup() == static_cast<int>(share);
  const auto sums_of = [&](const T* of_x, uint32_t row, uint32_t column) {
    return wide ? SumsOf<kConfig>(of_x, row, y, column, d, share)
                : SumsByNumber<kConfig>(of_x, row, y, column, d, share);
  };
#pragma unroll 1
  for (; first < behind; first += kWarp) {
    const int at = first + lane;
    Acc own = 0;
    if (first < stored) {
      Acc factor = 1;
      if constexpr (kConfig.scaled) {
        const T* scale_by = of_entry.template operator()<const T>(p.scale_by);
        if (at < stored) factor = ToAccumulator(scale_by[at]);
      }
      const uint32_t column = Within(next, p.pattern.columns);
      next = load_column(at + kWarp);
      const int end = first + kWarp < stored ? first + kWarp : stored;
      if constexpr (kConfig.own_rows) {
        const int row = ends.RowOf(row_offsets, rows, at, first, end);
        const Acc sum = sums_of(x, static_cast<uint32_t>(row), column);
        if (at < end) own = sum * factor;
      } else {
#pragma unroll 1
        for (int from = first; from < end;) {  // rows that have entries in the chunk
          const int before = ends.GoTo(row_offsets, rows, from);
          const int end_of_row = __shfl_sync(kAllLanes, ends.end, before);
          const bool is_mine = at >= from && at < end_of_row && at < end;
          // Lanes whose entries are in other rows load what one of this row does.
          const uint32_t some = __shfl_sync(kAllLanes, column, from - first);
          const uint32_t mine = is_mine ? column : some;
          const T* of_x = x + static_cast<uint64_t>(ends.first + before) * d;
          const Acc sum = sums_of(of_x, 0, mine);
          if (is_mine) own = sum * factor;
          from = end_of_row > from ? end_of_row : from + 1;  // whatever the offsets say
        }
      }
    }
    if (at < behind && is_of_share) FromAccumulator(own, &out[at]);
  }
}

}  // namespace jaxsparse
