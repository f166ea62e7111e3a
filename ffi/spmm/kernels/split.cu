// The sparse-dense product where lengths of rows are very different, as of graphs: work is cut by
// entries (cuda/row_cuts.h), into units of whole rows and pieces of long ones. A group of lanes, as
// wide as a tile of the result, takes one or two units. It asks for the rows of x of several
// entries at once, whatever rows of the result they belong to, then adds them, and writes each row
// that ends.
//
// The groups of a block take neighbouring units, and add the pieces of a row in shared memory. What
// belongs to a row that several blocks have parts of goes to a workspace; a second kernel adds
// these. Sums are taken in one order, which the pattern alone says, whatever the grid is.
//
// Floors: every entry reads kLanes * kVector elements of x from L2, whose rows have no order; from
// memory come the entries, x and the result, once each if L2 has room for x.
#include "cuda/row_cuts.cuh"
#include "spmm/kernels/entry_runs.cuh"
#include "spmm/kernels/split.h"

namespace jaxsparse {

template <int kVector, typename Acc>
__device__ __forceinline__ void AddPart(Acc (&sums)[kVector], const Vector<Acc, kVector>& part) {
#pragma unroll
  for (int c = 0; c < kVector; ++c) sums[c] += part.elements[c];
}

// Neighbouring entries, which a group adds at once. Columns are loaded ahead, as x is waited for by
// them, and so is where values stand if they are permuted; values come together with x.
template <typename T, typename Index, int kAtOnce, bool kPermuted>
struct EntriesAhead {
  static constexpr int kRuns = kAtOnce / kRun;
  Run<Index> columns[kRuns];
  Run<int32_t> sources[kPermuted ? kRuns : 1];

  // Those from `first` on; of runs that begin at `end` or behind nothing is loaded.
  template <typename M>
  __device__ __forceinline__ void Load(const M& m, int first, int end, int nse, bool wide) {
    LoadRuns(m.column_indices, first, end, nse, wide, columns);
    if constexpr (kPermuted) LoadRuns(m.permutation, first, end, nse, wide, sources);
  }
  template <typename M>
  __device__ __forceinline__ void LoadValues(const M& m, int first, int end, int nse, bool wide,
                                             Run<T> (&values)[kRuns]) const {
    if constexpr (kPermuted) {
#pragma unroll
      for (int e = 0; e < kAtOnce; ++e) {
        if (first + e >= end) continue;
        const uint32_t source = Within(sources[e / kRun].Get(e % kRun), nse);
        values[e / kRun].Set(e % kRun, m.values + source);
      }
    } else {
      LoadRuns(m.values, first, end, nse, wide, values);
    }
  }
  // Makes columns some of x, whatever they were.
  __device__ __forceinline__ void Bound(uint32_t bound) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) columns[r].Bound(bound);
  }
  __device__ __forceinline__ uint32_t Column(int e) const {
    return static_cast<uint32_t>(columns[e / kRun].Get(e % kRun));
  }
};

// Neighbouring elements of a row of x. Those of 2 bytes stay in the words in which they come, as in
// a Run.
template <typename T, int kCount, bool kHalves = sizeof(T) == 2 && kCount % 2 == 0>
struct RowOfX {
  Vector<T, kCount> elements;

  __device__ __forceinline__ void Load(const T* from, bool wide) {
    elements = LoadVector<kCount>(from, wide);
  }
  __device__ __forceinline__ Accumulator<T> Get(int c) const {
    return ToAccumulator(elements.elements[c]);
  }
  __device__ __forceinline__ void StayInWords() {}
};
template <typename T, int kCount>
struct RowOfX<T, kCount, true> {
  Vector<uint32_t, kCount / 2> words;

  __device__ __forceinline__ void Load(const T* from, bool wide) {
    if (wide) {
      words = *reinterpret_cast<const Vector<uint32_t, kCount / 2>*>(from);
      return;
    }
    const auto* halves = reinterpret_cast<const uint16_t*>(from);
#pragma unroll
    for (int w = 0; w < kCount / 2; ++w) {
      words.elements[w] = halves[2 * w] | static_cast<uint32_t>(halves[2 * w + 1]) << 16;
    }
  }
  __device__ __forceinline__ Accumulator<T> Get(int c) const {
    return ToAccumulator(T{static_cast<uint16_t>(words.elements[c / 2] >> c % 2 * 16)});
  }
  // In a loop: elements are taken out of their words in each turn, not all of them in front of the
  // first one, for which there are no registers.
  __device__ __forceinline__ void StayInWords() {
#pragma unroll
    for (int w = 0; w < kCount / 2; ++w) KeepInRegister(words.elements[w]);
  }
};

