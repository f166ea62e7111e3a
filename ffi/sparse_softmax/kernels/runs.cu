// The softmax over stored entries and its derivative where lengths of rows are very different, as
// of graphs: a warp takes a run of rows (cuda/row_cuts.h), and has all of its entries in
// registers, neighbouring ones in each lane. What rows have in all is found by a scan over lanes
// that begins anew with each row. Pieces of long rows leave what they have in a workspace, and
// write nothing; a second kernel adds up what a row's pieces have, in their order, and writes them.
//
// Loads wait for cuts alone, and then all are on their way at once: values, and where rows begin.
// The second kernel has its pieces in registers before the first one ends.
//
// Floor: values in and out once, 2 or 3 times nse elements, and those of pieces once more, from L2.
#include "cuda/row_cuts.cuh"
#include "cuda/vector_access.cuh"
#include "sparse_softmax/kernels/row_scan.cuh"
#include "sparse_softmax/kernels/rows.cuh"
#include "sparse_softmax/kernels/runs.h"

namespace jaxsparse {

constexpr int kRun = 4;  // entries that one load brings, where their place is a multiple of that

// Neighbouring entries of a lane, as they stand in memory.
template <typename T, int kCount>
struct EntriesOfLane {
  static constexpr int kRuns = kCount / kRun;
  Vector<T, kRun> runs[kRuns];

  // Those from a place on. What stands behind the last one is another entry: nobody asks for it.
  __device__ __forceinline__ void Load(const T* from, int place, int last, bool wide) {
    if (wide) {
      const int last_run = last - last % kRun;
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        const int at = place + r * kRun;
        runs[r] = *reinterpret_cast<const Vector<T, kRun>*>(from + (at < last_run ? at : last_run));
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      runs[k / kRun].elements[k % kRun] = from[place + k < last ? place + k : last];
    }
  }
  __device__ __forceinline__ Accumulator<T> Get(int k) const {
    return ToAccumulator(runs[k / kRun].elements[k % kRun]);
  }
};

// Writes those of a lane's entries that stand from `begin` to `end`.
template <typename T, int kCount>
__device__ __forceinline__ void StoreEntries(T* to, int place, int begin, int end, bool wide,
                                             const Accumulator<T> (&from)[kCount]) {
#pragma unroll
  for (int r = 0; r < kCount / kRun; ++r) {
    const int at = place + r * kRun;
    Vector<T, kRun> run;
#pragma unroll
    for (int e = 0; e < kRun; ++e) FromAccumulator(from[r * kRun + e], &run.elements[e]);
    if (wide && at >= begin && at + kRun <= end) {
      *reinterpret_cast<Vector<T, kRun>*>(to + at) = run;
    } else {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        if (at + e >= begin && at + e < end) to[at + e] = run.elements[e];
      }
    }
  }
}

