// The softmax over stored entries and its derivative where lengths of rows are very different, as
// of graphs: a warp takes a run of rows (cuda/row_cuts.h), and has all of its entries in
// registers, neighbouring ones in each lane. What rows have in all is found by a scan over lanes
// that begins anew with each row. The warps of a block take neighbouring runs, and add what they
// have of a long row in shared memory. What a block has of a row that other blocks have entries of,
// too, goes to a workspace, and is not written; a second kernel adds that up, in the order of
// blocks, and writes the entries.
//
// Loads wait for cuts alone, and then all are on their way at once: values, and where rows begin.
// Where a block has several runs, cuts and values of later ones come nearer meanwhile.
// The second kernel has entries in registers before the first one ends.
//
// Floor: values in and out once, 2 or 3 times nse elements, and those of rows which several blocks
// have entries of once more, from L2.
#include "sparse_softmax/kernels/row_pieces.cuh"
#include "sparse_softmax/kernels/row_scan.cuh"
#include "sparse_softmax/kernels/run_entries.cuh"
#include "sparse_softmax/kernels/runs.h"

namespace jaxsparse {

template <typename T, SparseSoftmaxRunsConfig kConfig>
__global__ void __launch_bounds__(kSoftmaxRunsThreads, kConfig.Blocks(sizeof(T)))
    SparseSoftmaxRuns(const __grid_constant__ SparseSoftmaxProblem p) {
  using Acc = Accumulator<T>;
  constexpr bool kBackward = kConfig.backward;
  constexpr int kWarps = kSoftmaxRunsThreads / kWarp, kUnits = kConfig.units;
  constexpr int kUnitsOfBlock = kConfig.UnitsOfBlock();
  constexpr int kMost = kConfig.MostOfLane(), kFew = kConfig.FewOfLane();
  // All warps meet there, but at other places of the code, by how many entries their runs have: so
  // it is not __syncthreads().
  constexpr int kPiecesAreThere = kAllThreads + 1;
  // Lanes begin up to kRun - 1 entries in front of the run, where a load is aligned.
  static_assert(MostEntriesOfUnits(kUnits) + kRun - 1 <= kMost * kWarp);
  static __shared__ MarkedBegins<kMost * kWarp> marks[kWarps];
  static __shared__ PiecesOfBlock<Acc, kBackward> pieces;
  static __shared__ StageOfRun<T, kMost> stages[kWarps];
  // In front of each warp's run and behind it, and of the next one.
  alignas(16) static __shared__ RowCut cuts_ahead[kWarps][2][2];
  LetNextKernelBegin();
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  MarkedBegins<kMost * kWarp>& begins = marks[warp];
  const Acc scale = static_cast<Acc>(p.scale);
  const auto down =
      static_cast<uint32_t>(SoftmaxBlocksDown(p.pattern.rows, p.pattern.nse, kUnitsOfBlock));
  const uint32_t all = static_cast<uint32_t>(p.batch.count) * down;
  const auto entry_of = [&](uint32_t block) { return kConfig.batched ? block / down : 0; };
  // Has the cuts in front of the warp's run and behind it copied to shared memory.
  const auto ask_for_cuts = [&](uint32_t block, RowCut(&to)[2]) {
    constexpr int kWords = sizeof(RowCut) / 4;
    if (block >= all || lane >= 2 * kWords) return;
    const uint32_t entry = entry_of(block);
    const CutsOfRows cuts(p.batch, p.pattern, p.row_cuts, entry);
    const int number = static_cast<int>(block - entry * down) * kWarps + warp;
    const int unit = (number + lane / kWords) * kUnits;
    const auto* words =
        reinterpret_cast<const int32_t*>(&cuts.cuts[unit < cuts.units ? unit : cuts.units]);
    AsyncCopyOrZero<4>(AddressOfShared(reinterpret_cast<int32_t*>(to) + lane),
                       words + lane % kWords, true);
  };
  // Brings the block's next entries, and where their rows begin, to L2: a warp has each array.
  const auto prefetch = [&](const CutsOfRows& cuts, int turn) {
    const RowCut front = cuts.Within(cuts_ahead[0][turn][0]);
    const RowCut behind = cuts.Within(cuts_ahead[kWarps - 1][turn][1]);
    const auto of_entries = [&](const Array& array) {
      const T* entries = array.At<const T>(p.batch, 0);
      PrefetchBetween(entries + front.entry, entries + behind.entry);
    };
    if (lane > 0) return;
    if (warp == 0) of_entries(p.values);
    if (warp == 1) PrefetchBetween(cuts.offsets + front.row, cuts.offsets + behind.row);
    if (kBackward && warp == 2) of_entries(p.tangent);
  };
  // Clears padding, a part of it in each block, or of some batch entries.
  const auto clear_padding = [&](uint32_t entry, uint32_t first, uint32_t threads) {
    const int32_t* offsets = p.pattern.row_offsets.At<const int32_t>(p.batch, entry);
    const auto nse = static_cast<uint32_t>(p.pattern.nse);
    T* out = p.out.At<T>(p.batch, entry);
    for (uint32_t i = RowBounds::Clamp(offsets[p.pattern.rows], nse) + first; i < nse;
         i += threads) {
      FromAccumulator(Acc(0), &out[i]);
    }
  };
  int turn = 0;  // which of the cuts in shared memory are those of the run, not of the next one
  ask_for_cuts(blockIdx.x, cuts_ahead[warp][0]);
  ask_for_cuts(blockIdx.x + gridDim.x, cuts_ahead[warp][1]);
  if constexpr (kConfig.batched) {
    for (uint32_t entry = blockIdx.x; entry < p.batch.count; entry += gridDim.x) {
      clear_padding(entry, threadIdx.x, kSoftmaxRunsThreads);
    }
  } else {
    const uint32_t threads = gridDim.x * kSoftmaxRunsThreads;
    clear_padding(0, blockIdx.x * kSoftmaxRunsThreads + threadIdx.x, threads);
  }
  for (uint32_t block = blockIdx.x; block < all; block += gridDim.x, turn ^= 1) {
    WaitForCopies();
    __syncthreads();  // the last block's pieces have been read
    const uint32_t entry = entry_of(block);
    const CutsOfRows cuts(p.batch, p.pattern, p.row_cuts, entry);
    RowCut(&own_cuts)[2] = cuts_ahead[warp][turn];
    const RowCut from = cuts.Within(own_cuts[0]), to = cuts.EndWithin<kUnits>(from, own_cuts[1]);
    __syncwarp();
    ask_for_cuts(block + 2 * gridDim.x, own_cuts);
    if constexpr (!kConfig.batched) {
      if (block + gridDim.x < all) prefetch(cuts, turn ^ 1);
    }
    const int begin = from.entry, base = begin & -kRun;
    const int end = to.entry;
    const T* values = p.values.At<const T>(p.batch, entry);
    const T* tangent = kBackward ? p.tangent.At<const T>(p.batch, entry) : nullptr;
    T* out = p.out.At<T>(p.batch, entry);
    using Wide = Vector<T, kRun>;
    const bool wide = IsAligned<Wide>(values) && IsAligned<Wide>(out) &&
                      (!kBackward || IsAligned<Wide>(tangent)) &&
                      ((end + kRun - 1) & -kRun) <= cuts.nse;
    const auto sum = [](Acc a, Acc b) { return a + b; };
    const auto greater = [](Acc a, Acc b) { return Greater(a, b); };
    const auto note = [&](const CutOfRun& cut, int behind) {
      if (lane == 0) pieces.rows[behind] = cut.is_within ? cut.row : pieces.kNone;
    };

    // With so many entries in a lane.
    const auto compute = [&]<int kCount>() {
      const int place = base + lane * kCount;
      EntriesOfLane<T, kCount> entries, of_tangent;
      entries.Load(values, place, end - 1, wide);
      if constexpr (kBackward) of_tangent.Load(tangent, place, end - 1, wide);
      constexpr int kRowsOfLane = 2;  // asked for at once, which suffice unless rows are very short
      const int own_row = from.row + lane;
      int own_begins[kRowsOfLane];
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) {
        const int row = own_row + r * kWarp;
        own_begins[r] = cuts.offsets[row < cuts.rows ? row : cuts.rows];
      }
      const CutOfRun cut_behind(cuts, to);
      const CutOfRun cut_in_front(cuts, from, __shfl_sync(kAllLanes, own_begins[0], 0),
                                  __shfl_sync(kAllLanes, own_begins[0], 1));
      const RunOfRows run(cut_in_front, cut_behind);
      const bool has_pieces = run.has_begun || run.has_new;
      note(cut_in_front, warp);
      if (warp == kWarps - 1) note(cut_behind, kWarps);

      // What stands in front of the run, and behind it, is told apart as if it were rows, too.
      // Where an empty row begins the next one does, too.
      const auto mark = [&](int at_row) {
        if (at_row >= begin && at_row < end) begins.of_entries[at_row - base] = 1;
      };
      begins.Clear(lane);
      __syncwarp();
      if (lane < 2) begins.of_entries[(lane == 0 ? begin : end) - base] = 1;
#pragma unroll
      for (int r = 0; r < kRowsOfLane; ++r) mark(own_begins[r]);
#pragma unroll 1
      for (int row = own_row + kRowsOfLane * kWarp; row <= to.row && row < cuts.rows;
           row += kWarp) {
        mark(cuts.offsets[row]);
      }
      __syncwarp();
      RowBegins rows(begins.template OfLane<kCount>(lane));

      // The first entry of a row that has begun and the last one of a new row know what the run has
      // of it.
      const auto leave = [&](Acc PieceOfRow<Acc>::* number, const Acc(&of_rows)[kCount]) {
        if (!has_pieces) return;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          if (place + k == begin) pieces.of_warp[warp][0].*number = of_rows[k];
          if (place + k == end - 1) pieces.of_warp[warp][1].*number = of_rows[k];
        }
      };
      Acc x[kCount], sums[kCount];
      if constexpr (kBackward) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) x[k] = entries.Get(k) * of_tangent.Get(k);
      } else {
        bool are_small = false;
        if constexpr (sizeof(Acc) == 4) {
          // All are so small that exponentials need no maximum: neither they nor sums overflow.
          constexpr float kMostOfLogarithm = 16;
          const float factor = kLog2E * scale;
          const float most = kMostOfLogarithm * ApproximateReciprocal(fabsf(factor));
          are_small = !__any_sync(kAllLanes, !AreAtMost(entries, most));
          if (are_small) {
#pragma unroll
            for (int k = 0; k < kCount; ++k) x[k] = ApproximateExp2(factor * entries.Get(k));
            if (lane < kPiecesOfRun) pieces.of_warp[warp][lane].max = 0;
          }
        }
        if (!are_small) {
          Acc max[kCount];
#pragma unroll
          for (int k = 0; k < kCount; ++k) x[k] = scale * entries.Get(k);
          rows.OfRows(x, greater, max);
          leave(&PieceOfRow<Acc>::max, max);
#pragma unroll
          for (int k = 0; k < kCount; ++k) {
            // A piece may be nothing but -inf, and others of its row not: -inf less -inf is no
            // number. A row of nothing else gets NaN, as its sum is 0.
            x[k] = Exponential(x[k] - Greater(max[k], kLeastFinite<Acc>));
          }
        }
      }
      rows.OfRows(x, sum, sums);
      leave(&PieceOfRow<Acc>::sum, sums);
      if constexpr (!kBackward) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) sums[k] = InverseOf(sums[k]);
      }
      WaitAt<kSoftmaxRunsThreads>(kPiecesAreThere);
      int first = begin, last = end;  // what is written
      if (has_pieces) {
        // A lane adds up the row of a cut: those in front of the run and behind it are wanted here.
        const int row = pieces.rows[lane < kWarps ? lane : kWarps];
        const TotalOfRow<Acc, kBackward> total = pieces.Total(row);
        const bool leaves = row != pieces.kNone && pieces.Leaves(row);
        PieceOfRow<Acc>* left = PiecesOf<Acc>(p.workspace, block);
        if (warp == 0 && lane == 0 && leaves) left[0] = {total.max, total.sum};
        if (warp == kWarps - 1 && lane == kWarps && leaves && row != pieces.rows[0]) {
          left[1] = {total.max, total.sum};
        }
        const auto of_piece = [&](int piece) {
          Acc number = total.sum;
          if constexpr (!kBackward) number = total.FactorOf(pieces.of_warp[warp][piece].max);
          return __shfl_sync(kAllLanes, number, warp + piece);
        };
        const Acc of_begun = of_piece(0), of_new = of_piece(1);
        const unsigned lanes_that_leave = __ballot_sync(kAllLanes, leaves);
        if (run.has_begun && (lanes_that_leave >> warp & 1) != 0) first = run.first;
        if (run.has_new && (lanes_that_leave >> (warp + 1) & 1) != 0) last = run.last;
        const uint32_t begun = run.has_begun ? EntriesWithin<kCount>(place, begin, run.first) : 0;
        const uint32_t fresh = run.has_new ? EntriesWithin<kCount>(place, run.last, end) : 0;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          if ((begun >> k & 1) != 0) sums[k] = of_begun;
          if ((fresh >> k & 1) != 0) sums[k] = of_new;
        }
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if constexpr (kBackward) {
          x[k] = scale * entries.Get(k) * (of_tangent.Get(k) - sums[k]);
        } else {
          x[k] *= sums[k];
        }
      }
      stages[warp].Store(out, base, first, last, wide, x);
    };
    if (begin < end && end - base <= kFew * kWarp) {
      compute.template operator()<kFew>();
    } else if (begin < end) {
      compute.template operator()<kMost>();
    } else {
      const CutOfRun cut(cuts, from);
      note(cut, warp);
      if (warp == kWarps - 1) note(cut, kWarps);
      WaitAt<kSoftmaxRunsThreads>(kPiecesAreThere);
    }
  }
}

