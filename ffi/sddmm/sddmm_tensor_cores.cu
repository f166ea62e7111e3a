// The sampled dense-dense product on tensor cores: tile by tile x y^T is computed densely, and its
// stored entries are picked. A tile costs what tensor cores take for it, however many entries it
// has, where a product entry by entry reads a row of y for each.
//
// A kernel before it splits y into planes of 16 bits (common/tensor_cores.cuh) and leaves them in
// the workspace, tile by tile as they are copied to shared memory. Two of a block's warpgroups
// multiply, the others pick the entries of one tile while the next one is multiplied, each warp
// those that one of the first has the sums of. A block's work is cut into units of a tile's rows
// and some neighbouring tiles: for a unit, rows of x are in registers, and each row's entries are
// walked once. While the first tile of a unit is multiplied, pickers find out where the entries of
// the next one are and which of its tiles have any, from some entries of each row, or from all
// where these leave a tile in doubt. Other tiles are left out.
//
// Columns of a row may stand in any order and more than once: what is written is what lies in the
// tile, and at a unit's end the number of entries written tells whether some stood behind higher
// columns. Such a row is computed entry by entry then, and so are sums in float32 that are not
// finite: there is no plane of an infinite number, so what meets one is NaN in the tile, and it
// alone, since rows and columns do not mix.
//
// Floors: 6 * rows * columns * d multiply-adds of tensor cores in float32, a sixth of them in 16
// bits, for tiles with entries, of which a multiprocessor does 2,048 a clock. Through shared
// memory, 128 bytes a clock, pass for each place of d of a tile, in float32, 6 * 64 bytes of y as
// they are copied and 2 * 12 * 64 as the warpgroups multiply; for each tile 32 KiB of sums, and 4
// bytes for each entry. Pickers take about eight instructions for an entry. From memory come x, y,
// column indices and scale, and goes the result, once each; in between, planes of y pass from the
// L2 cache once for every kSddmmTensorRows rows.
#include "common/warpgroup.cuh"
#include "sddmm/problem.h"

namespace jaxsparse {

constexpr uint32_t kNoColumn = 0xffffffffu;
constexpr int kSddmmWarps = kSddmmTensorRole / kWarp;  // of each role
constexpr int kSddmmWarpRows = kSddmmTensorRows / kSddmmWarps;
constexpr int kRegistersToMultiply = 168, kRegistersToPick = 88;
constexpr int kOfPickers = 1;  // the barrier at which they meet
static_assert(kSddmmTensorRole == 2 * kWarpgroup && kSddmmWarpRows == 16);

// The arrays of one batch entry.
template <typename T, typename Out, typename Index>
struct SddmmArrays {
  const int32_t* row_offsets;
  const Index* column_indices;
  const T* x;
  const T* y;
  const T* scale_by;
  Out* out;

  __device__ SddmmArrays(const SddmmProblem& p, int64_t entry)
      : row_offsets(p.pattern.row_offsets.At<const int32_t>(p.batch, entry)),
        column_indices(p.pattern.column_indices.At<const Index>(p.batch, entry)),
        x(p.x.At<const T>(p.batch, entry)),
        y(p.y.At<const T>(p.batch, entry)),
        scale_by(p.scale_by.data == nullptr ? nullptr : p.scale_by.At<const T>(p.batch, entry)),
        out(p.out.At<Out>(p.batch, entry)) {}

  __device__ uint32_t Column(int i) const { return static_cast<uint32_t>(column_indices[i]); }
  __device__ float Scale(int i) const {
    return scale_by == nullptr ? 1.0f : ToAccumulator(scale_by[i]);
  }
};

// Neighbouring tiles of the same rows.
struct SddmmUnit {
  uint32_t entry;
  uint32_t of_entry;  // its first tile's number in the batch entry
  int first_row;
  uint32_t first, count;  // tiles
  bool is_last;           // of its rows
  uint32_t tiles;         // a bit for each one that has entries; none, once there are no more units

