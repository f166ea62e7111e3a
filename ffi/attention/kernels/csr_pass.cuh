// A pass over the rows of a pattern: which rows, or parts of one, the groups of a warp take, and
// how parts of a long row become one.
//
// Rows are taken in the order of their lengths, so that those of a warp's groups are about as long.
// A long row is shared by the groups of a warp. One of more than kCsrPart entries is cut, wherever
// a multiple of kCsrPart is among them, into parts that warps take first; the last one to be done
// adds them up, in their order: so sums repeat bitwise.
#pragma once

#include "attention/kernels/batch_place.cuh"
#include "attention/kernels/csr_lanes.cuh"
#include "attention/kernels/csr_vectors.cuh"

namespace jaxsparse {

// The pattern of one head.
template <typename Index>
struct CsrRows {
  const int32_t *offsets, *order;
  const Index* column_indices;
  uint32_t count, columns;
  int64_t nse;

  // Of heads that are told by their place among those that have patterns of their own.
  __device__ __forceinline__ CsrRows(const MaskPattern& pattern, const Batch& batch,
                                     const BatchPlace& place, int64_t own)
      : offsets(place.At<const int32_t>(batch, pattern.row_offsets) + own * (pattern.rows + 1)),
        order(place.At<const int32_t>(batch, pattern.row_order) + own * pattern.rows),
        column_indices(place.At<const Index>(batch, pattern.column_indices) + own * pattern.nse),
        count(static_cast<uint32_t>(pattern.rows)),
        columns(static_cast<uint32_t>(pattern.columns)),
        nse(pattern.nse) {
    KeepInRegister(column_indices);  // or its place is found anew for every entry
  }

  __device__ __forceinline__ uint32_t ColumnOf(uint32_t entry) const {
    return Within(column_indices[entry], columns);
  }
  __device__ __forceinline__ uint32_t RowAt(uint32_t place) const {
    return Within(order[place], count);
  }
  // Of an entry: the last row that begins at it or before.
  __device__ __forceinline__ uint32_t RowOf(uint32_t entry) const {
    uint32_t row = 0;
#pragma unroll 1
    for (uint32_t left = count; left > 1; left -= left / 2) {
      const uint32_t middle = row + left / 2;
      if (RowBounds::Clamp(offsets[middle], nse) <= entry) row = middle;
    }
    return row;
  }
};

// What a group does at a time: every `stride`th of the entries from `begin` on, in front of `end`.
struct CsrPiece {
  uint32_t row = 0, begin = 0, end = 0, stride = 1;
  bool exists = false;   // else there is nothing to do
  bool is_part = false;  // of a row that is cut
};

// Pieces of a warp that are left over, by their numbers: of those below 64 each one, of larger ones
// all from one on. The host gives warps so few units of rows that numbers stay below 64, and which
// pieces are left over does not depend on how many warps there are; in launches of other shapes no
// piece is lost.
struct CsrLeftovers {
  uint64_t first = 0;
  uint32_t from = ~0u;

  // Whether others can still be told apart from it.
  __device__ __forceinline__ bool Add(uint32_t number) {
    if (number < 64) first |= uint64_t{1} << number;
    else from = number;
    return number < 64;
  }
  __device__ __forceinline__ bool Has(uint32_t number) const {
    return number < 64 ? (first >> number & 1) != 0 : number >= from;
  }
  __device__ __forceinline__ bool IsEmpty() const { return first == 0 && from == ~0u; }
};

template <AttentionCsrConfig kConfig, typename Index>
class CsrPieces {
  static constexpr uint32_t kGroups = kConfig.Groups();
  using Lanes = CsrLanes<kConfig>;

 public:
  // `head`: among all of the pass.
  __device__ __forceinline__ CsrPieces(const CsrRows<Index>& rows, const CsrPass& pass,
                                       uint32_t head)
      : rows_(rows), pass_(pass), head_(head), group_(Lanes::Group()) {
    if (pass.parts > 0 && rows.count > 0) cuts_ = Bounds(rows.RowAt(0)).Length() > kCsrPart;
  }