// The greater number; a NaN is skipped, and reaches the sum.
__device__ __forceinline__ float Greater(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double Greater(double a, double b) { return b > a ? b : a; }

template <typename Acc>
constexpr Acc kLeastFinite = Acc(-3.402823466e+38);
template <>
constexpr double kLeastFinite<double> = -1.7976931348623157e+308;

// Of numbers that are at most 0, or next to it: as exact as such a number is.
__device__ __forceinline__ float Exponential(float x) {
  constexpr float kLog2E = 1.442695041f;
  return ApproximateExp2(kLog2E * x);
}
__device__ __forceinline__ double Exponential(double x) { return exp(x); }

// Of a sum of exponentials, the largest of which is 1.
__device__ __forceinline__ float InverseOf(float sum) { return ApproximateReciprocal(sum); }
__device__ __forceinline__ double InverseOf(double sum) { return 1 / sum; }

// A cut between runs, and the row that it is in or in front of.
struct CutOfRun {
  int row, entry;
  int row_begin, row_end;  // as offsets say
  bool is_within;          // the row, which both runs have a piece of

  // Behind the last row, too, there is an offset. No load waits for another one.
  __device__ __forceinline__ CutOfRun(const CutsOfRows& cuts, const RowCut& cut)
      : row(cut.row),
        entry(cut.entry),
        row_begin(cuts.offsets[row]),
        row_end(cuts.offsets[row < cuts.rows ? row + 1 : row]),
        is_within((row < cuts.rows) & (entry > row_begin)) {}

  // The one that a lane has.
  __device__ __forceinline__ CutOfRun Of(int lane) const {
    CutOfRun cut = *this;
    cut.row = __shfl_sync(kAllLanes, row, lane);
    cut.entry = __shfl_sync(kAllLanes, entry, lane);
    cut.row_begin = __shfl_sync(kAllLanes, row_begin, lane);
    cut.row_end = __shfl_sync(kAllLanes, row_end, lane);
    cut.is_within = __shfl_sync(kAllLanes, static_cast<int>(is_within), lane) != 0;
    return cut;
  }
};

// What a run has: entries of whole rows, in front of them its piece of a row that has begun in an
// earlier one, behind them that of a row that goes on in the next.
struct RunOfRows {
  bool has_begun, has_new;
  int first, last;  // entries of whole rows

  __device__ __forceinline__ RunOfRows(const CutOfRun& begin, const CutOfRun& end)
      : has_begun(begin.is_within),
        has_new(end.is_within && !(has_begun && begin.row == end.row)),
        first(!has_begun             ? begin.entry
              : begin.row == end.row ? end.entry
                                     : Clamp(begin.row_end, begin.entry, end.entry)),
        last(has_new ? Clamp(end.row_begin, first, end.entry) : end.entry) {}
};

template <typename Acc>
__device__ __forceinline__ PieceOfRow<Acc>* PiecesOf(const Workspace& workspace, int64_t run) {
  return reinterpret_cast<PieceOfRow<Acc>*>(workspace.data) + run * kPiecesOfRun;
}

template <typename T, SparseSoftmaxRunsConfig kConfig>
__global__ void __launch_bounds__(kSoftmaxRunsThreads, kConfig.Blocks(sizeof(T)))
    SparseSoftmaxRuns(const __grid_constant__ SparseSoftmaxProblem p) {
  using Acc = Accumulator<T>;
  constexpr int kWarps = kSoftmaxRunsThreads / kWarp;
  // Lanes begin up to kRun - 1 entries in front of the run, where a load is aligned.
  static_assert(kMostOfLane * kWarp >= MostEntriesOfUnits(kUnitsOfRun) + kRun - 1);
  // For each entry, whether a row begins. Bits of a lane may be in two words.
  constexpr int kWords = kMostOfLane + 1;
  static __shared__ uint32_t bits[kWarps][kWords];
  LetNextKernelBegin();
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  uint32_t (&begins)[kWords] = bits[threadIdx.x / kWarp];
  const Acc scale = static_cast<Acc>(p.scale);
  const auto runs = static_cast<uint32_t>(SoftmaxRuns(p.pattern.rows, p.pattern.nse));
  const uint32_t all = static_cast<uint32_t>(p.batch.count) * runs;
  for (uint32_t at = blockIdx.x * kWarps + threadIdx.x / kWarp; at < all;
       at += gridDim.x * kWarps) {
    const uint32_t entry = kConfig.batched ? at / runs : 0;
    const CutsOfRows cuts(p.batch, p.pattern, p.row_cuts, entry);
    const int number = static_cast<int>(kConfig.batched ? at % runs : at);
    const RowCut from = cuts.At(number * kUnitsOfRun);
    const RowCut to = cuts.EndOf<kUnitsOfRun>(from, (number + 1) * kUnitsOfRun);
    const int begin = from.entry, base = begin - begin % kRun;
    const int end = Clamp(to.entry, base, base + kMostOfLane * kWarp);
    const T* values = p.values.At<const T>(p.batch, entry);
    const T* tangent = kConfig.backward ? p.tangent.At<const T>(p.batch, entry) : nullptr;
    T* out = p.out.At<T>(p.batch, entry);
    using Wide = Vector<T, kRun>;
    const bool wide = IsAligned<Wide>(values) && IsAligned<Wide>(out) &&
                      (!kConfig.backward || IsAligned<Wide>(tangent)) &&
                      CeilDivide(end, kRun) * kRun <= cuts.nse;
    const auto sum = [](Acc a, Acc b) { return a + b; };
    const auto greater = [](Acc a, Acc b) { return Greater(a, b); };
    const int stored = RowBounds::Clamp(cuts.offsets[cuts.rows], cuts.nse);

    // With so many entries in a lane.
    const auto compute = [&]<int kCount>() {
      const int place = base + lane * kCount, bit = lane * kCount;
      EntriesOfLane<T, kCount> entries, of_tangent;
      entries.Load(values, place, end - 1, wide);
      if constexpr (kConfig.backward) of_tangent.Load(tangent, place, end - 1, wide);
      const int own_row = from.row + lane;
      const int own_begin = cuts.offsets[own_row < cuts.rows ? own_row : cuts.rows];
      const RunOfRows run(CutOfRun(cuts, from), CutOfRun(cuts, to));

      // What stands in front of the run, and behind it, is told apart as if it were rows, too.
      // Where an empty row begins the next one does, too.
      const auto bit_of = [&](uint32_t at) { return at / 32 == lane ? 1u << at % 32 : 0; };
      const auto mark = [&](int at_row) {
        if (at_row < begin || at_row >= end) return;
        const uint32_t bit_of_row = at_row - base;
        atomicOr(&begins[bit_of_row / 32], 1u << bit_of_row % 32);
      };
      __syncwarp();  // those of the last run have been read
      if (lane < kWords) begins[lane] = bit_of(begin - base) | bit_of(end - base);
      __syncwarp();
      mark(own_begin);
      for (int row = own_row + kWarp; row <= to.row && row < cuts.rows; row += kWarp) {
        mark(cuts.offsets[row]);
      }
      __syncwarp();
      uint64_t word = begins[bit / 32];
      if constexpr (32 % kCount != 0) word |= uint64_t{begins[bit / 32 + 1]} << 32;
      RowBegins rows(static_cast<uint32_t>(word >> bit % 32) & ((1u << kCount) - 1));

      // A piece's last entry knows what the run has of its row.
      const auto leave = [&](Acc PieceOfRow<Acc>::* number, const Acc(&of_rows)[kCount]) {
        if (!run.has_begun && !run.has_new) return;
        PieceOfRow<Acc>* pieces = PiecesOf<Acc>(p.workspace, at);
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          if (run.has_begun && place + k == run.first - 1) pieces[0].*number = of_rows[k];
          if (run.has_new && place + k == end - 1) pieces[1].*number = of_rows[k];
        }
      };
      Acc x[kCount], sums[kCount];
#pragma unroll
      for (int k = 0; k < kCount; ++k) x[k] = (kConfig.backward ? Acc(1) : scale) * entries.Get(k);
      if constexpr (kConfig.backward) {
        Acc products[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) products[k] = x[k] * of_tangent.Get(k);
        rows.OfRows(products, sum, sums);
#pragma unroll
        for (int k = 0; k < kCount; ++k) x[k] = scale * x[k] * (of_tangent.Get(k) - sums[k]);
        leave(&PieceOfRow<Acc>::sum, sums);
      } else {
        Acc max[kCount];
        rows.OfRows(x, greater, max);
        leave(&PieceOfRow<Acc>::max, max);
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          // A piece may be nothing but -inf, and others of its row not: -inf less -inf is no
          // number. A row of nothing else gets NaN, as its sum is 0.
          x[k] = Exponential(x[k] - Greater(max[k], kLeastFinite<Acc>));
        }
        rows.OfRows(x, sum, sums);
#pragma unroll
        for (int k = 0; k < kCount; ++k) x[k] *= InverseOf(sums[k]);
        leave(&PieceOfRow<Acc>::sum, sums);
      }
      StoreEntries<T>(out, place, run.first, run.last, wide, x);
    };
    if (begin < end && end - base <= kFewOfLane * kWarp) {
      compute.template operator()<kFewOfLane>();
    } else if (begin < end) {
      compute.template operator()<kMostOfLane>();
    }
    // Each run clears a part of the padding.
    for (uint32_t i = stored + number * kWarp + lane; i < static_cast<uint32_t>(cuts.nse);
         i += runs * kWarp) {
      FromAccumulator(Acc(0), &out[i]);
    }
  }
}

