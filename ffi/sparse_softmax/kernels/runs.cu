// The softmax over stored entries and its derivative where lengths of rows are very different, as
// of graphs: a warp takes a run of rows (cuda/row_cuts.h), and has all of its entries in
// registers, neighbouring ones in each lane. What rows have in all is found by a scan over lanes
// that begins anew with each row. Pieces of long rows leave what they have in a workspace, and
// write nothing; a second kernel adds up what a row's pieces have, in their order, and writes them.
//
// Floor: values in and out once, 2 or 3 times nse elements, and those of pieces once more, from L2.
#include "cuda/row_cuts.cuh"
#include "cuda/vector_access.cuh"
#include "sparse_softmax/kernels/rows.cuh"
#include "sparse_softmax/kernels/runs.h"

namespace jaxsparse {

constexpr int kRun = 4;  // entries that one load brings, where their place is a multiple of that

// Neighbouring entries of a warp's lanes, kCount of each.
template <typename T, int kCount>
struct RunOfLane {
  static constexpr int kRuns = kCount / kRun;

  __device__ __forceinline__ static void Load(const T* from, int place, int begin, int end,
                                              bool wide, Accumulator<T> factor,
                                              Accumulator<T> missing,
                                              Accumulator<T> (&to)[kCount]) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const int at = place + r * kRun;
      if (wide && at >= begin && at + kRun <= end) {
        const auto run = *reinterpret_cast<const Vector<T, kRun>*>(from + at);
#pragma unroll
        for (int e = 0; e < kRun; ++e) to[r * kRun + e] = factor * ToAccumulator(run.elements[e]);
      } else {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          const bool exists = at + e >= begin && at + e < end;
          to[r * kRun + e] = exists ? factor * ToAccumulator(from[at + e]) : missing;
        }
      }
    }
  }

  __device__ __forceinline__ static void Store(T* to, int place, int begin, int end, bool wide,
                                               const Accumulator<T> (&from)[kCount]) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
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
};

// The greater number; a NaN is skipped, and reaches the sum.
__device__ __forceinline__ float Greater(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double Greater(double a, double b) { return b > a ? b : a; }

template <typename Acc>
constexpr Acc kLeastFinite = Acc(-3.402823466e+38);
template <>
constexpr double kLeastFinite<double> = -1.7976931348623157e+308;

// Of a sum of exponentials, the largest of which is 1.
__device__ __forceinline__ float InverseOf(float sum) { return ApproximateReciprocal(sum); }
__device__ __forceinline__ double InverseOf(double sum) { return 1 / sum; }

// Where rows begin among the entries of a warp's lanes.
struct RowBegins {
  uint32_t own;    // bit k: at the lane's entry k
  unsigned lanes;  // in which any begins
  int lane;
  int first_lane;  // in which, or in front of which, the row of the lane's last entry begins

  __device__ __forceinline__ RowBegins(uint32_t own_begins)
      : own(own_begins),
        lanes(__ballot_sync(kAllLanes, own_begins != 0)),
        lane(static_cast<int>(threadIdx.x) % kWarp) {
    const unsigned up_to = lanes & (0xffffffffu >> (kWarp - 1 - lane));
    first_lane = up_to == 0 ? 0 : kWarp - 1 - __clz(static_cast<int>(up_to));
  }
  __device__ __forceinline__ bool At(int k) const { return (own >> k & 1) != 0; }

  // For each entry x what its row has in all, of an operation in the order of entries; of the
  // run's first and last rows what it has of them.
  template <int kCount, typename Acc, typename Operation>
  __device__ __forceinline__ void OfRows(const Acc (&x)[kCount], Acc none, Operation operation,
                                         Acc (&all)[kCount]) {
    KeepInRegister(own);  // or all bits are taken out at once, and kept for the next operation
    Acc behind = none;    // of the row that the lane's last entry is of, what the lane has
#pragma unroll
    for (int k = 0; k < kCount; ++k) behind = operation(At(k) ? none : behind, x[k]);
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const Acc before = __shfl_up_sync(kAllLanes, behind, distance);
      if (lane - distance >= first_lane) behind = operation(before, behind);
    }
    Acc up_to = __shfl_up_sync(kAllLanes, behind, 1);  // the entry, of its row
    if (lane == 0) up_to = none;
    Acc of_first = up_to;  // of the row of the lane's first entry, as far as that is in the lane
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if ((own & ((2u << k) - 1)) == 0) of_first = operation(of_first, x[k]);
      up_to = operation(At(k) ? none : up_to, x[k]);
      all[k] = up_to;
    }
    // The lane in which the row of the own last entry ends.
    const unsigned later = lane == kWarp - 1 ? 0 : lanes >> (lane + 1) << (lane + 1);
    const int last_lane = later == 0 ? kWarp - 1 : __ffs(static_cast<int>(later)) - 1;
    const Acc of_last = __shfl_sync(kAllLanes, of_first, last_lane);
    Acc of_row = lane == kWarp - 1 ? up_to : of_last;
#pragma unroll
    for (int k = kCount - 1; k >= 0; --k) {
      const Acc before = all[k > 0 ? k - 1 : 0];
      all[k] = of_row;
      if (At(k)) of_row = before;
    }
  }
};