  // Calls take(piece, number) for every piece of the warp, the `warp`th of as many, with all its
  // lanes, until it is false. Numbers rise.
  template <typename F>
  __device__ __forceinline__ void ForEach(uint32_t warp, uint32_t warps, F&& take) const {
    constexpr uint32_t kMostTurns = kGroups > 2 ? kGroups : 2;
    uint32_t number = 0;
    const uint32_t parts = cuts_ ? pass_.parts : 0;
    const uint32_t units = parts + (rows_.count + kGroups - 1) / kGroups;
#pragma unroll 1
    for (uint32_t unit = warp; unit < units; unit += warps, number += kMostTurns) {
      const bool is_part = unit < parts;
      CsrPiece own;  // of this group alone
      if (!is_part) own = RowAt((unit - parts) * kGroups + group_);
      const bool shared = __any_sync(kAllLanes, own.end - own.begin > kConfig.LongRow());
      const uint32_t turns = is_part ? 2 : shared ? kGroups : 1;
#pragma unroll 1
      for (uint32_t turn = 0; turn < turns; ++turn) {
        CsrPiece piece = is_part ? PartOf(unit, turn) : own;
        if (shared) piece = SharedOf(own, turn);
        if (!__any_sync(kAllLanes, piece.exists)) continue;
        if (!take(piece, number + turn)) return;
      }
    }
  }

  // Whether groups have parts of the same row, so that the first one writes what all have.
  static __device__ __forceinline__ bool IsShared(const CsrPiece& piece) {
    return piece.stride > 1 || kGroups == 1;
  }

  // The row of a piece in a pattern of as many rows.
  __device__ __forceinline__ CsrPiece SameRowOf(const CsrRows<Index>& rows,
                                                const CsrPiece& piece) const {
    if (!piece.exists) return piece;
    const RowBounds bounds(rows.offsets, piece.row, rows.nse);
    CsrPiece same = piece;
    same.begin = static_cast<uint32_t>(bounds.begin) + (piece.stride > 1 ? group_ : 0);
    same.end = static_cast<uint32_t>(bounds.end);
    return same;
  }

  // Where the sums of a part belong.
  template <typename Acc>
  __device__ __forceinline__ Acc* SumsOf(const CsrPiece& piece) const {
    return SumsAt<Acc>(piece.row, (piece.end - 1) / kCsrPart);
  }

  // Once the sums of a part are there: calls add(sums) for all parts of its row, in their order, if
  // this was the last one. Whether it was.
  template <typename Acc, typename F>
  __device__ __forceinline__ bool AddAllIfLast(const CsrPiece& piece, F&& add) const {
    const Span bounds = Bounds(piece.row);
    const uint32_t first = bounds.begin / kCsrPart, last = (bounds.end - 1) / kCsrPart;
    __syncwarp();
    uint32_t before = 0;
    if (threadIdx.x % kWarp == 0) {
      before = FetchAndAddOfGpu(pass_.done + static_cast<int64_t>(head_) * pass_.parts + first, 1);
    }
    __syncwarp();
    if (__shfl_sync(kAllLanes, before, 0) != last - first) return false;
#pragma unroll 1
    for (uint32_t part = first; part <= last; ++part) add(SumsAt<const Acc>(piece.row, part));
    return true;
  }

 private:
  struct Span {
    uint32_t begin, end;
    __device__ __forceinline__ uint32_t Length() const { return end > begin ? end - begin : 0; }
  };

  __device__ __forceinline__ Span Bounds(uint32_t row) const {
    const RowBounds bounds(rows_.offsets, row, rows_.nse);
    return {static_cast<uint32_t>(bounds.begin), static_cast<uint32_t>(bounds.end)};
  }

  __device__ __forceinline__ CsrPiece RowAt(uint32_t place) const {
    CsrPiece piece;
    if (place >= rows_.count) return piece;
    piece.row = rows_.RowAt(place);
    const Span bounds = Bounds(piece.row);
    if (cuts_ && bounds.Length() > kCsrPart) return piece;
    piece.begin = bounds.begin;
    piece.end = bounds.begin + bounds.Length();
    piece.exists = true;
    return piece;
  }