  __device__ uint32_t FirstColumn() const { return first * kSddmmTensorColumns; }
  // A bit for the tile that a column lies in, or the one next to it.
  __device__ uint32_t BitOf(uint32_t column) const {
    if (column < FirstColumn()) return 1;
    const uint32_t tile = column / kSddmmTensorColumns - first;
    return 1u << (tile < count ? tile : count - 1);
  }
};

// All tiles, row by row, are cut into runs of about the same length, a few for each block; where
// rows end a run is cut into units. Blocks take turns in alternating order, so that later rows may
// have more entries than earlier ones.
struct SddmmSchedule {
  uint32_t across, of_entry;  // tiles
  uint32_t rounds, shorter, longer;

  __device__ explicit SddmmSchedule(const SddmmProblem& p) {
    const SddmmTiles tiles_of_entry = SddmmTilesOf(p);
    across = static_cast<uint32_t>(tiles_of_entry.across);
    of_entry = static_cast<uint32_t>(tiles_of_entry.down) * across;
    const uint32_t tiles = static_cast<uint32_t>(p.batch.count) * of_entry;
    rounds = (tiles - 1) / (gridDim.x * kSddmmUnitTiles) + 1;
    shorter = tiles / (rounds * gridDim.x);
    longer = tiles % (rounds * gridDim.x);
  }

  __device__ uint32_t RunAt(uint32_t round) const {
    return round * gridDim.x + (round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x);
  }
  __device__ uint32_t BeginOf(uint32_t run) const {
    return run * shorter + (run < longer ? run : longer);
  }
  __device__ SddmmUnit UnitAt(uint32_t tile, uint32_t end) const {
    SddmmUnit unit;
    unit.entry = tile / of_entry;
    unit.of_entry = tile - unit.entry * of_entry;
    unit.first_row = static_cast<int>(unit.of_entry / across) * kSddmmTensorRows;
    unit.first = unit.of_entry % across;
    const uint32_t left = across - unit.first;
    unit.is_last = left <= end - tile;
    unit.count = unit.is_last ? left : end - tile;
    return unit;
  }
};

// What the thread knows that has tiles of y copied.
struct SddmmCopies {
  const char* from;        // the first tile of a unit
  uint32_t tiles;          // of the unit, that are not copied yet
  uint32_t unit;           // the next one
  uint32_t number, ahead;  // tiles copied in all; of these not picked
};

// What a block has in shared memory behind stages and products. There are notes of two units: of
// the one that is multiplied and of the next one.
struct SddmmNotes {
  SddmmSchedule schedule;
  SddmmUnit units[2];
  SddmmCopies copies;
  uint64_t noted[2];
  // Of stages; of products, for each warp that multiplies and the one that picks its rows.
  uint64_t full[kSddmmMostStages], empty[kSddmmMostStages];
  uint64_t computed[kSddmmProducts][kSddmmWarps], picked[kSddmmProducts][kSddmmWarps];
  int begin[2][kSddmmTensorRows], end[2][kSddmmTensorRows];  // of a unit's entries
  int missing[kSddmmTensorRows];                             // of a row's entries
  // Of each warp of pickers bits of tiles: those between the first and the last entry of a row,
  // those of some entries and those of all. Warps may be one unit apart.
  uint32_t between[2][kSddmmWarps], found[2][kSddmmWarps], found_of_all[2][kSddmmWarps];
};
static_assert(sizeof(SddmmNotes) <= kSddmmNotesBytes);

// The bits that any of the lanes has, or any of the warps has noted.
__device__ __forceinline__ uint32_t BitsOfLanes(uint32_t bits) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    bits |= __shfl_xor_sync(kAllLanes, bits, distance);
  }
  return bits;
}
__device__ __forceinline__ uint32_t BitsOfWarps(const uint32_t (&noted)[kSddmmWarps]) {
  return BitsOfLanes(noted[threadIdx.x % kSddmmWarps]);
}