// Writes what a lane has of a row of the result, unless that is behind the last column. No lambda:
// NVRTC 12.8 and 13.0 crash where a lambda template within a kernel template calls another one.
template <bool kAligned, typename Result, int kVector, typename Acc>
__device__ __forceinline__ void WriteInTile(const Result& result, const SpmmProblem& p, int row,
                                            int64_t column, Acc (&sums)[kVector]) {
  if (column >= p.n) return;
  result.template WriteRun<kVector, kAligned>(p.activation, row, row * p.n + column, sums);
}

template <typename T, typename Out, typename Index, SpmmSplitConfig kConfig>
__global__ void __launch_bounds__(kConfig.Threads(), kConfig.Blocks(sizeof(T)))
    SpmmSplitRows(const __grid_constant__ SpmmProblem p) {
  using Acc = Accumulator<T>;
  constexpr int kVector = kConfig.vector, kLanes = kConfig.lanes, kUnits = kConfig.Units();
  constexpr int kGroups = kConfig.Groups(), kGroupUnits = kConfig.group_units;
  static __shared__ Vector<Acc, kVector> parts[kConfig.Threads()];
  // Of the entry of a batch: where rows go, which registers have no room for beside what is added.
  using Result = ResultOfEntry<T, Out>;
  static __shared__ Result result_of_entry;
  static __shared__ int first_rows[kGroups + 1];  // of the block's groups, and of the one behind
  LetNextKernelBegin();

  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int units = static_cast<int>(RowUnits(p.pattern.rows, p.pattern.nse));
  const auto down = static_cast<uint32_t>(SpmmSplitBlocksDown(p, kUnits));
  const auto tiles = static_cast<uint32_t>(CeilDivide(p.n, kLanes * kVector));
  const uint32_t blocks = static_cast<uint32_t>(p.batch.count) * tiles * down;
  const uint32_t row_bytes = static_cast<uint32_t>(p.n * sizeof(T));

  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    // The last parts and rows have been read. Here nobody waits for loads yet.
    __syncthreads();
    const uint32_t at = block % down;
    const uint32_t tile = kConfig.batched ? block / down % tiles : block / down;
    const uint32_t entry = kConfig.batched ? block / down / tiles : 0;
    const Matrices<T, Out, Index> m(p, entry);
    const CutsOfRows cuts(p.batch, p.pattern, p.row_cuts, entry);
    const int nse = cuts.nse;
    const int unit = Clamp(static_cast<int>(at) * kUnits + group * kGroupUnits, 0, units);
    const RowCut begin = cuts.At(unit), end = cuts.EndOf<kGroupUnits>(begin, unit + kGroupUnits);
    const int64_t column = (static_cast<int64_t>(tile) * kLanes + lane) * kVector;
    // Lanes behind the last column read the first ones, and write nothing.
    const T* x = m.x + (column < p.n ? column : 0);
    const bool wide =
        IsAligned<Vector<T, kVector>>(m.x) && IsAligned<Vector<Out, kVector>>(m.out) &&
        IsAligned<Vector<Out, kVector>>(m.preactivation) &&
        IsAligned<Run<Index>>(m.column_indices) &&
        (kConfig.permuted ? IsAligned<Run<int32_t>>(m.permutation) : IsAligned<Run<T>>(m.values));

    // The row that entries are added to; where it ends, as far as the unit has of it; and where the
    // one behind it ends, which is loaded ahead.
    int row = begin.row, first = begin.entry;
    const auto end_of = [&](int of) { return of < end.row ? m.row_offsets[of + 1] : end.entry; };
    const auto within_unit = [&](int place) { return Clamp(place, first, end.entry); };
    const bool has_begun = cuts.IsWithinRow(begin), is_cut = cuts.IsWithinRow(end);
    // What is left behind the last row that ends is a part of one that goes on: of one that has
    // begun here, or of the unit's only one.
    const bool is_only = has_begun && begin.row == end.row;
    const bool has_new = !is_only && unit < units && is_cut;
    int row_end = within_unit(end_of(row)), next_end = end_of(row + 1);
    Vector<Acc, kVector> sums = {};

    if (kConfig.batched && threadIdx.x == 0) result_of_entry = m;
    const auto result = [&]() -> Result {
      if constexpr (kConfig.batched) return result_of_entry;
      return m;
    };

    // Without an epilogue little has to be done where a row ends. So each entry is added once, and
    // rows that end behind it are written there.
    const auto write_rows_to = [&](int place) {
#pragma unroll 1
      while (row_end <= place && row < end.row) {
        if (row == begin.row && has_begun) {
          parts[threadIdx.x] = sums;
        } else if (column < p.n) {
          Vector<Out, kVector> of_row;
#pragma unroll
          for (int c = 0; c < kVector; ++c) {
            FromAccumulator(sums.elements[c], &of_row.elements[c]);
          }
          Result::StoreWords(result().out + (row * p.n + column), of_row);
        }
        sums = {};
        first = row_end;
        ++row;
        row_end = within_unit(next_end);
        next_end = end_of(row + 1);
      }
    };

    const auto add_unit = [&]<bool kWide, int kCount, bool kPlain>() {
      using Chunk = EntriesAhead<T, Index, kCount, kConfig.permuted>;
      constexpr int kAdded =
          kCount < 8 ? kCount : 8;  // entries, before rows that end are looked for
      const auto place = [&](uint32_t of_x) {
        const char* from = reinterpret_cast<const char*>(x) + MultiplyWide(of_x, row_bytes);
        return reinterpret_cast<const T*>(from);
      };
      const auto add = [&](Acc value, const RowOfX<T, kVector>& of_x) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) sums.elements[c] += value * of_x.Get(c);
      };
      uint32_t bound = Run<Index>::BoundOf(static_cast<uint32_t>(p.pattern.columns) - 1);
      KeepInRegister(bound);  // or it is computed again for each chunk
      KeepInRegister(x);
      const int last = end.entry;
      int i = FirstRun(first);
      Chunk next = {};
      next.Load(m, i, last, nse, kWide);
      if constexpr (kPlain) write_rows_to(first);  // those without entries
      do {
        Chunk entries = next;
        Run<T> values[Chunk::kRuns] = {};
        entries.LoadValues(m, i, last, nse, kWide, values);
        // In front of x, or columns would queue behind it.
        next.Load(m, i + kCount, last, nse, kWide);
        const auto value = [&](int e) { return ToAccumulator(values[e / kRun].Get(e % kRun)); };
        entries.Bound(bound);
        RowOfX<T, kVector> of_x[kCount];
        Acc of_entries[kPlain ? kCount : 1];
        if constexpr (kPlain) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) of_entries[e] = value(e);
        }
        if (begin.entry <= i && i + kCount <= last) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) of_x[e].Load(place(entries.Column(e)), kWide);
        } else {  // some belong to other units
#pragma unroll
          for (int e = 0; e < kCount; ++e) {
            of_x[e] = {};
            if (i + e >= begin.entry && i + e < last) {
              of_x[e].Load(place(entries.Column(e)), kWide);
            } else if constexpr (kPlain) {
              of_entries[e] = 0;
            }
          }
        }
        if constexpr (kPlain) {
          // Groups of a warp would seldom all take the shorter way.
          const bool ends_behind = kLanes == kWarp && row_end > i + kCount;
          if (ends_behind) {
#pragma unroll
            for (int e = 0; e < kCount; ++e) add(of_entries[e], of_x[e]);
          } else {
#pragma unroll
            for (int e = 0; e < kCount; ++e) {
              add(of_entries[e], of_x[e]);
              if (row_end == i + e + 1) write_rows_to(i + e + 1);
            }
          }
        } else {
#pragma unroll
          for (int part = 0; part < kCount; part += kAdded) {
            const int at = i + part, behind_part = at + kAdded;
            if (first <= at && row_end > behind_part) {
#pragma unroll
              for (int e = part; e < part + kAdded; ++e) add(value(e), of_x[e]);
              first = behind_part;
              continue;
            }
#pragma unroll 1
            for (;;) {
#pragma unroll
              for (int e = part; e < part + kAdded; ++e) of_x[e].StayInWords();
              const int from = first - i, behind = row_end - i;
#pragma unroll
              for (int e = part; e < part + kAdded; ++e) {
                if (e >= from && e < behind) add(value(e), of_x[e]);
              }
              if (row_end > behind_part) first = behind_part;
              if (row_end > behind_part || row >= end.row) break;
              if (row == begin.row && has_begun) {
                parts[threadIdx.x] = sums;
              } else {
                WriteInTile<kWide>(result(), p, row, column, sums.elements);
              }
              sums = {};
              first = row_end;
              ++row;
              row_end = within_unit(next_end);
              next_end = end_of(row + 1);
            }
          }
        }
        i += kCount;
      } while (i < last);
    };
    if (lane == 0) first_rows[group] = begin.row;
    if (lane == 0 && group == kGroups - 1) first_rows[kGroups] = end.row;
    if constexpr (kConfig.batched) __syncthreads();  // before the result is read
    const bool is_plain =
        p.activation == Activation::kNone && m.bias == nullptr && m.preactivation == nullptr;
    if (wide && is_plain) {
      add_unit.template operator()<true, kConfig.at_once, true>();
    } else if (wide) {
      add_unit.template operator()<true, kConfig.at_once, false>();
    } else {
      add_unit.template operator()<false, kRun, false>();
    }
    if (is_only) parts[threadIdx.x] = sums;
    __syncthreads();

    Acc* workspace = reinterpret_cast<Acc*>(p.workspace.data);
    const auto leave = [&](SpmmPart part, const Vector<Acc, kVector>& of_row) {
      if (column >= p.n) return;
      StoreVector(workspace + SpmmPartAt(p, down, entry, at, part) + column, of_row);
    };
    // Adds the parts of the groups behind this one; whether the row ends in the block.
    const auto add_parts = [&](int of, Vector<Acc, kVector>* to) {
      int other = group + 1;
#pragma unroll 1
      for (; other < kGroups && first_rows[other] == of; ++other) {
        AddPart<kVector>(to->elements, parts[lane + other * kLanes]);
      }
      return first_rows[other] != of;
    };
    if (has_new) {
      if (add_parts(end.row, &sums)) {
        WriteInTile<false>(result(), p, end.row, column, sums.elements);
      } else {
        leave(SpmmPart::kOfNew, sums);
      }
    }
    if (has_begun && group == 0) {
      sums = parts[threadIdx.x];
      add_parts(begin.row, &sums);
      leave(SpmmPart::kOfBegun, sums);
    }
  }
}