  // The piece of a group, for all groups.
  __device__ __forceinline__ CsrPiece SharedOf(const CsrPiece& piece, uint32_t group) const {
    const uint32_t lane = Lanes::FirstOf(group);
    CsrPiece shared;
    shared.row = __shfl_sync(kAllLanes, piece.row, lane);
    shared.begin = __shfl_sync(kAllLanes, piece.begin, lane) + group_;
    shared.end = __shfl_sync(kAllLanes, piece.end, lane);
    shared.exists = __shfl_sync(kAllLanes, static_cast<int>(piece.exists), lane) != 0;
    shared.stride = kGroups;
    return shared;
  }

  // What a part of the entries has of a row that is cut: there are two of them at most, that of its
  // first entry and that of its last one.
  __device__ __forceinline__ CsrPiece PartOf(uint32_t part, uint32_t turn) const {
    const uint32_t stored = RowBounds::Clamp(rows_.offsets[rows_.count], rows_.nse);
    const uint32_t begin = part * kCsrPart;
    const uint32_t end = begin + kCsrPart < stored ? begin + kCsrPart : stored;
    CsrPiece piece;
    if (begin >= end) return piece;
    const uint32_t first = rows_.RowOf(begin), row = turn == 0 ? first : rows_.RowOf(end - 1);
    const Span bounds = Bounds(row);
    if ((turn > 0 && row == first) || bounds.Length() <= kCsrPart) return piece;
    piece.begin = (bounds.begin > begin ? bounds.begin : begin) + group_;
    piece.end = bounds.end < end ? bounds.end : end;
    piece.row = row;
    piece.stride = kGroups;
    // Of offsets that do not rise it may have nothing.
    piece.exists = piece.end > begin && piece.end > bounds.begin;
    piece.is_part = true;
    return piece;
  }

  // A part has the sums of the row of its first entry, then those of the row of its last one.
  template <typename Acc>
  __device__ __forceinline__ Acc* SumsAt(uint32_t row, uint32_t part) const {
    const uint32_t begins = RowBounds::Clamp(rows_.offsets[row], rows_.nse);
    const int64_t place =
        (static_cast<int64_t>(head_) * pass_.parts + part) * 2 + (begins > part * kCsrPart ? 1 : 0);
    return static_cast<Acc*>(pass_.sums) + place * pass_.numbers;
  }

  const CsrRows<Index>& rows_;
  const CsrPass& pass_;
  uint32_t head_, group_;
  bool cuts_ = false;
};

// Calls step(column) for the entries of a piece, so many of a group at once: each lane with the
// column of one, or kNoEntry. All lanes of the warp have pieces.
template <AttentionCsrConfig kConfig, typename Index, typename F>
__device__ __forceinline__ void ForEachStep(const CsrRows<Index>& rows, const CsrPiece& piece,
                                            F&& step) {
  uint32_t at = piece.begin + CsrLanes<kConfig>::OwnEntry() * piece.stride;
  uint32_t column = at < piece.end ? rows.ColumnOf(at) : kNoEntry;
  while (__any_sync(kAllLanes, column != kNoEntry)) {
    at += kConfig.step * piece.stride;
    const uint32_t next = at < piece.end ? rows.ColumnOf(at) : kNoEntry;
    step(column);
    column = next;
  }
}

// A warp's own shared memory for tiles: its address.
template <AttentionCsrConfig kConfig>
__device__ __forceinline__ uint32_t TilesOfWarp() {
  if constexpr (kConfig.on_tensor_cores) {
    constexpr int kBytes = kConfig.stages * kConfig.StageBytes();
    static __shared__ __align__(128) char tiles[kCsrThreads / kWarp][kBytes];
    static_assert(sizeof(tiles) <= 48 << 10);  // as much as a kernel has without asking
    return AddressOfShared(tiles[threadIdx.x / kWarp]);
  }
  return 0;
}

// The same where vectors are copied: calls begin(column, tiles) as many steps before
// step(column, tiles, begun), with what it returned, as there are stages. `tiles`: shared memory of
// the warp.
template <AttentionCsrConfig kConfig, typename Begun, typename Index, typename Begin, typename F>
__device__ __forceinline__ void ForEachStagedStep(const CsrRows<Index>& rows, const CsrPiece& piece,
                                                  uint32_t tiles, Begin&& begin, F&& step) {
  constexpr int kStages = kConfig.stages;
  constexpr uint32_t kBytes = kConfig.StageBytes();
  uint32_t at = piece.begin + CsrLanes<kConfig>::OwnEntry() * piece.stride;
  uint32_t columns[kStages + 1];
#pragma unroll
  for (int i = 0; i <= kStages; ++i) {
    columns[i] = at < piece.end ? rows.ColumnOf(at) : kNoEntry;
    at += kConfig.step * piece.stride;
  }
  Begun begun[kStages];
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    if (__any_sync(kAllLanes, columns[i] != kNoEntry)) {
      begun[i] = begin(columns[i], tiles + i * kBytes);
    }
    CommitCopies();
  }
  uint32_t stage = 0;
  while (__any_sync(kAllLanes, columns[0] != kNoEntry)) {
    WaitForCopyGroups<kStages - 1>();
    __syncwarp();
    step(columns[0], tiles + stage, begun[0]);
    __syncwarp();
#pragma unroll
    for (int i = 0; i + 1 < kStages; ++i) begun[i] = begun[i + 1];
    if (__any_sync(kAllLanes, columns[kStages] != kNoEntry)) {
      begun[kStages - 1] = begin(columns[kStages], tiles + stage);
    }
    CommitCopies();
#pragma unroll
    for (int i = 0; i < kStages; ++i) columns[i] = columns[i + 1];
    columns[kStages] = at < piece.end ? rows.ColumnOf(at) : kNoEntry;
    at += kConfig.step * piece.stride;
    stage = stage + kBytes < kStages * kBytes ? stage + kBytes : 0;
  }
}