// How pickers share a warp's rows: eight lanes have a row in each of several turns.
struct SddmmLanes {
  static constexpr int kOfRow = 8, kAtOnce = kWarp / kOfRow, kTurns = kSddmmWarpRows / kAtOnce;
  int warp, lane, row;  // the lane's among those of a row; its row in the first turn

  __device__ SddmmLanes()
      : warp((threadIdx.x - kSddmmTensorRole) / kWarp),
        lane(threadIdx.x % kOfRow),
        row(warp * kSddmmWarpRows + threadIdx.x % kWarp / kOfRow) {}
};

// Pickers' search for a block's units, in turn.
template <typename T, typename Out, typename Index>
class SddmmScout : SddmmLanes {
  using Arrays = SddmmArrays<T, Out, Index>;
  const SddmmProblem& p_;
  SddmmNotes& notes_;
  uint32_t round_ = 0, tile_, searches_ = 0;

 public:
  __device__ SddmmScout(const SddmmProblem& p, SddmmNotes& notes)
      : p_(p), notes_(notes), tile_(notes.schedule.BeginOf(notes.schedule.RunAt(0))) {}

  // Notes the next unit that has entries, or that there is none, once all pickers are done with
  // what was noted there.
  __device__ void Note(int slot) {
    SddmmUnit unit;
#pragma unroll 1
    while (NextUnit(&unit)) {
      const Arrays arrays(p_, unit.entry);
      unit.tiles = TilesOf(arrays, unit, slot);
      if (unit.tiles != 0) Publish(unit, slot);
      WritePadding(arrays, unit);
      if (unit.tiles != 0) return;
    }
    WaitAt<kSddmmTensorRole>(kOfPickers);
    Publish(unit, slot);
  }

 private:
  __device__ void Publish(const SddmmUnit& unit, int slot) {
    if (threadIdx.x != kSddmmTensorRole) return;
    notes_.units[slot] = unit;
    Arrive(&notes_.noted[slot]);
  }

  __device__ bool NextUnit(SddmmUnit* unit) {
    const SddmmSchedule& schedule = notes_.schedule;
    unit->tiles = 0;
    while (round_ < schedule.rounds) {
      const uint32_t end = schedule.BeginOf(schedule.RunAt(round_) + 1);
      if (tile_ < end) {
        *unit = schedule.UnitAt(tile_, end);
        tile_ += unit->count;
        return true;
      }
      if (++round_ < schedule.rounds) tile_ = schedule.BeginOf(schedule.RunAt(round_));
    }
    return false;
  }

  // All tiles of a batch entry share the padding.
  __device__ void WritePadding(const Arrays& arrays, const SddmmUnit& unit) {
    constexpr int64_t kAtOnce = kSddmmTensorRole;
    const int64_t nse = p_.pattern.nse;
    const int64_t stored =
        p_.pattern.rows > 0 ? RowBounds::Clamp(arrays.row_offsets[p_.pattern.rows], nse) : 0;
#pragma unroll 1
    for (int64_t from = stored + unit.of_entry * kAtOnce; from < nse;
         from += notes_.schedule.of_entry * kAtOnce) {
      const int64_t end = from + unit.count * kAtOnce;
#pragma unroll 1
      for (int64_t i = from + threadIdx.x - kSddmmTensorRole; i < end && i < nse; i += kAtOnce) {
        FromAccumulator(0.0f, &arrays.out[i]);
      }
    }
  }