// Adds the parts that blocks have left of a row, and writes it. The row is found at the first
// boundary between blocks that is within it. A group of lanes adds a row's parts; of many the
// groups of a block add as many each.
template <typename T, typename Out, SpmmSplitConfig kConfig>
__global__ void __launch_bounds__(kSpmmAddThreads)
    SpmmAddParts(const __grid_constant__ SpmmProblem p) {
  using Acc = Accumulator<T>;
  constexpr int kVector = kConfig.vector, kLanes = kConfig.lanes, kUnits = kConfig.Units();
  constexpr int kGroups = kSpmmAddThreads / kLanes;
  constexpr int kAhead = kVector == 8 ? 4 : 8;  // parts that a group asks for
  constexpr int kMany = 16;                     // parts of a row for a group alone
  static __shared__ Vector<Acc, kVector> parts[kSpmmAddThreads];
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const auto down = static_cast<int>(SpmmSplitBlocksDown(p, kUnits));
  const auto chunks = static_cast<uint32_t>(CeilDivide(down, kSpmmAddBoundaries));
  const auto tiles = static_cast<uint32_t>(CeilDivide(p.n, kLanes * kVector));
  const uint32_t blocks = static_cast<uint32_t>(p.batch.count) * tiles * chunks;
  bool waits = true;

  for (uint32_t block = blockIdx.x; block < blocks; block += gridDim.x) {
    const uint32_t tile = block / chunks % tiles, entry = block / chunks / tiles;
    const Matrices<T, Out, int32_t> m(p, entry);  // of which no columns are read
    const CutsOfRows cuts(p.batch, p.pattern, p.row_cuts, entry);
    // The row of which a lane's boundary is the first, or -1, and how many parts it has. The same
    // in each warp of the block.
    const int own = static_cast<int>(block % chunks) * kSpmmAddBoundaries;
    const int boundary_of_lane = own + static_cast<int>(threadIdx.x % kWarp);
    int row_of_lane = -1, count_of_lane = 0;
    if (boundary_of_lane >= 1 && boundary_of_lane < down) {
      const RowCut cut = cuts.At(boundary_of_lane * kUnits);
      const RowCut before = cuts.At((boundary_of_lane - 1) * kUnits);
      const bool is_within = cuts.IsWithinRow(cut), has_been = cuts.IsWithinRow(before);
      if (is_within && !(has_been && before.row == cut.row)) {
        row_of_lane = cut.row;
        const int of_last = cuts.LastUnitOf(cut.row, cuts.offsets[cut.row + 1]) / kUnits;
        count_of_lane = (of_last < boundary_of_lane ? 0 : of_last - boundary_of_lane) + 2;
      }
    }
    const int64_t column = (static_cast<int64_t>(tile) * kLanes + lane) * kVector;
    const Acc* workspace = reinterpret_cast<const Acc*>(p.workspace.data);
    const bool wide = IsAligned<Vector<Acc, kVector>>(workspace);
    // Adds parts of the row of a boundary. All of some are loaded before the first of them is
    // added: compilers do not reorder loads that are wide or not.
    const auto add = [&](int boundary, int part, int behind, Vector<Acc, kVector>* sums) {
#pragma unroll 1
      for (; part < behind; part += kAhead) {
        Vector<Acc, kVector> ahead[kAhead] = {};
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (part + a >= behind) continue;
          const auto which = part + a == 0 ? SpmmPart::kOfNew : SpmmPart::kOfBegun;
          const Acc* from = workspace + SpmmPartAt(p, down, entry, boundary - 1 + part + a, which);
          ahead[a] = LoadVector<kVector>(from + (column < p.n ? column : 0), wide);
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) AddPart<kVector>(sums->elements, ahead[a]);
      }
    };
    if (waits) WaitForPrologue();
    waits = false;

    const unsigned few = __ballot_sync(kAllLanes, count_of_lane > 0 && count_of_lane <= kMany);
#pragma unroll 1
    for (int turn = 0; turn < __popc(few); turn += kGroups) {
      unsigned rest = few;
#pragma unroll 1
      for (int skipped = turn + group; skipped > 0 && rest != 0; --skipped) rest &= rest - 1;
      const int source = rest == 0 ? 0 : __ffs(static_cast<int>(rest)) - 1;
      const int row = __shfl_sync(kAllLanes, row_of_lane, source);
      const int count = __shfl_sync(kAllLanes, count_of_lane, source);
      Vector<Acc, kVector> sums = {};
      add(own + source, 0, rest == 0 ? 0 : count, &sums);
      if (rest == 0 || column >= p.n) continue;
      m.WriteRun(p.activation, row, row * p.n + column, sums.elements);
    }
#pragma unroll 1
    for (unsigned many = __ballot_sync(kAllLanes, count_of_lane > kMany); many != 0;
         many &= many - 1) {
      const int source = __ffs(static_cast<int>(many)) - 1;
      const int row = __shfl_sync(kAllLanes, row_of_lane, source);
      const int64_t count = __shfl_sync(kAllLanes, count_of_lane, source);
      Vector<Acc, kVector> sums = {};
      add(own + source, static_cast<int>(count * group / kGroups),
          static_cast<int>(count * (group + 1) / kGroups), &sums);
      parts[threadIdx.x] = sums;
      __syncthreads();
      if (group == 0 && column < p.n) {
#pragma unroll 4
        for (int g = 1; g < kGroups; ++g) {
          AddPart<kVector>(sums.elements, parts[threadIdx.x + g * kLanes]);
        }
        m.WriteRun(p.activation, row, row * p.n + column, sums.elements);
      }
      __syncthreads();  // before these parts are written again
    }
  }
}

}  // namespace jaxsparse