// A run: where it begins and ends, and what belongs to rows that it has all of. In front of that is
// its piece of a row that has begun in an earlier one, behind it that of a row that goes on in the
// next.
struct RunOfRows {
  RowCut begin, end;
  bool has_begun, has_new;
  int first, last;  // entries of whole rows

  __device__ __forceinline__ RunOfRows(const CutsOfRows& cuts, int number)
      : begin(cuts.At(number * kUnitsOfRun)),
        end(cuts.EndOf<kUnitsOfRun>(begin, (number + 1) * kUnitsOfRun)),
        has_begun(cuts.IsWithinRow(begin)),
        has_new(cuts.IsWithinRow(end) && !(has_begun && begin.row == end.row)),
        first(!has_begun             ? begin.entry
              : begin.row == end.row ? end.entry
                                     : Clamp(cuts.offsets[begin.row + 1], begin.entry, end.entry)),
        last(has_new ? Clamp(cuts.offsets[end.row], first, end.entry) : end.entry) {}
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
  static __shared__ uint32_t bits[kWarps][kMostOfLane];  // for each entry, whether a row begins
  LetNextKernelBegin();
  const int lane = threadIdx.x % kWarp;
  uint32_t (&begins)[kMostOfLane] = bits[threadIdx.x / kWarp];
  const Acc scale = static_cast<Acc>(p.scale);
  const auto runs = static_cast<uint32_t>(SoftmaxRuns(p.pattern.rows, p.pattern.nse));
  const uint32_t all = static_cast<uint32_t>(p.batch.count) * runs;
  for (uint32_t at = blockIdx.x * kWarps + threadIdx.x / kWarp; at < all;
       at += gridDim.x * kWarps) {
    const uint32_t entry = kConfig.batched ? at / runs : 0;
    const CutsOfRows cuts(p.batch, p.pattern, p.row_cuts, entry);
    const int number = static_cast<int>(kConfig.batched ? at % runs : at);
    const RunOfRows run(cuts, number);
    const int begin = run.begin.entry, base = begin / kRun * kRun;
    const int end = Clamp(run.end.entry, base, base + kMostOfLane * kWarp);
    const T* values = p.values.At<const T>(p.batch, entry);
    T* out = p.out.At<T>(p.batch, entry);
    // Each run clears a part of the padding.
    for (uint32_t i = RowBounds::Clamp(cuts.offsets[cuts.rows], cuts.nse) + number * kWarp + lane;
         i < static_cast<uint32_t>(cuts.nse); i += runs * kWarp) {
      FromAccumulator(Acc(0), &out[i]);
    }
    if (begin >= end) continue;

    const T* tangent = kConfig.backward ? p.tangent.At<const T>(p.batch, entry) : nullptr;
    using Wide = Vector<T, kRun>;
    const bool wide = IsAligned<Wide>(values) && IsAligned<Wide>(out) &&
                      (!kConfig.backward || IsAligned<Wide>(tangent));
    const auto sum = [](Acc a, Acc b) { return a + b; };
    const auto greater = [](Acc a, Acc b) { return Greater(a, b); };

    const auto find_begins = [&] {
      __syncwarp();  // those of the last run have been read
      if (lane < kMostOfLane) begins[lane] = 0;
      __syncwarp();
      // Where an empty row begins the next one does, too.
      for (int row = run.begin.row + lane; row <= run.end.row && row < cuts.rows; row += kWarp) {
        const int at_row = cuts.offsets[row];
        if (at_row < begin || at_row >= end) continue;
        atomicOr(&begins[(at_row - base) / 32], 1u << (at_row - base) % 32);
      }
      __syncwarp();
    };

    // With so many entries in a lane, which are on their way while it is found out where rows
    // begin.
    const auto compute = [&]<int kCount>() {
      using Lane = RunOfLane<T, kCount>;
      const int place = base + lane * kCount, bit = lane * kCount;
      const Acc none = kConfig.backward ? Acc(0) : -Acc(1) / Acc(0);
      Acc x[kCount], t[kConfig.backward ? kCount : 1], sums[kCount];
      Lane::Load(values, place, begin, end, wide, kConfig.backward ? Acc(1) : scale, none, x);
      if constexpr (kConfig.backward) {
        Lane::Load(tangent, place, begin, end, wide, Acc(1), none, t);
      }
      find_begins();
      RowBegins rows(begins[bit / 32] >> bit % 32 & ((1u << kCount) - 1));
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
      if constexpr (kConfig.backward) {
        Acc products[kCount];
#pragma unroll
        for (int k = 0; k < kCount; ++k) products[k] = x[k] * t[k];
        rows.OfRows(products, Acc(0), sum, sums);
#pragma unroll
        for (int k = 0; k < kCount; ++k) x[k] = scale * x[k] * (t[k] - sums[k]);
        leave(&PieceOfRow<Acc>::sum, sums);
      } else {
        Acc max[kCount];
        rows.OfRows(x, none, greater, max);
        leave(&PieceOfRow<Acc>::max, max);
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          // What is missing has no other maximum perhaps, and a piece of nothing but -inf others
          // beside it: -inf less -inf is no number. A row of nothing else gets NaN, as its sum is
          // 0.
          x[k] = exp(x[k] - Greater(max[k], kLeastFinite<Acc>));
        }
        rows.OfRows(x, Acc(0), sum, sums);
#pragma unroll
        for (int k = 0; k < kCount; ++k) x[k] *= InverseOf(sums[k]);
        leave(&PieceOfRow<Acc>::sum, sums);
      }
      Lane::Store(out, place, run.first, run.last, wide, x);
    };
    if (end - base <= kFewOfLane * kWarp) {
      compute.template operator()<kFewOfLane>();
    } else {
      compute.template operator()<kMostOfLane>();
    }
  }
}