  // Where a row's entries of a unit begin and end. Lanes of a row search together, for all turns at
  // once. If columns do not rise, a place found is never further for a lower column, so that units
  // cut there have every entry once.
  __device__ __forceinline__ void FindEntries(const Arrays& arrays, const SddmmUnit& unit,
                                              int (&begin)[kTurns], int (&end)[kTurns]) {
    int low[2 * kTurns], high[2 * kTurns];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int64_t row = int64_t{unit.first_row} + this->row + turn * kAtOnce;
      begin[turn] = end[turn] = 0;
      if (row < p_.pattern.rows) {
        const RowBounds bounds(arrays.row_offsets, row, p_.pattern.nse);
        begin[turn] = static_cast<int>(bounds.begin);
        end[turn] = static_cast<int>(bounds.end);
      }
      low[turn] = begin[turn];
      high[turn] = unit.first == 0 ? begin[turn] : end[turn];
      low[kTurns + turn] = unit.is_last ? end[turn] : begin[turn];
      high[kTurns + turn] = end[turn];
    }
    while (true) {
      uint32_t columns[2 * kTurns];
      bool is_open = false;
#pragma unroll
      for (int i = 0; i < 2 * kTurns; ++i) {
        columns[i] = kNoColumn;
        if (low[i] >= high[i]) continue;
        columns[i] = arrays.Column(Probe(low[i], high[i], lane + 1));
        is_open = true;
      }
      if (!__any_sync(kAllLanes, is_open)) break;
#pragma unroll
      for (int i = 0; i < 2 * kTurns; ++i) {
        const uint32_t wanted = (unit.first + i / kTurns * unit.count) * kSddmmTensorColumns;
        const unsigned all = __ballot_sync(kAllLanes, columns[i] < wanted);
        const int below = __popc(all >> threadIdx.x % kWarp / kOfRow * kOfRow & 0xff);
        if (low[i] >= high[i]) continue;
        const int next = Probe(low[i], high[i], below) + (below > 0);
        high[i] = Probe(low[i], high[i], below + 1);
        low[i] = next;
      }
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      begin[turn] = low[turn];
      end[turn] = low[kTurns + turn];
    }
  }
  // One of the places that cut a range into as many parts as lanes of a row and one.
  __device__ static int Probe(int low, int high, int which) {
    constexpr unsigned kParts = kOfRow + 1;
    const unsigned size = high - low;
    return low + static_cast<int>(size / kParts * which + size % kParts * which / kParts);
  }

  // The tiles of a unit that have entries; of rows whose columns do not rise any tiles, but never
  // none. Notes where entries begin and end.
  __device__ __forceinline__ uint32_t TilesOf(const Arrays& arrays, const SddmmUnit& unit,
                                              int slot) {
    constexpr int kSamples = 2 * kOfRow - 1;  // behind the first one
    int begin[kTurns], end[kTurns];
    FindEntries(arrays, unit, begin, end);
    uint32_t between = 0, found = 0, columns[kTurns][2];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (lane == 0) {
        notes_.begin[slot][row + turn * kAtOnce] = begin[turn];
        notes_.end[slot][row + turn * kAtOnce] = end[turn];
      }
      const int last = end[turn] - 1 - begin[turn];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int sample = lane + i * kOfRow;  // the first and the last entry are among them
        if (last < 0) continue;
        columns[turn][i] = arrays.Column(begin[turn] + last / kSamples * sample +
                                         last % kSamples * sample / kSamples);
      }
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const bool has_any = begin[turn] < end[turn];
      const uint32_t low = has_any ? unit.BitOf(columns[turn][0]) : 0;
      const uint32_t high = has_any ? unit.BitOf(columns[turn][1]) : 0;
      const uint32_t last = __shfl_xor_sync(kAllLanes, high, kOfRow - 1);
      found |= low | high;
      if (lane == 0) between |= low < last ? (last - low) | last : (low - last) | low;
    }
    between = BitsOfLanes(between);
    found = BitsOfLanes(found);
    const uint32_t search = searches_++ % 2;
    const bool is_first = threadIdx.x % kWarp == 0;
    if (is_first) {
      notes_.between[search][warp] = between;
      notes_.found[search][warp] = found;
    }
    WaitAt<kSddmmTensorRole>(kOfPickers);
    if (p_.pattern.columns == 0) return 0;
    found = BitsOfWarps(notes_.found[search]);
    if ((BitsOfWarps(notes_.between[search]) & ~found) == 0) return found;

