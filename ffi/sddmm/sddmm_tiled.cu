// The sampled dense-dense product in tiles of one row's entries (Gale et al. 2020, "Sparse GPU
// Kernels for Deep Learning"), cut by entries, so that rows of any length balance. A warp takes
// kChunks times 32 neighbouring entries, one for each lane, and passes over them once for each row
// that has some of the 32. Groups of kLanes lanes take the entries of their lanes, and each lane
// kPieces pieces of 16 bytes of a row of y at a time: several entries' loads are in flight. What
// the lanes of a group have to add up they exchange for all their entries at once, so that a lane
// ends with its own entry's sum.
//
// Small problems wait more than they load. So a warp asks for its columns and for the ends of rows
// at once: it guesses which rows its entries are in, as if all were of one length, and searches
// only if 32 neighbouring ones do not tell.
//
// Floors: every entry reads d elements of y from L1, 128 bytes a clock and multiprocessor, and from
// L2, 42 bytes, what L1 has no room for; from memory come the columns, x and y once, and the result
// is written once. Before it is, memory is waited for twice: for columns and ends of rows, then for
// x and y.
#include "common/packet.cuh"
#include "sddmm/problem.h"

namespace jaxsparse {

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

// A lane's pieces, of kVector elements each, of kBytes of a row.
template <typename T, int kLanes, int kPieces, int kVector>
struct RowPart {
  using Piece = Packet<T, kVector>;
  static constexpr int kPieceBytes = sizeof(Piece);
  static constexpr int kBytes = kLanes * kPieces * kPieceBytes;
  static constexpr int kRegisters = kPieces * (kPieceBytes < 4 ? 1 : kPieceBytes / 4);

  Piece pieces[kPieces];

  // From the lane's first piece on, which begins `at` bytes behind the row's begin. Unless all rows
  // are as long as this, pieces behind the end are 0.
  template <bool kWhole>
  __device__ __forceinline__ static RowPart Load(const char* from, uint32_t at,
                                                 uint32_t row_bytes) {
    RowPart part;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      part.pieces[i] = {};
      if (kWhole || at + i * kLanes * kPieceBytes < row_bytes) {
        part.pieces[i] = *reinterpret_cast<const Piece*>(from + i * kLanes * kPieceBytes);
      }
    }
    return part;
  }

  __device__ __forceinline__ Accumulator<T> Number(int i) const {
    return ToAccumulator(pieces[i / kVector].elements[i % kVector]);
  }

  // Adds a lane's part of a dot product.
  __device__ __forceinline__ void AddProduct(const RowPart& other, Accumulator<T>* sum) const {
#pragma unroll
    for (int i = 0; i < kPieces * kVector; ++i) *sum += Number(i) * other.Number(i);
  }
};

// The sums of 32 entries of a row, each lane's own.
template <typename Part, int kLanes, bool kWhole, typename T>
__device__ __forceinline__ Accumulator<T> SumsOfRow(const T* row, const T* y, uint32_t d,
                                                    uint32_t column) {
  constexpr int kInFlight = 32;  // registers of a lane that loads fill at once, beside those of x
  constexpr int kParts = kInFlight / Part::kRegisters;
  constexpr int kCount = kParts < kLanes ? kParts : kLanes;
  const uint32_t row_bytes = d * static_cast<uint32_t>(sizeof(T));
  Accumulator<T> sums[kLanes] = {};
  uint32_t at = threadIdx.x % kLanes * Part::kPieceBytes;
#pragma unroll 1
  do {
    const char* from_y = reinterpret_cast<const char*>(y) + at;
    const auto of_x =
        Part::template Load<kWhole>(reinterpret_cast<const char*>(row) + at, at, row_bytes);
#pragma unroll 1
    for (int first = 0; first < kLanes; first += kCount) {
      Part of_y[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const uint64_t number = __shfl_sync(kAllLanes, column, first + k, kLanes);
        of_y[k] = Part::template Load<kWhole>(from_y + number * row_bytes, at, row_bytes);
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) of_x.AddProduct(of_y[k], &sums[k]);
      // The next ones' sums become the first, since which registers they are in is compiled.
      Accumulator<T> done[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) done[k] = sums[k];
#pragma unroll
      for (int k = 0; k < kLanes; ++k) {
        sums[k] = k + kCount < kLanes ? sums[k + kCount] : done[k + kCount - kLanes];
      }
    }
    at += Part::kBytes;
  } while (!kWhole && at - threadIdx.x % kLanes * Part::kPieceBytes < row_bytes);
  return ExchangeSums(sums);
}

// The same number by number, where rows are not aligned.
template <int kLanes, typename T>
__device__ __forceinline__ Accumulator<T> SumsByNumber(const T* row, const T* y, uint32_t d,
                                                       uint32_t column) {
  const uint32_t lane = threadIdx.x % kLanes;
  Accumulator<T> own = 0;
#pragma unroll 1
  for (uint32_t k = 0; k < kLanes; ++k) {
    const uint64_t from = __shfl_sync(kAllLanes, column, static_cast<int>(k), kLanes);
    const T* of_y = y + from * d;
    Accumulator<T> sum = 0;
#pragma unroll 4
    for (uint32_t c = lane; c < d; c += kLanes) {
      sum += ToAccumulator(row[c]) * ToAccumulator(of_y[c]);
    }
    sum = SumOverLanes(sum, kLanes);
    if (lane == k) own = sum;
  }
  return own;
}