// The pieces of long rows that a run has, in registers of a warp: those in front of whole rows and
// behind them have room together where they stand, as a row that is cut is so at its place.
template <typename T>
struct PiecesOfRun {
  static constexpr int kLoads = kUnitsOfRun * kPlacesOfUnit / (kWarp * kRun);
  RunOfRows run;
  int begin, end, place;  // of the run; where a lane's first entries stand

  __device__ __forceinline__ PiecesOfRun(const CutOfRun& from, const CutOfRun& to)
      : run(from, to), begin(from.entry), end(to.entry) {
    const int base = run.has_begun ? begin : end - kUnitsOfRun * kPlacesOfUnit;
    place = base - (base & (kRun - 1)) + static_cast<int>(threadIdx.x % kWarp) * kRun;
  }
  __device__ __forceinline__ int PlaceOf(int load) const { return place + load * kWarp * kRun; }
  __device__ __forceinline__ bool IsBegun(int i) const { return i >= begin && i < run.first; }
  __device__ __forceinline__ bool Has(int i) const {
    return IsBegun(i) || (i >= run.last && i < end);
  }
  // Whether all of a load are of one piece.
  __device__ __forceinline__ bool HasAll(int load) const {
    const int at = PlaceOf(load), behind = at + kRun;
    return (at >= begin && behind <= run.first) || (at >= run.last && behind <= end);
  }