#pragma unroll 1
    for (int row = warp * kSddmmWarpRows; row < (warp + 1) * kSddmmWarpRows; ++row) {
      const int end_of_row = notes_.end[slot][row];
#pragma unroll 1
      for (int i = notes_.begin[slot][row] + threadIdx.x % kWarp; i < end_of_row; i += kWarp) {
        found |= unit.BitOf(arrays.Column(i));
      }
    }
    found = BitsOfLanes(found);
    if (is_first) notes_.found_of_all[search][warp] = found;
    WaitAt<kSddmmTensorRole>(kOfPickers);
    return BitsOfWarps(notes_.found_of_all[search]);
  }
};

// The entries of a warp's rows of a unit that are still to be written, in the order in which they
// are stored. Each lane of a row has every eighth of the next ones in registers, which were loaded
// while the next tile was multiplied.
template <typename T, typename Out, typename Index, bool kScaled>
class SampledRows : SddmmLanes {
  using Arrays = SddmmArrays<T, Out, Index>;
  static constexpr int kHalf = 2, kSlots = 2 * kHalf;  // entries of a lane
  static constexpr int kFew = kHalf * kOfRow;
  const Index* column_indices_;
  const T* scale_by_;
  Out* out_;
  int held_ = 2 * kFew;  // entries of a row that lanes have
  float told_ = 0;       // NaN if a sum is not finite
  int place_[kTurns];    // of the lane's first entry
  int left_[kTurns];     // entries of the row from there on
  uint32_t columns_[kTurns][kSlots];
  T scales_[kTurns][kSlots];

 public:
  __device__ __forceinline__ SampledRows(const Arrays& arrays, const SddmmNotes& notes, int slot)
      : column_indices_(arrays.column_indices), scale_by_(arrays.scale_by), out_(arrays.out) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      place_[turn] = notes.begin[slot][row + turn * kAtOnce] + lane;
      left_[turn] = notes.end[slot][row + turn * kAtOnce] - place_[turn];
    }
  }

  // Loads what the next tile may have.
  __device__ __forceinline__ void Load() {
    LoadHalf<0>();
    if (held_ > kFew) LoadHalf<kHalf>();
  }

  // Writes the entries in columns `first` to first + kSddmmTensorColumns; `product` is the tile of
  // them.
  __device__ __forceinline__ void Write(uint32_t product, uint32_t first) {
    product += row * (kSddmmProductPitch * static_cast<int>(sizeof(float)));
    uint32_t closed = 0;  // turns in which the tile ends before the entries held
    int most = 0;
    while (true) {
      // Of each turn in a byte: how many entries of the row lie in the tile.
      uint32_t counts = WriteHalf<0>(product, first);
      if (held_ > kFew) counts += WriteHalf<kHalf>(product, first);
#pragma unroll
      for (int distance = 1; distance < kOfRow; distance *= 2) {
        counts += __shfl_xor_sync(kAllLanes, counts, distance);
      }
      bool may_go_on = false;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int count = static_cast<int>(counts >> 8 * turn & 0xff);
        place_[turn] += count;
        left_[turn] -= count;
        if (count > most) most = count;
        may_go_on = may_go_on || (count == held_ && left_[turn] > 0);
      }
      if (!__any_sync(kAllLanes, may_go_on)) break;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        if (static_cast<int>(counts >> 8 * turn & 0xff) < held_) closed |= 1u << turn;
      }
      held_ = most = 2 * kFew;
      Load();
      // An entry of another row must not be counted twice.
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
        for (int j = 0; j < kSlots; ++j) {
          if ((closed >> turn & 1) != 0) columns_[turn][j] = kNoColumn;
        }
      }
    }
    // As many as this time, and a few more.
    held_ = __any_sync(kAllLanes, most + 3 > kFew) ? 2 * kFew : kFew;
  }

  // Writes what tiles did not tell, entry by entry; called behind the last one.
  __device__ void WriteOthers(const SddmmProblem& p, const SddmmUnit& unit, SddmmNotes& notes,
                              int slot) {
    bool is_told = kPlanes<T> == 1 || told_ == 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) is_told = is_told && left_[turn] <= 0;
    if (!__any_sync(kAllLanes, !is_told)) return;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (lane == 0) notes.missing[row + turn * kAtOnce] = left_[turn];
    }
    __syncwarp();
    const Arrays arrays(p, unit.entry);
