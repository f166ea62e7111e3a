// Reductions of rows where lengths of rows are very different, as of graphs: a warp takes a run of
// rows (cuda/row_cuts.h). It brings their entries to shared memory by wide loads, and shares its
// lanes among the rows, as many for each, so that neighbouring results are written together, those
// of empty rows, too. Rows that would take longer than others all lanes take one after the other.
// What a run has of a row that others have entries of goes to a workspace; a second kernel adds
// that up and writes the results of these rows. Each place is written once, and whatever is added
// up has one order: there are no atomics.
//
// Loads wait for cuts alone, and then all are on their way at once: values, and where rows begin.
//
// Floor: the values once, 4 nse bytes of float32, where rows begin, and the results; 2.2 us of 2 M
// entries in 100,000 rows at 4.1 TB/s, and the starts of two kernels, of which the second one comes
// up while the first one runs.
#include "cuda/row_cuts.cuh"
#include "cuda/vector_access.cuh"
#include "reduce_rows/kernels/reduced.cuh"
#include "reduce_rows/kernels/runs.h"

namespace jaxsparse {

// What numbers in shared memory come to from `first` on, of which each lane of a group has every
// `step`-th one, some of them at once.
template <Reduction kReduction, typename T>
__device__ __forceinline__ Reduced<Accumulator<T>, kReduction> ReduceByGroup(const T* numbers,
                                                                             int first, int end,
                                                                             int step) {
  using Acc = Accumulator<T>;
  constexpr int kAtOnce = 4;
  auto part = Reduced<Acc, kReduction>::Nothing();
#pragma unroll 1
  for (int i = first; i < end; i += kAtOnce * step) {
    Acc x[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int at = i + k * step;
      x[k] = -kInfinity<Acc>;
      if (at < end) x[k] = ToAccumulator(numbers[at]);
    }
    part.Add(x);
  }
  part.AddOverLanes(step);
  return part;
}

template <typename T, ReduceRunsConfig kConfig>
__global__ void __launch_bounds__(kReduceRunsThreads, kConfig.Blocks(sizeof(T)))
    ReduceRuns(const __grid_constant__ ReduceRowsProblem p) {
  using Part = Reduced<Accumulator<T>, kConfig.reduction>;
  constexpr int kWarps = kReduceRunsThreads / kWarp, kUnits = kConfig.units;
  constexpr int kLoads = kConfig.LoadsOfLane(sizeof(T));
  constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  using Wide = Vector<T, kCount>;
  static __shared__ Wide stages[kWarps][kLoads * kWarp];  // of the numbers of each warp's run
  LetNextKernelBegin();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  T* numbers = stages[warp][0].elements;
  uint32_t stage = AddressOfShared(&stages[warp][lane]);
  KeepInRegister(stage);
  const auto down = static_cast<uint32_t>(ReduceRunsOf(p.pattern.rows, p.pattern.nse, kUnits));
  const uint32_t all = static_cast<uint32_t>(p.batch.count) * down;
  for (uint32_t unit = blockIdx.x * kWarps + warp; unit < all; unit += gridDim.x * kWarps) {
    const uint32_t entry = p.batch.rank > 0 ? unit / down : 0;
    const int number = static_cast<int>(unit - entry * down);
    const CutsOfRows cuts(p.batch, p.pattern, p.row_cuts, entry);
    const RowCut from = cuts.At(number * kUnits);
    const RowCut to = cuts.EndOf<kUnits>(from, (number + 1) * kUnits);
    const T* values = p.values.At<const T>(p.batch, entry);
    T* out = p.out.At<T>(p.batch, entry);
    const int begin = from.entry, end = to.entry, base = begin & -kCount;

    const auto offset = [&](int row) { return cuts.offsets[row < cuts.rows ? row : cuts.rows]; };
    const int own_begin = offset(from.row + lane), own_end = offset(from.row + lane + 1);
    const bool has_begun = cuts.IsWithinRow(from), goes_on = cuts.IsWithinRow(to);
    if (IsAligned<Wide>(values) && ((end + kCount - 1) & -kCount) <= cuts.nse) {
      const T* of_lane = values + base + lane * kCount;
      const int left = end - base - lane * kCount;
#pragma unroll
      for (int r = 0; r < kLoads; ++r) {
        constexpr int kStep = kWarp * kCount;
        if (r * kStep < left)
          AsyncCopyOrZero<16>(stage + r * kStep * sizeof(T), of_lane + r * kStep, true);
      }
      WaitForCopies();
    } else {
#pragma unroll 4
      for (int at = lane; base + at < end; at += kWarp) numbers[at] = values[base + at];
    }
    __syncwarp();

    // The rows of which the run has something, as far as it has it. Each has as many lanes, a power
    // of two.
    const int rows = to.row - from.row + (goes_on ? 1 : 0);
    const int shift = rows > 1 ? __clz(rows - 1) - __clz(kWarp - 1) : __ffs(kWarp) - 1;
    const int lanes = shift > 0 ? 1 << shift : 1, of_lanes = lane & (lanes - 1);
    const auto write = [&](int place, const Part& part) {
      const bool is_begun = has_begun && place == 0;
      if (is_begun || (goes_on && place == rows - 1)) {
        auto* left = reinterpret_cast<Part*>(p.workspace.data) + int64_t{unit} * kReducedPieces;
        left[is_begun ? 0 : 1] = part;
      } else {
        FromAccumulator(part.Result(), &out[from.row + place]);
      }
    };
    int place = shift > 0 ? lane >> shift : lane;
    int row_begin = __shfl_sync(kAllLanes, own_begin, place);
    int row_end = __shfl_sync(kAllLanes, own_end, place);
#pragma unroll 1
    for (int before = 0;;) {
      constexpr int kMostOfLane = 32;
      const int first = Clamp(row_begin, begin, end) - base;
      const int last = place < rows ? Clamp(row_end, begin, end) - base : first;
      const bool is_long = lanes < kWarp && last - first > kMostOfLane * lanes;
      const Part of_group = ReduceByGroup<kConfig.reduction>(numbers, first + of_lanes,
                                                             is_long ? first : last, lanes);
      if (place < rows && of_lanes == 0 && !is_long) write(place, of_group);
#pragma unroll 1
      for (unsigned left = __ballot_sync(kAllLanes, is_long && of_lanes == 0); left != 0;
           left &= left - 1) {
        const int owner = __ffs(static_cast<int>(left)) - 1;
        const Part of_warp =
            ReduceByGroup<kConfig.reduction>(numbers, __shfl_sync(kAllLanes, first, owner) + lane,
                                             __shfl_sync(kAllLanes, last, owner), kWarp);
        if (lane == owner) write(place, of_warp);
      }
      before += kWarp;
      if (before >= rows) break;
      place = before + lane;  // more rows than lanes: each has one
      row_begin = offset(from.row + place);
      row_end = offset(from.row + place + 1);
    }
    __syncwarp();  // before the next run's numbers are written
  }
}

// A row that several runs have pieces of, and the first run and the number of them.
struct RowInPieces {
  uint32_t entry;
  int row, first, count;
};

// Writes the results of rows of which the first kernel has left what each run has. A thread looks
// at a cut between runs, and adds up the pieces of the row that it is the first cut within, or if
// there are many of them, all threads of the block do.
template <typename T, ReduceRunsConfig kConfig>
__global__ void __launch_bounds__(kReduceRunsThreads, kConfig.BlocksOfPieces(sizeof(T)))
    ReducePieces(const __grid_constant__ ReduceRowsProblem p) {
  using Part = Reduced<Accumulator<T>, kConfig.reduction>;
  constexpr int kThreads = kReduceRunsThreads, kWarps = kThreads / kWarp;
  constexpr int kUnits = kConfig.units;
  constexpr int kFew = 8;    // pieces of a row
  constexpr int kAhead = 4;  // that a thread asks for at once
  static __shared__ RowInPieces long_rows[kThreads];
  static __shared__ unsigned of_lanes[kWarps];  // which of a warp's have one
  static __shared__ Part parts[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto down = static_cast<uint32_t>(ReduceRunsOf(p.pattern.rows, p.pattern.nse, kUnits));
  const uint32_t all = static_cast<uint32_t>(p.batch.count) * down;
  const auto piece = [&](const RowInPieces& of, int i) {
    if (i >= of.count) return Part::Nothing();
    const int64_t run = int64_t{of.entry} * down + of.first + i;
    // Where the row begins it is new.
    return reinterpret_cast<const Part*>(p.workspace.data)[run * kReducedPieces + (i == 0)];
  };
  const auto add = [&](const RowInPieces& of, int first, int step) {
    Part total = Part::Nothing();
#pragma unroll 1
    for (int i = first; i < of.count; i += kAhead * step) {
      Part ahead[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) ahead[a] = piece(of, i + a * step);
#pragma unroll
      for (int a = 0; a < kAhead; ++a) total.Add(ahead[a]);
    }
    return total;
  };
  const auto write = [&](const RowInPieces& of, const Part& total) {
    FromAccumulator(total.Result(), &p.out.At<T>(p.batch, of.entry)[of.row]);
  };

  bool waits = true;
  for (uint32_t first = blockIdx.x * kThreads; first < all; first += gridDim.x * kThreads) {
    const uint32_t unit = first + threadIdx.x;
    RowInPieces own = {unit < all ? unit / down : 0, 0, 0, 0};
    if (unit < all) {
      const int number = static_cast<int>(unit - own.entry * down);  // of the run behind the cut
      const CutsOfRows cuts(p.batch, p.pattern, p.row_cuts, own.entry);
      const RowCut cut = cuts.At(number * kUnits);
      if (cuts.IsWithinRow(cut)) {
        own.row = cut.row;
        own.first = cuts.FirstUnitOf(cut.row, cuts.offsets[cut.row]) / kUnits;
        const int last = cuts.LastUnitOf(cut.row, cuts.offsets[cut.row + 1]) / kUnits;
        if (own.first + 1 == number) own.count = last - own.first + 1;
      }
    }
    if (waits) WaitForPrologue();
    waits = false;
    if (own.count > 0 && own.count <= kFew) write(own, add(own, 0, 1));

    long_rows[threadIdx.x] = own;
    const unsigned are_long = __ballot_sync(kAllLanes, own.count > kFew);
    if (lane == 0) of_lanes[warp] = are_long;
    __syncthreads();
#pragma unroll 1
    for (int of_warp = 0; of_warp < kWarps; ++of_warp) {
#pragma unroll 1
      for (unsigned left = of_lanes[of_warp]; left != 0; left &= left - 1) {
        const RowInPieces row = long_rows[of_warp * kWarp + __ffs(static_cast<int>(left)) - 1];
        Part total = add(row, static_cast<int>(threadIdx.x), kThreads);
        total.AddOverLanes(kWarp);
        if (lane == 0) parts[warp] = total;
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll 1
          for (int other = 1; other < kWarps; ++other) total.Add(parts[other]);
          write(row, total);
        }
        __syncthreads();  // before these are written again
      }
    }
    __syncthreads();
  }
}

}  // namespace jaxsparse