  __device__ __forceinline__ void Load(const T* from, bool wide,
                                       Vector<T, kRun> (&to)[kLoads]) const {
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {
      const int at = PlaceOf(load);
      if (wide && HasAll(load)) {
        to[load] = *reinterpret_cast<const Vector<T, kRun>*>(from + at);
      } else {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          if (Has(at + e)) to[load].elements[e] = from[at + e];
        }
      }
    }
  }
};

// What the pieces of a row have in all, each lane of some of them: of the derivative the sum alone.
// In the end the maximum that exponentials are taken relative to, and the inverse of their sum.
template <typename Acc, bool kBackward>
struct TotalOfRow {
  Acc max = -kInfinity<Acc>, sum = 0;

  __device__ __forceinline__ void Add(const PieceOfRow<Acc>& piece) {
    if constexpr (kBackward) {
      sum += piece.sum;
    } else {
      const Acc both = Greater(max, piece.max), reference = Greater(both, kLeastFinite<Acc>);
      sum = sum * Exponential(max - reference) + piece.sum * Exponential(piece.max - reference);
      max = both;
    }
  }
  __device__ __forceinline__ void AddOverLanes() {
    if constexpr (!kBackward) {
      const Acc all = Greater(MaxOverLanes(max, kWarp), kLeastFinite<Acc>);
      sum *= Exponential(max - all);
      max = all;
    }
    sum = SumOverLanes(sum, kWarp);
    if constexpr (!kBackward) sum = InverseOf(sum);
  }
};