#pragma unroll 1
    for (int r = warp * kSddmmWarpRows; r < (warp + 1) * kSddmmWarpRows; ++r) {
      const T* x = arrays.x + (int64_t{unit.first_row} + r) * p.d;
      const int end = notes.end[slot][r];
      const bool has_all = notes.missing[r] <= 0;
#pragma unroll 1
      for (int i = notes.begin[slot][r] + threadIdx.x % kWarp; i < end; i += kWarp) {
        if (has_all) {
          const float before = ToAccumulator(arrays.out[i]);
          if (before - before == 0) continue;
        }
        const uint32_t column = arrays.Column(i);
        if (column >= p.pattern.columns) continue;
        const T* y = arrays.y + column * p.d;
        float sum = 0;
#pragma unroll 1
        for (int64_t d = 0; d < p.d; ++d) sum += ToAccumulator(x[d]) * ToAccumulator(y[d]);
        FromAccumulator(sum * arrays.Scale(i), &arrays.out[i]);
      }
    }
  }

 private:
  template <int kFirst>
  __device__ __forceinline__ void LoadHalf() {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int j = kFirst; j < kFirst + kHalf; ++j) {
        columns_[turn][j] = kNoColumn;
        if (j * kOfRow >= left_[turn]) continue;
        const int at = place_[turn] + j * kOfRow;
        columns_[turn][j] = static_cast<uint32_t>(column_indices_[at]);
        if constexpr (kScaled) scales_[turn][j] = scale_by_[at];
      }
    }
  }

  // Of a half of what lanes have.
  template <int kFirst>
  __device__ __forceinline__ uint32_t WriteHalf(uint32_t product, uint32_t first) {
    // Reads of all entries are on their way before the first one is written.
    float sums[kTurns][kHalf];
    uint32_t counts = 0;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      constexpr int kBytes = kAtOnce * kSddmmProductPitch * static_cast<int>(sizeof(float));
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
        const uint32_t at = columns_[turn][kFirst + j] - first;
        sums[turn][j] = 0;
        if (at >= kSddmmTensorColumns) continue;
        sums[turn][j] = SharedAt<const float>(product + turn * kBytes + at * sizeof(float));
        counts += 1u << 8 * turn;
      }
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
        float sum = sums[turn][j];
        if constexpr (kPlanes<T> > 1) told_ += sum * 0.0f;
        if constexpr (kScaled) sum *= ToAccumulator(scales_[turn][kFirst + j]);
        if (columns_[turn][kFirst + j] - first < kSddmmTensorColumns) {
          FromAccumulator(sum, &out_[place_[turn] + (kFirst + j) * kOfRow]);
        }
      }
    }
    return counts;
  }
};