// Writes the entries of rows of which the first kernel has left what each block has: a team of
// lanes those of the row that a boundary between blocks is within, as far as the block behind it
// has them, and that in front of it, if the row begins there.
template <typename T, SparseSoftmaxRunsConfig kConfig>
__global__ void __launch_bounds__(kSoftmaxRunsThreads, kConfig.BlocksOfPieces(sizeof(T)))
    SparseSoftmaxPieces(const __grid_constant__ SparseSoftmaxProblem p) {
  using Acc = Accumulator<T>;
  constexpr bool kBackward = kConfig.backward;
  constexpr int kUnitsOfBlock = kConfig.UnitsOfBlock(), kTeam = kConfig.team;
  constexpr int kTeams = kSoftmaxRunsThreads / kTeam;
  constexpr int kLoads = 4;  // runs of entries that a lane asks for at once
  constexpr int kAhead = 2;  // pieces
  const int lane = threadIdx.x % kWarp, of_team = threadIdx.x % kTeam;
  const Acc scale = static_cast<Acc>(p.scale);
  const auto down =
      static_cast<uint32_t>(SoftmaxBlocksDown(p.pattern.rows, p.pattern.nse, kUnitsOfBlock));
  const uint32_t all = static_cast<uint32_t>(p.batch.count) * down;
  bool waits = true;
  const auto wait = [&] {
    if (waits) WaitForPrologue();
    waits = false;
  };
  for (uint32_t at = blockIdx.x * kTeams + threadIdx.x / kTeam; at < all;
       at += gridDim.x * kTeams) {
    const uint32_t entry = kConfig.batched ? at / down : 0;
    const CutsOfRows cuts(p.batch, p.pattern, p.row_cuts, entry);
    const int block = static_cast<int>(at - entry * down);  // behind the boundary
    const RowCut from = cuts.At(block * kUnitsOfBlock);
    const RowCut to = cuts.EndOf<kUnitsOfBlock>(from, (block + 1) * kUnitsOfBlock);
    const CutOfRun cut(cuts, from);
    if (!cut.is_within) {
      wait();
      continue;
    }
    const int first_block = cuts.FirstUnitOf(cut.row, cut.row_begin) / kUnitsOfBlock;
    const int last_block = cuts.LastUnitOf(cut.row, cut.row_end) / kUnitsOfBlock;
    const int count = last_block - first_block + 1;
    constexpr int kMostInFront = MostEntriesOfUnits(kUnitsOfBlock);
    const int least = cut.entry < kMostInFront ? 0 : cut.entry - kMostInFront;
    const int begin = first_block < block - 1 ? cut.entry : Clamp(cut.row_begin, least, cut.entry);
    const int end = Clamp(cut.row_end, cut.entry, to.entry);

    const T* values = p.values.At<const T>(p.batch, entry);
    const T* tangent = kBackward ? p.tangent.At<const T>(p.batch, entry) : nullptr;
    T* out = p.out.At<T>(p.batch, entry);
    using Wide = Vector<T, kRun>;
    const bool wide =
        IsAligned<Wide>(values) && IsAligned<Wide>(out) && (!kBackward || IsAligned<Wide>(tangent));
    const auto is_whole = [&](int place) { return wide && place >= begin && place + kRun <= end; };
    const auto has = [&](int place) { return place >= begin && place < end; };
    const auto load = [&](const T* of, int place, Wide* run) {
      if (is_whole(place)) {
        *run = *reinterpret_cast<const Wide*>(of + place);
      } else {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          if (has(place + e)) run->elements[e] = of[place + e];
        }
      }
    };
    Wide x[kLoads] = {}, t[kBackward ? kLoads : 1] = {};
    const auto load_all = [&](int from_place) {
#pragma unroll
      for (int r = 0; r < kLoads; ++r) {
        const int place = from_place + r * kTeam * kRun;
        load(values, place, &x[r]);
        if constexpr (kBackward) load(tangent, place, &t[r]);
      }
    };
    int place = begin - begin % kRun + of_team * kRun;
    load_all(place);  // what other kernels have left is not waited for yet
    wait();

    const PieceOfRow<Acc>* left = PiecesOf<Acc>(p.workspace, int64_t{entry} * down + first_block);
    TotalOfRow<Acc, kBackward> total;
#pragma unroll 1
    for (int i = lane; i < count; i += kAhead * kWarp) {
      PieceOfRow<Acc> ahead[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int of_row = i + a * kWarp;
        ahead[a] = {-kInfinity<Acc>, 0};
        // Where the row begins it is new.
        if (of_row < count) ahead[a] = left[int64_t{of_row} * kPiecesOfRun + (of_row == 0)];
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) total.Add(ahead[a]);
    }
    total.AddOverLanes();
    const Acc inverse = kBackward ? Acc(0) : InverseOf(total.sum);

#pragma unroll 1
    for (;;) {
#pragma unroll
      for (int r = 0; r < kLoads; ++r) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          const Acc of_x = ToAccumulator(x[r].elements[e]);
          if constexpr (kBackward) {
            const Acc of_t = ToAccumulator(t[r].elements[e]);
            FromAccumulator(scale * of_x * (of_t - total.sum), &x[r].elements[e]);
          } else {
            FromAccumulator(Exponential(scale * of_x - total.max) * inverse, &x[r].elements[e]);
          }
        }
        const int of_run = place + r * kTeam * kRun;
        if (is_whole(of_run)) {
          *reinterpret_cast<Wide*>(out + of_run) = x[r];
        } else {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            if (has(of_run + e)) out[of_run + e] = x[r].elements[e];
          }
        }
      }
      place += kLoads * kTeam * kRun;
      if (place - of_team * kRun >= end) break;
      load_all(place);
    }
  }
}

}  // namespace jaxsparse