template <typename T, typename Out, typename Index, int kLanes, int kPieces, int kChunks,
          bool kWhole, bool kScaled, SddmmTechnique kWithout, bool kBatched>
__global__ void __launch_bounds__(kSddmmTiledThreads, SddmmTiledBlocks(kPieces))
    SddmmTiled(const __grid_constant__ SddmmProblem p) {
  using Acc = Accumulator<T>;
  constexpr int kRun = kChunks * kWarp;
  constexpr bool kBalanced = kWithout != SddmmTechnique::kBalance;
  constexpr int kWidest = 16 / sizeof(T);
  constexpr int kVector = kWithout == SddmmTechnique::kWideLoads ? 1 : kWidest;
  using Part = RowPart<T, kLanes, kPieces * kWidest / kVector, kVector>;  // of as many bytes
  const int nse = static_cast<int>(p.pattern.nse), rows = static_cast<int>(p.pattern.rows);
  const uint32_t runs = (p.pattern.nse + kRun - 1) / kRun;
  const uint32_t warp = (blockIdx.x * kSddmmTiledThreads + threadIdx.x) / kWarp;
  const uint32_t entry = kBatched ? warp / runs : 0;
  if (entry >= (kBatched ? static_cast<uint32_t>(p.batch.count) : 1)) return;
  const uint32_t run = kBatched ? warp % runs : warp;
  int first = static_cast<int>(run) * kRun;
  int behind = first + kRun < nse ? first + kRun : nse;

  const int lane = threadIdx.x % kWarp;
  const auto of_entry = [&]<typename E>(const Array& array) {
    return kBatched ? array.At<E>(p.batch, entry) : static_cast<E*>(array.data);
  };
  const int32_t* row_offsets = of_entry.template operator()<const int32_t>(p.pattern.row_offsets);
  const Index* columns = of_entry.template operator()<const Index>(p.pattern.column_indices);
  const T* x = of_entry.template operator()<const T>(p.x);
  const T* y = of_entry.template operator()<const T>(p.y);
  Out* out = of_entry.template operator()<Out>(p.out);
  const uint32_t d = static_cast<uint32_t>(p.d);
  using Piece = typename Part::Piece;
  const bool wide =
      (kWhole || d * sizeof(T) % sizeof(Piece) == 0) && IsAligned<Piece>(x) && IsAligned<Piece>(y);

  int first_row = 0;
  if constexpr (!kBalanced) {
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
  const int guess = kBalanced
                        ? static_cast<int>(static_cast<float>(first) * static_cast<float>(rows) /
                                           static_cast<float>(nse)) -
                              kWarp / 2
                        : first_row;
  RowEnds ends(row_offsets, rows, guess < 0 ? 0 : guess);
  // A run of rows may end within 32 entries, of which the others are not its own.
  const int most = kBalanced ? nse : behind;
  stored = stored < most ? stored : most;
  if (kBalanced && ends.first > 0 && ends.Before(first) == 0) {
    ends = RowEnds(row_offsets, rows, SearchRows(row_offsets, 0, rows, first));
  }

#pragma unroll 1
  for (; first < behind; first += kWarp) {
    const int at = first + lane;
    Acc own = 0;
    if (first < stored) {
      Acc factor = 1;
      if constexpr (kScaled) {
        const T* scale_by = of_entry.template operator()<const T>(p.scale_by);
        if (at < stored) factor = ToAccumulator(scale_by[at]);
      }
      const uint32_t last_column = static_cast<uint32_t>(p.pattern.columns) - 1;
      const uint32_t column = next < last_column ? next : last_column;
      next = load_column(at + kWarp);
      const int end = first + kWarp < stored ? first + kWarp : stored;
#pragma unroll 1
      for (int from = first; from < end;) {  // rows that have entries in the chunk
        const int before = ends.GoTo(row_offsets, rows, from);
        const int end_of_row = __shfl_sync(kAllLanes, ends.end, before);
        const bool is_mine = at >= from && at < end_of_row && at < end;
        // Lanes whose entries are in other rows load what one of this row does.
        const uint32_t some = __shfl_sync(kAllLanes, column, from - first);
        const uint32_t mine = is_mine ? column : some;
        const T* of_x = x + static_cast<uint64_t>(ends.first + before) * d;
        const Acc sum = wide ? SumsOfRow<Part, kLanes, kWhole>(of_x, y, d, mine)
                             : SumsByNumber<kLanes>(of_x, y, d, mine);
        if (is_mine) own = sum * factor;
        from = end_of_row > from ? end_of_row : from + 1;  // whatever the offsets say
      }
    }
    if (at < behind) FromAccumulator(own, &out[at]);
  }
}

}  // namespace jaxsparse