// Has tiles of y copied, in the order in which they are multiplied, as far as there are stages and
// units noted, which are those before `units`; called by one thread.
template <typename T, int kInner>
__device__ __forceinline__ void CopyTiles(const SddmmProblem& p, SddmmNotes& notes,
                                          unsigned char* stages, uint32_t units) {
  constexpr int kBytes = SddmmStageBytes(kPlanes<T>, kInner);
  constexpr uint32_t kStages = SddmmStages(kPlanes<T>, kInner);
  SddmmCopies& copies = notes.copies;
#pragma unroll 1
  while (copies.ahead < kStages) {
    if (copies.tiles == 0) {
      if (copies.unit == units) return;
      const SddmmUnit& unit = notes.units[copies.unit % 2];
      if (unit.tiles == 0) return;
      const PlaneTiles of_y(p.pattern.columns, p.d, kInner, kPlanes<T>);
      const int64_t own = (p.y.At<const T>(p.batch, unit.entry) - static_cast<const T*>(p.y.data)) /
                          (p.pattern.columns * p.d);
      copies.from = p.workspace.data + own * of_y.Bytes() + int64_t{unit.first} * kBytes;
      copies.tiles = unit.tiles;
      ++copies.unit;
    }
    const uint32_t tiles = copies.tiles, stage = copies.number % kStages;
    const int tile = __ffs(static_cast<int>(tiles)) - 1;
    uint64_t* full = &notes.full[stage];
    WaitForPhase(&notes.empty[stage], copies.number / kStages % 2 ^ 1);
    ArriveAndExpect(full, kBytes);
    BulkCopy(stages + stage * kBytes, copies.from + tile * kBytes, kBytes, full);
    copies.tiles = tiles & (tiles - 1);
    ++copies.number;
    ++copies.ahead;
  }
}

// Multiplies the tiles of a block's units, by its first threads.
template <typename T, int kInner>
__device__ __forceinline__ void MultiplyUnits(const SddmmProblem& p, SddmmNotes& notes,
                                              uint32_t stages) {
  using PlaneY = BlockPlane<kSddmmTensorColumns, kInner>;
  constexpr int kStages = SddmmStages(kPlanes<T>, kInner);
  constexpr int kStageBytes = SddmmStageBytes(kPlanes<T>, kInner);
  static_assert(kStageBytes == kPlanes<T> * PlaneY::kBytes && kStageBytes % 1024 == 0);
  const int warp = threadIdx.x / kWarp, group = WarpgroupOfBlock();
  const uint32_t products =
      stages + kStages * kStageBytes + group * (kSddmmTensorRows / 2 * kSddmmProductPitch * 4);
  RingPlace<kStages> stage;
  RingPlace<kSddmmProducts> place;
#pragma unroll 1
  for (RingPlace<2> slot;; slot.Advance()) {
    WaitForPhase(&notes.noted[slot.at], slot.odd);
    const SddmmUnit& unit = notes.units[slot.at];
    int tiles = __popc(unit.tiles);
    if (tiles == 0) return;
    WarpgroupRows<T, kInner> rows;
    rows.Load(p.x.At<const T>(p.batch, unit.entry), p.pattern.rows, p.d,
              int64_t{unit.first_row} + group * (kSddmmTensorRows / 2));
#pragma unroll 1
    for (; tiles > 0; --tiles) {
      WarpgroupProduct<T, kSddmmTensorColumns> product;
      WaitForPhase(&notes.full[stage.at], stage.odd);
      product.template Add<PlaneY, false>(rows, stages + stage.at * kStageBytes);
      ArriveAsWarp(&notes.empty[stage.at]);
      stage.Advance();
      WaitForPhase(&notes.picked[place.at][warp], place.odd ^ 1);
      const uint32_t to = products + place.at * kSddmmProductBytes;
      product.ForEachPair([&](int r, int c, float low, float high) {
        SharedAt<Packet<float, 2>>(to + (r * kSddmmProductPitch + c) * 4) = {{low, high}};
      });
      ArriveAsWarp(&notes.computed[place.at][warp]);
      place.Advance();
    }
  }
}