// Writes pieces of long rows, of which the first kernel has left what each run has: a warp those
// of neighbouring runs.
template <typename T, SparseSoftmaxRunsConfig kConfig>
__global__ void __launch_bounds__(kSoftmaxRunsThreads)
    SparseSoftmaxPieces(const __grid_constant__ SparseSoftmaxProblem p) {
  using Acc = Accumulator<T>;
  constexpr int kWarps = kSoftmaxRunsThreads / kWarp;
  static_assert(kSoftmaxRunsOfWarp * kPiecesOfRun <= kWarp);
  constexpr int kAtOnce = sizeof(T) == 8 ? 1 : 4;  // exponentials, which take registers
  const int lane = threadIdx.x % kWarp;
  const Acc scale = static_cast<Acc>(p.scale);
  const auto chunks = static_cast<uint32_t>(
      CeilDivide(SoftmaxRuns(p.pattern.rows, p.pattern.nse), kSoftmaxRunsOfWarp));
  const auto runs = static_cast<int>(SoftmaxRuns(p.pattern.rows, p.pattern.nse));
  const uint32_t all = static_cast<uint32_t>(p.batch.count) * chunks;
  bool waits = true;
  for (uint32_t at = blockIdx.x * kWarps + threadIdx.x / kWarp; at < all;
       at += gridDim.x * kWarps) {
    const uint32_t entry = kConfig.batched ? at / chunks : 0;
    const CutsOfRows cuts(p.batch, p.pattern, p.row_cuts, entry);
    // A lane's piece: its row, or -1, and entries.
    int row = -1, first = 0, last = 0;
    const int number =
        static_cast<int>(at - entry * chunks) * kSoftmaxRunsOfWarp + lane / kPiecesOfRun;
    if (lane < kSoftmaxRunsOfWarp * kPiecesOfRun && number < runs) {
      const RunOfRows run(cuts, number);
      if (lane % kPiecesOfRun == 0 && run.has_begun) {
        row = run.begin.row, first = run.begin.entry, last = run.first;
      }
      if (lane % kPiecesOfRun == 1 && run.has_new) {
        row = run.end.row, first = run.last, last = run.end.entry;
      }
    }
    if (waits) WaitForPrologue();
    waits = false;
    const PieceOfRow<Acc>* pieces = PiecesOf<Acc>(p.workspace, int64_t{entry} * runs);
    const T* values = p.values.At<const T>(p.batch, entry);
    const T* tangent = kConfig.backward ? p.tangent.At<const T>(p.batch, entry) : nullptr;
    T* out = p.out.At<T>(p.batch, entry);
    int of_row = -1;  // which these are of
    Acc max = 0, sum = 0;
#pragma unroll 1
    for (unsigned found = __ballot_sync(kAllLanes, row >= 0); found != 0; found &= found - 1) {
      const int source = __ffs(static_cast<int>(found)) - 1;
      const int own_row = __shfl_sync(kAllLanes, row, source);
      const int begin = __shfl_sync(kAllLanes, first, source);
      const int end = __shfl_sync(kAllLanes, last, source);
      if (own_row != of_row) {
        of_row = own_row;
        const int first_run = cuts.FirstUnitOf(of_row) / kUnitsOfRun;
        const int last_run = cuts.LastUnitOf(of_row) / kUnitsOfRun;
        // Where the row begins it is new.
        const auto piece_of = [&](int number_of_run) -> const PieceOfRow<Acc>& {
          return pieces[int64_t{number_of_run} * kPiecesOfRun + (number_of_run == first_run)];
        };
        max = -Acc(1) / Acc(0);
        if constexpr (!kConfig.backward) {
#pragma unroll 4
          for (int i = first_run + lane; i <= last_run; i += kWarp) {
            const Acc of_piece = piece_of(i).max;
            max = of_piece > max ? of_piece : max;
          }
          max = MaxOverLanes(max, kWarp);
        }
        sum = 0;
#pragma unroll kAtOnce
        for (int i = first_run + lane; i <= last_run; i += kWarp) {
          const PieceOfRow<Acc>& piece = piece_of(i);
          sum += kConfig.backward ? piece.sum : piece.sum * exp(piece.max - max);
        }
        sum = SumOverLanes(sum, kWarp);
      }
      for (int i = begin + lane; i < end; i += kWarp) {
        const Acc x = ToAccumulator(values[i]);
        if constexpr (kConfig.backward) {
          FromAccumulator(scale * x * (ToAccumulator(tangent[i]) - sum), &out[i]);
        } else {
          FromAccumulator(exp(scale * x - max) / sum, &out[i]);
        }
      }
    }
  }
}

}  // namespace jaxsparse