// Loads the vectors of a step's entries of two matrices: of `heads` those of all entries, or of
// each lane's own. Most steps have all their entries: then no load has a condition.
template <AttentionCsrConfig kConfig, typename Heads, typename Values>
__device__ __forceinline__ void LoadStep(const Heads& heads, const Values& values,
                                         uint32_t own_column,
                                         typename Heads::Packed (&of_heads)[kConfig.HeadsAtOnce()],
                                         typename Values::Packed (&of_values)[kConfig.step]) {
  const auto load = [](const auto& rows, bool exists, uint32_t row, auto& to) {
    if (exists) rows.Load(row, to);
    else rows.Clear(to);
  };
  uint32_t columns[kConfig.step];
#pragma unroll
  for (int u = 0; u < kConfig.step; ++u) {
    columns[u] = CsrLanes<kConfig>::OfEntry(own_column, u);
  }
  const bool all_exist = __all_sync(kAllLanes, own_column != kNoEntry);
  if (kConfig.own_scores) load(heads, own_column != kNoEntry, own_column, of_heads[0]);
  if (all_exist) {
#pragma unroll
    for (int u = 0; u < kConfig.step; ++u) {
      if constexpr (!kConfig.own_scores) heads.Load(columns[u], of_heads[u]);
      values.Load(columns[u], of_values[u]);
    }
  } else {
#pragma unroll
    for (int u = 0; u < kConfig.step; ++u) {
      const bool exists = columns[u] != kNoEntry;
      if constexpr (!kConfig.own_scores) load(heads, exists, columns[u], of_heads[u]);
      load(values, exists, columns[u], of_values[u]);
    }
  }
}

constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

// Of a query, of which there are cotangents: lse log2(e), and ct_sums.
template <typename Acc>
struct alignas(2 * sizeof(Acc)) CsrQuery {
  Acc log2_sum, ct_sum;
};

// Weights of a query that sees nothing are 0.
template <typename Acc>
__device__ __forceinline__ Acc Log2Of(Acc lse) {
  const Acc infinity = Acc(kInfinity);
  return lse == -infinity ? infinity : lse * kLog2OfE<Acc>;
}

__device__ __forceinline__ float Exp2(float x) { return ApproximateExp2(x); }
__device__ __forceinline__ double Exp2(double x) { return exp2(x); }

}  // namespace jaxsparse