// Picks the entries of a block's units, by its other threads.
template <typename T, typename Out, typename Index, int kInner, bool kScaled>
__device__ __forceinline__ void PickUnits(const SddmmProblem& p, SddmmNotes& notes,
                                          unsigned char* stages) {
  const uint32_t products = AddressOfShared(stages) +
                            SddmmStages(kPlanes<T>, kInner) * SddmmStageBytes(kPlanes<T>, kInner);
  const int warp = threadIdx.x / kWarp - kSddmmWarps;
  const bool copies = threadIdx.x == kSddmmTensorRole;
  SddmmScout<T, Out, Index> scout(p, notes);
  RingPlace<kSddmmProducts> place;
  // The unit before the first one is empty.
#pragma unroll 1
  for (uint32_t noted = 0;; ++noted) {
    scout.Note(noted % 2);
    const int slot = (noted + 1) % 2;
    const SddmmUnit& unit = notes.units[slot];
    uint32_t left = unit.tiles;
    if (noted > 0 && left == 0) return;
    SampledRows<T, Out, Index, kScaled> entries(SddmmArrays<T, Out, Index>(p, unit.entry), notes,
                                                slot);
    entries.Load();
#pragma unroll 1
    while (true) {
      if (copies) CopyTiles<T, kInner>(p, notes, stages, noted + 1);
      if (left == 0) break;
      const uint32_t tile = unit.first + __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      WaitForPhase(&notes.computed[place.at][warp], place.odd);
      entries.Write(products + place.at * kSddmmProductBytes, tile * kSddmmTensorColumns);
      ArriveAsWarp(&notes.picked[place.at][warp]);
      place.Advance();
      if (copies) --notes.copies.ahead;
      entries.Load();
    }
    entries.WriteOthers(p, unit, notes, slot);
  }
}

// Before SddmmTensorCores: writes the planes of y to the workspace.
template <typename T, int kInner>
__global__ void __launch_bounds__(kPlanesThreads)
    SddmmPlanes(const __grid_constant__ SddmmProblem p) {
  static_assert(kPlaneLines == kSddmmTensorColumns);
  WritePlanes<T, kInner>(p.batch, p.y, p.pattern.columns, p.d, p.workspace);
}

// `kInner` is no less than d.
template <typename T, typename Out, typename Index, int kInner, bool kScaled>
__global__ void __launch_bounds__(kSddmmTensorThreads, 1)
    SddmmTensorCores(const __grid_constant__ SddmmProblem p) {
  constexpr int kStages = SddmmStages(kPlanes<T>, kInner);
  constexpr int kNotesAt = SddmmSharedBytes(kPlanes<T>, kInner) - kSddmmNotesBytes;
  extern __shared__ __align__(1024) unsigned char sddmm_shared[];
  SddmmNotes& notes = *reinterpret_cast<SddmmNotes*>(sddmm_shared + kNotesAt);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < 2; ++slot) InitBarrier(&notes.noted[slot], 1);
    for (int stage = 0; stage < kStages; ++stage) {
      InitBarrier(&notes.full[stage], 1);
      InitBarrier(&notes.empty[stage], kSddmmWarps);
    }
    for (int product = 0; product < kSddmmProducts; ++product) {
      for (int warp = 0; warp < kSddmmWarps; ++warp) {
        InitBarrier(&notes.computed[product][warp], 1);
        InitBarrier(&notes.picked[product][warp], 1);
      }
    }
    FenceShared();
    notes.schedule = SddmmSchedule(p);
    notes.units[1] = {};
    notes.copies = {};
  }
  if (threadIdx.x < kSddmmTensorRows) notes.begin[1][threadIdx.x] = notes.end[1][threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x < kSddmmTensorRole) {
    TakeRegisters<kRegistersToMultiply>();
    MultiplyUnits<T, kInner>(p, notes, AddressOfShared(sddmm_shared));
  } else {
    GiveUpRegisters<kRegistersToPick>();
    PickUnits<T, Out, Index, kInner, kScaled>(p, notes, sddmm_shared);
  }
}

}  // namespace jaxsparse