// Writes pieces of long rows, of which the first kernel has left what each run has: a warp those
// of neighbouring runs.
template <typename T, SparseSoftmaxRunsConfig kConfig>
__global__ void __launch_bounds__(kSoftmaxRunsThreads, kConfig.BlocksOfPieces(sizeof(T)))
    SparseSoftmaxPieces(const __grid_constant__ SparseSoftmaxProblem p) {
  using Acc = Accumulator<T>;
  constexpr bool kBackward = kConfig.backward;
  constexpr int kWarps = kSoftmaxRunsThreads / kWarp, kRuns = kSoftmaxRunsOfWarp;
  constexpr int kCuts = kRuns + 1;
  constexpr int kAhead = 2;  // pieces of a row that a lane asks for at once
  const auto lane = static_cast<int>(threadIdx.x % kWarp);
  const Acc scale = static_cast<Acc>(p.scale);
  const auto runs = static_cast<int>(SoftmaxRuns(p.pattern.rows, p.pattern.nse));
  const auto chunks = static_cast<uint32_t>(CeilDivide(runs, kRuns));
  const uint32_t all = static_cast<uint32_t>(p.batch.count) * chunks;
  bool waits = true;
  for (uint32_t at = blockIdx.x * kWarps + threadIdx.x / kWarp; at < all;
       at += gridDim.x * kWarps) {
    const uint32_t entry = kConfig.batched ? at / chunks : 0;
    const CutsOfRows cuts(p.batch, p.pattern, p.row_cuts, entry);
    // Each lane has one of the cuts in front of these runs and behind them.
    const int number =
        static_cast<int>(at - entry * chunks) * kRuns + (lane < kCuts ? lane : kCuts - 1);
    const int unit = number * kUnitsOfRun;
    const CutOfRun own(cuts, cuts.At(unit < cuts.units ? unit : cuts.units));
    const T* values = p.values.At<const T>(p.batch, entry);
    const T* tangent = kBackward ? p.tangent.At<const T>(p.batch, entry) : nullptr;
    T* out = p.out.At<T>(p.batch, entry);
    if (!__any_sync(kAllLanes, own.is_within)) {
      if (waits) WaitForPrologue();
      waits = false;
      continue;
    }

    // What other kernels have left is not waited for yet.
    using Wide = Vector<T, kRun>;
    using Pieces = PiecesOfRun<T>;
    const bool wide =
        IsAligned<Wide>(values) && IsAligned<Wide>(out) && (!kBackward || IsAligned<Wide>(tangent));
    Wide x[kRuns][Pieces::kLoads] = {}, t[kBackward ? kRuns : 1][Pieces::kLoads] = {};
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const Pieces pieces(own.Of(r), own.Of(r + 1));
      pieces.Load(values, wide, x[r]);
      if constexpr (kBackward) pieces.Load(tangent, wide, t[r]);
    }
    // The runs that have pieces of the row which the own cut is within, unless another lane has it.
    const int row_before = __shfl_up_sync(kAllLanes, own.is_within ? own.row : -1, 1);
    const bool is_own = own.is_within && (lane == 0 || row_before != own.row);
    const int first_run = cuts.FirstUnitOf(own.row, own.row_begin) / kUnitsOfRun;
    const int last_run = cuts.LastUnitOf(own.row, own.row_end) / kUnitsOfRun;
    const int own_count = is_own ? last_run - first_run + 1 : 0;
    if (waits) WaitForPrologue();
    waits = false;

    const PieceOfRow<Acc>* left = PiecesOf<Acc>(p.workspace, int64_t{entry} * runs);
    TotalOfRow<Acc, kBackward> totals[kCuts];
    int first[kCuts], count[kCuts], most = 0;
#pragma unroll
    for (int c = 0; c < kCuts; ++c) {
      first[c] = __shfl_sync(kAllLanes, first_run, c);
      count[c] = __shfl_sync(kAllLanes, own_count, c);
      most = count[c] > most ? count[c] : most;
    }
#pragma unroll 1
    for (int i = lane; i < most; i += kAhead * kWarp) {
      PieceOfRow<Acc> ahead[kCuts][kAhead];
#pragma unroll
      for (int c = 0; c < kCuts; ++c) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          const int of_row = i + a * kWarp;
          ahead[c][a] = {-kInfinity<Acc>, 0};
          // Where the row begins it is new.
          if (of_row < count[c]) {
            ahead[c][a] = left[int64_t{first[c] + of_row} * kPiecesOfRun + (of_row == 0)];
          }
        }
      }
#pragma unroll
      for (int c = 0; c < kCuts; ++c) {
#pragma unroll
        for (int a = 0; a < kAhead; ++a) totals[c].Add(ahead[c][a]);
      }
    }
#pragma unroll
    for (int c = 0; c < kCuts; ++c) {
      totals[c].AddOverLanes();
      if (c > 0 && count[c] == 0) totals[c] = totals[c - 1];
    }

#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const Pieces pieces(own.Of(r), own.Of(r + 1));
#pragma unroll
      for (int load = 0; load < Pieces::kLoads; ++load) {
        const int place = pieces.PlaceOf(load);
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          const bool is_begun = pieces.IsBegun(place + e);
          const Acc sum = is_begun ? totals[r].sum : totals[r + 1].sum;
          const Acc of_x = ToAccumulator(x[r][load].elements[e]);
          if constexpr (kBackward) {
            const Acc of_t = ToAccumulator(t[r][load].elements[e]);
            FromAccumulator(scale * of_x * (of_t - sum), &x[r][load].elements[e]);
          } else {
            const Acc max = is_begun ? totals[r].max : totals[r + 1].max;
            FromAccumulator(Exponential(scale * of_x - max) * sum, &x[r][load].elements[e]);
          }
        }
        if (wide && pieces.HasAll(load)) {
          *reinterpret_cast<Wide*>(out + place) = x[r][load];
        } else {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            if (pieces.Has(place + e)) out[place + e] = x[r][load].elements[e];
          }
        }
      }
    }
  }
}

}  // namespace jaxsparse
