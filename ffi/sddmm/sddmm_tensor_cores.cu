// The sampled dense-dense product on tensor cores: tile by tile x y^T is computed densely, and its
// stored entries are picked. A tile costs what tensor cores take for it, however many entries it
// has, where a product entry by entry reads a row of y for each.
//
// A kernel before it (cuda/preparation.cuh) splits y into components of 16 bits, tile by tile as
// they are copied to shared memory, and finds where each row's entries of each tile begin. Two of a
// block's warpgroups multiply, the others pick the entries of one tile while the next one is
// multiplied, each warp those that one of the first has the sums of. A block's work is cut into
// units of a tile's rows and some neighbouring tiles: for a unit, rows of x are in registers. While
// the first tile of a unit is multiplied, pickers find out which tiles of the next one have any
// entries. Others are left out. Warps of pickers take turns to have tiles of y copied: one that did
// it for all was what the others waited for.
//
// A row whose columns do not rise has no entries in any tile. It is computed entry by entry with
// the last unit of its rows, and so are sums in float32 that are not finite: there is no component
// of an infinite number, so what meets one is NaN in the tile, and it alone, since rows and columns
// do not mix.
//
// Floors: 6 * rows * columns * d multiply-adds of tensor cores in float32, a sixth of them in 16
// bits, for tiles with entries, of which a multiprocessor does 2,048 a clock. Through shared
// memory, 128 bytes a clock, pass for each place of d of a tile, in float32, 6 * 64 bytes of y as
// they are copied and 2 * 12 * 64 as the warpgroups multiply; for each tile 32 KiB of sums, and 4
// bytes for each entry. From memory come x, y, column indices and scale, and goes the result, once
// each; in between, column indices and starts of tiles pass from the L2 cache once more, components
// of y once for every kSddmmTensorRows rows.
#include "cuda/preparation.cuh"
#include "sddmm/problem.h"

namespace jaxsparse {

constexpr int kSddmmWarps = kSddmmTensorRole / kWarp;  // of each role
constexpr int kSddmmWarpRows = kSddmmTensorRows / kSddmmWarps;
constexpr int kRegistersToMultiply = 168, kRegistersToPick = 88;
constexpr int kOfPickers = 1;  // the barrier at which they meet
static_assert(kSddmmTensorRole == 2 * kWarpgroup && kSddmmWarpRows == 16);

// Neighbouring tiles of the same rows.
struct SddmmUnit {
  uint32_t entry;
  int first_row;
  uint32_t first, count;  // tiles
  uint32_t tiles;         // a bit for each one that has entries; none, once there are no more units
  uint32_t tile_of_y;     // its first one's, in the workspace
  const int32_t* starts;  // of the first of its rows in its first tile
  // Of its batch entry. Pickers have no registers for them.
  const void* column_indices;
  const void* scale_by;
  void* out;
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
    const uint32_t in_entry = tile - unit.entry * of_entry, left = across - in_entry % across;
    unit.first_row = static_cast<int>(in_entry / across) * kSddmmTensorRows;
    unit.first = in_entry % across;
    unit.count = left <= end - tile ? left : end - tile;
    return unit;
  }
};

template <typename T, int kInner>
__device__ __forceinline__ Preparation PreparationOf(const SddmmProblem& p) {
  return Preparation(p.batch, p.pattern, p.pattern.columns, p.y, p.d, kInner, kComponents<T>);
}

// What a block has in shared memory behind stages and products. There are notes of two units: of
// the one that is multiplied and of the next one.
struct SddmmNotes {
  SddmmSchedule schedule;
  Preparation prepared;
  const char* components_of_y;
  SddmmUnit units[2];
  uint64_t noted[2];
  // Of stages; of products, for each warp that multiplies and the one that picks its rows.
  uint64_t full[kSddmmMostStages], empty[kSddmmMostStages];
  uint64_t computed[kSddmmProducts][kSddmmWarps], picked[kSddmmProducts][kSddmmWarps];
  // Of each warp of pickers, the tiles that have entries. Warps may be one unit apart.
  uint32_t found[2][kSddmmWarps];
  uint32_t queue[2 * kSddmmUnitTiles];  // which tiles of y are multiplied, of the two units
};
static_assert(sizeof(SddmmNotes) <= kSddmmNotesBytes);

// The bits that any of the lanes has.
__device__ __forceinline__ uint32_t BitsOfLanes(uint32_t bits) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    bits |= __shfl_xor_sync(kAllLanes, bits, distance);
  }
  return bits;
}

// Where the starts of a unit's row are. There are none of rows in tiles that do not exist.
__device__ __forceinline__ const int32_t* StartsOfRow(const Preparation& prepared,
                                                      const SddmmUnit& unit, int row) {
  const int below = row / kTileSize;
  if (unit.first_row / kTileSize + below >= prepared.starts.down) return nullptr;
  return unit.starts + prepared.starts.At(0, below) + row % kTileSize;
}

// Writes padding. Blocks share that of each batch entry.
template <typename Out>
__device__ __forceinline__ void WritePadding(const SddmmProblem& p) {
  const int64_t nse = p.pattern.nse;
  const int64_t parts = gridDim.x > p.batch.count ? gridDim.x / p.batch.count : 1;
#pragma unroll 1
  for (int64_t share = blockIdx.x; share < p.batch.count * parts; share += gridDim.x) {
    const int64_t entry = share / parts;
    const auto* offsets = p.pattern.row_offsets.At<const int32_t>(p.batch, entry);
    const int64_t stored = p.pattern.rows > 0 ? RowBounds::Clamp(offsets[p.pattern.rows], nse) : 0;
    Out* out = p.out.At<Out>(p.batch, entry);
    const int64_t first = share % parts * kSddmmTensorRole + threadIdx.x % kSddmmTensorRole;
#pragma unroll 1
    for (int64_t i = stored + first; i < nse; i += parts * kSddmmTensorRole) {
      FromAccumulator(0.0f, &out[i]);
    }
  }
}

// Pickers' search for a block's units, in turn.
template <typename T, typename Out, typename Index>
class SddmmScout {
  const SddmmProblem& p_;
  SddmmNotes& notes_;
  const int picker_ = threadIdx.x % kSddmmTensorRole;
  uint32_t round_ = 0, tile_, searches_ = 0;

 public:
  __device__ SddmmScout(const SddmmProblem& p, SddmmNotes& notes)
      : p_(p), notes_(notes), tile_(notes.schedule.BeginOf(notes.schedule.RunAt(0))) {}

  // Notes the next unit that has entries, once all pickers are done with what was noted there.
  // Where there is none, notes that, and writes the padding.
  __device__ SddmmUnit Note(int slot) {
    SddmmUnit unit;
    unit.tiles = 0;
#pragma unroll 1
    while (unit.tiles == 0 && NextUnit(&unit)) unit.tiles = TilesOf(unit);
    if (unit.tiles == 0) WaitAt<kSddmmTensorRole>(kOfPickers);
    if (picker_ == 0) {
      SddmmUnit& noted = notes_.units[slot];
      noted = unit;
      if (unit.tiles != 0) {
        noted.column_indices = p_.pattern.column_indices.At<const Index>(p_.batch, unit.entry);
        noted.scale_by = p_.scale_by.At<const T>(p_.batch, unit.entry);
        noted.out = p_.out.At<Out>(p_.batch, unit.entry);
      }
      Arrive(&notes_.noted[slot]);
    }
    if (unit.tiles == 0) WritePadding<Out>(p_);
    return unit;
  }

 private:
  __device__ bool NextUnit(SddmmUnit* unit) {
    const SddmmSchedule& schedule = notes_.schedule;
    while (round_ < schedule.rounds) {
      const uint32_t end = schedule.BeginOf(schedule.RunAt(round_) + 1);
      if (tile_ < end) {
        *unit = schedule.UnitAt(tile_, end);
        tile_ += unit->count;
        const Preparation& prepared = notes_.prepared;
        const int64_t of_y = OwnEntry(p_.batch, p_.y, unit->entry);
        unit->tile_of_y = static_cast<uint32_t>(of_y * prepared.components.down) + unit->first;
        unit->starts = prepared.StartsOf(p_.batch, p_.pattern, p_.workspace, unit->entry) +
                       prepared.starts.At(0, unit->first_row / kTileSize) + unit->first * kTileSize;
        return true;
      }
      if (++round_ < schedule.rounds) tile_ = schedule.BeginOf(schedule.RunAt(round_));
    }
    return false;
  }

  // The tiles of a unit that have entries, and the last one of rows if the columns of any do not
  // rise. Each thread looks at half of a row.
  __device__ __forceinline__ uint32_t TilesOf(const SddmmUnit& unit) {
    constexpr int kHalf = kSddmmUnitTiles / 2;
    static_assert(kSddmmTensorRole == 2 * kSddmmTensorRows);
    const int first = picker_ / kSddmmTensorRows * kHalf;
    const int count = p_.pattern.columns == 0 ? 0 : static_cast<int>(unit.count) - first;
    const int32_t* starts = StartsOfRow(notes_.prepared, unit, picker_ % kSddmmTensorRows);
    uint32_t found = 0;
    if (starts != nullptr) {
      int32_t places[kHalf + 1] = {};
#pragma unroll
      for (int i = 0; i <= kHalf; ++i) {
        if (count > 0 && i <= count) places[i] = starts[(first + i) * kTileSize];
      }
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        if (i < count && (places[i] < places[i + 1] || places[i + 1] < 0)) found |= 1u << i;
      }
    }
    found = BitsOfLanes(found << first);
    uint32_t (&of_warps)[kSddmmWarps] = notes_.found[searches_++ % 2];
    if (picker_ % kWarp == 0) of_warps[picker_ / kWarp] = found;
    WaitAt<kSddmmTensorRole>(kOfPickers);
    return BitsOfLanes(of_warps[picker_ % kSddmmWarps]);
  }
};

// The entries of a warp's rows of a unit in one tile after another. Eight lanes have four
// neighbouring rows; each has every eighth entry of the next tile in registers, which come while
// that tile is multiplied. Where they end is loaded a tile earlier.
template <typename T, typename Out, typename Index, bool kScaled>
class SampledRows {
  static constexpr int kOfRow = 8;                               // lanes
  static constexpr int kRows = kSddmmWarpRows * kOfRow / kWarp;  // of a lane
  static constexpr int kSlots = 4;                               // entries of each row
  static constexpr int kPitch = kSddmmProductPitch * static_cast<int>(sizeof(float));
  using Places = Vector<int32_t, kRows>;
  const SddmmUnit& unit_;
  const int nse_;
  const int lane_ = threadIdx.x % kOfRow;                            // of those of a row
  const int row_ = threadIdx.x % kSddmmTensorRole / kOfRow * kRows;  // the first one
  const int32_t* starts_;
  uint32_t tiles_;                            // whose ends are not on their way yet
  int place_[kRows] = {}, left_[kRows] = {};  // of the lane's first entry; of the row from there on
  Places after_ = {};                         // ends of the rows in the tile behind
  int slots_;                     // that the next tile takes, or one more than there are
  float told_ = 0;                // NaN if a sum is not finite
  uint32_t held_[kRows][kSlots];  // columns, then sums
  T scales_[kRows][kSlots];

 public:
  __device__ __forceinline__ SampledRows(const Preparation& prepared, const SddmmUnit& unit,
                                         int nse)
      : unit_(unit),
        nse_(nse),
        starts_(StartsOfRow(prepared, unit, row_)),
        tiles_(starts_ == nullptr ? 0 : unit.tiles) {
    if (tiles_ != 0) {
      const Places begin = StartsOf(__ffs(static_cast<int>(tiles_)) - 1);
#pragma unroll
      for (int row = 0; row < kRows; ++row) place_[row] = begin.elements[row];
    }
    LoadEnds();
    Load();
  }

  // Loads the entries of the next tile.
  __device__ __forceinline__ void Load() {
    int most = 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      // The complements that stand in the end are no places: nothing is left behind them.
      const uint32_t begin = static_cast<uint32_t>(place_[row] + left_[row]);
      place_[row] = static_cast<int>(Within(begin, int64_t{nse_} + 1)) + lane_;
      left_[row] = Clamp(after_.elements[row], ~nse_, nse_) - place_[row];
      if (left_[row] > most) most = left_[row];
    }
    LoadEnds();
    slots_ = 0;
#pragma unroll
    for (int j = 0; j <= kSlots; ++j) slots_ += __any_sync(kAllLanes, most > j * kOfRow) ? 1 : 0;
    // What was there before would stay in registers while it was written.
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) held_[row][j] = 0, scales_[row][j] = T();
    }
    const Index* column_indices = Columns();
    const T* scale_by = Scales();
    ForEach([&](int row, int j, int at) {
      held_[row][j] = static_cast<uint32_t>(column_indices[at]);
      if constexpr (kScaled) scales_[row][j] = scale_by[at];
    });
  }

  // Writes them; `product` is that of the tile.
  __device__ __forceinline__ void Write(uint32_t product, uint64_t* picked) {
    product += row_ * kPitch;
    // All sums are on their way, where the columns were, before the first one is written.
    ForEach([&](int row, int j, int) {
      held_[row][j] = __float_as_uint(SumAt(product, row, held_[row][j]));
    });
    if (slots_ > kSlots) WriteMore(product);
    Arrive(picked);
    Out* out = Result();
    ForEach([&](int row, int j, int at) {
      WriteSum(__uint_as_float(held_[row][j]), scales_[row][j], &out[at]);
    });
  }

  // Writes what tiles did not tell, entry by entry; called behind the last one.
  __device__ void WriteOthers(const SddmmProblem& p) {
    bool is_told = kComponents<T> == 1 || told_ == 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) is_told = is_told && place_[row] + left_[row] >= 0;
    if (!__any_sync(kAllLanes, !is_told)) return;
    __syncwarp();  // what other lanes have written is read
    const T* of_x = p.x.At<const T>(p.batch, unit_.entry);
    const T* of_y = p.y.At<const T>(p.batch, unit_.entry);
    const int of_lane = row_ % kSddmmWarpRows;
#pragma unroll 1
    for (int r = 0; r < kSddmmWarpRows; ++r) {
      const int64_t row = int64_t{unit_.first_row} + row_ - of_lane + r;
      if (row >= p.pattern.rows) break;
      const int32_t* starts = starts_ - of_lane + r;
      const int end = starts[unit_.count * kTileSize];
      const int begin = Clamp(starts[0], 0, nse_), behind = Clamp(end < 0 ? ~end : end, 0, nse_);
      const T* x = of_x + row * p.d;
#pragma unroll 1
      for (int i = begin + static_cast<int>(threadIdx.x % kWarp); i < behind; i += kWarp) {
        if (end >= 0) {
          const float before = ToAccumulator(Result()[i]);
          if (before - before == 0) continue;
        }
        const auto column = static_cast<int64_t>(Columns()[i]);
        if (static_cast<uint64_t>(column) >= p.pattern.columns) continue;
        const T* y = of_y + column * p.d;
        float sum = 0;
#pragma unroll 1
        for (int64_t d = 0; d < p.d; ++d) sum += ToAccumulator(x[d]) * ToAccumulator(y[d]);
        if constexpr (kScaled) sum *= ToAccumulator(Scales()[i]);
        FromAccumulator(sum, &Result()[i]);
      }
    }
  }

 private:
  __device__ const Index* Columns() const {
    return static_cast<const Index*>(unit_.column_indices);
  }
  __device__ const T* Scales() const { return static_cast<const T*>(unit_.scale_by); }
  __device__ Out* Result() const { return static_cast<Out*>(unit_.out); }

  __device__ __forceinline__ Places StartsOf(int tile) const {
    return LoadVector<kRows>(starts_ + tile * kTileSize, true);
  }

  // Of the next tile that has entries, and so of those before it.
  __device__ __forceinline__ void LoadEnds() {
    if (tiles_ != 0) after_ = StartsOf(__ffs(static_cast<int>(tiles_)));
    tiles_ &= tiles_ - 1;
  }

  // Calls with each entry that the lane has in registers.
  template <typename Function>
  __device__ __forceinline__ void ForEach(Function function) const {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (j >= slots_) continue;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (j * kOfRow < left_[row]) function(row, j, place_[row] + j * kOfRow);
      }
    }
  }

  __device__ __forceinline__ static float SumAt(uint32_t product, int row, uint32_t column) {
    return SharedAt<const float>(product + row * kPitch +
                                 column % kSddmmTensorColumns * sizeof(float));
  }
  __device__ __forceinline__ void WriteSum(float sum, T scale, Out* to) {
    if constexpr (kComponents<T> > 1) told_ += sum * 0.0f;
    if constexpr (kScaled) sum *= ToAccumulator(scale);
    FromAccumulator(sum, to);
  }

  // Writes the entries that lanes do not have in registers.
  __device__ void WriteMore(uint32_t product) {
    const Index* column_indices = Columns();
    const T* scale_by = Scales();
    Out* out = Result();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll 1
      for (int j = kSlots * kOfRow; j < left_[row]; j += kOfRow) {
        const int at = place_[row] + j;
        const float sum = SumAt(product, row, static_cast<uint32_t>(column_indices[at]));
        WriteSum(sum, kScaled ? scale_by[at] : T(), &out[at]);
      }
    }
  }
};

// Copies of tiles of y, in the order in which they are multiplied. Warps of pickers take turns.
template <typename T, int kInner>
class SddmmCopies {
  static constexpr int kBytes = SddmmStageBytes(kComponents<T>, kInner);
  static constexpr uint32_t kStages = SddmmStages(kComponents<T>, kInner);
  static_assert(kStages <= kSddmmWarps);
  uint32_t next_, queued_ = 0;  // the warp's next copy; how many there are in all

 public:
  __device__ explicit SddmmCopies(int warp) : next_(warp) {}

  // Queues those of a unit that are the warp's.
  __device__ __forceinline__ void Add(SddmmNotes& notes, const SddmmUnit& unit) {
    const uint32_t lane = threadIdx.x % kWarp;
    const uint32_t place = queued_ + __popc(unit.tiles & ((1u << lane) - 1));
    if ((unit.tiles >> lane & 1) != 0 && (place - next_) % kSddmmWarps == 0) {
      notes.queue[place % (2 * kSddmmUnitTiles)] = unit.tile_of_y + lane;
    }
    queued_ += __popc(unit.tiles);
    __syncwarp();
  }

  // Copies the next one, if it is queued and the warp has picked the tile that was in its stage.
  __device__ __forceinline__ void Copy(const SddmmProblem& p, SddmmNotes& notes,
                                       unsigned char* stages, uint32_t picked) {
    if (next_ >= queued_ || next_ >= picked + kStages) return;
    if (threadIdx.x % kWarp == 0) {
      const uint32_t stage = next_ % kStages;
      const int64_t tile = notes.queue[next_ % (2 * kSddmmUnitTiles)];
      WaitForPhase(&notes.empty[stage], next_ / kStages % 2 ^ 1);
      ArriveAndExpect(&notes.full[stage], kBytes);
      BulkCopy(stages + stage * kBytes, notes.components_of_y + tile * kBytes, kBytes,
               &notes.full[stage]);
    }
    next_ += kSddmmWarps;
  }
};

// Multiplies the tiles of a block's units, by its first threads.
template <typename T, int kInner>
__device__ __forceinline__ void MultiplyUnits(const SddmmProblem& p, SddmmNotes& notes,
                                              unsigned char* shared) {
  using TileY = BlockedTile<kSddmmTensorColumns, kInner>;
  constexpr int kStages = SddmmStages(kComponents<T>, kInner);
  constexpr int kStageBytes = SddmmStageBytes(kComponents<T>, kInner);
  static_assert(kStageBytes == kComponents<T> * TileY::kBytes && kStageBytes % 1024 == 0);
  using Rows = WarpgroupRows<T, kInner>;
  constexpr int kProductsAt = kStages * kStageBytes, kRowBytes = kSddmmProductPitch * 4;
  static_assert(Rows::kSpaceBytes <= kSddmmWarpRows * kRowBytes);
  const int warp = threadIdx.x / kWarp, group = WarpgroupOfBlock();
  const uint32_t stages = AddressOfShared(shared);
  const uint32_t products = stages + kProductsAt + group * (kSddmmTensorRows / 2 * kRowBytes);
  uint32_t number = 0;  // of a tile
#pragma unroll 1
  for (uint32_t units = 0;; ++units) {
    WaitForPhase(&notes.noted[units % 2], units / 2 % 2);
    const SddmmUnit& unit = notes.units[units % 2];
    int tiles = __popc(unit.tiles);
    if (tiles == 0) return;
    // Rows of x come where the next product will be.
    const uint32_t place = number % kSddmmProducts;
    WaitForPhase(&notes.picked[place][warp], number / kSddmmProducts % 2 ^ 1);
    Rows rows;
    rows.Load(
        p.x.At<const T>(p.batch, unit.entry), p.pattern.rows, p.d,
        int64_t{unit.first_row} + group * (kSddmmTensorRows / 2),
        shared + kProductsAt + place * kSddmmProductBytes + warp * kSddmmWarpRows * kRowBytes);
#pragma unroll 1
    for (; tiles > 0; --tiles, ++number) {
      WarpgroupProduct<T, kSddmmTensorColumns> product;
      const uint32_t stage = number % kStages, place = number % kSddmmProducts;
      WaitForPhase(&notes.full[stage], number / kStages % 2);
      // In a way that tells a compiler that all lanes agree.
      const uint32_t y = __shfl_sync(kAllLanes, stages + stage * kStageBytes, 0);
      product.template Add<TileY, false>(rows, y);
      Arrive(&notes.empty[stage]);
      WaitForPhase(&notes.picked[place][warp], number / kSddmmProducts % 2 ^ 1);
      const uint32_t to = products + place * kSddmmProductBytes;
      product.ForEachPair([&](int r, int c, float low, float high) {
        SharedAt<Vector<float, 2>>(to + r * kRowBytes + c * 4) = {{low, high}};
      });
      Arrive(&notes.computed[place][warp]);
    }
  }
}

// Picks the entries of a block's units, by its other threads.
template <typename T, typename Out, typename Index, int kInner, bool kScaled>
__device__ __forceinline__ void PickUnits(const SddmmProblem& p, SddmmNotes& notes,
                                          unsigned char* stages) {
  const uint32_t products = AddressOfShared(stages) + SddmmStages(kComponents<T>, kInner) *
                                                          SddmmStageBytes(kComponents<T>, kInner);
  const int warp = threadIdx.x / kWarp - kSddmmWarps;
  if (notes.prepared.own_starts > 0) WaitForKernelBefore();  // it finds starts
  SddmmScout<T, Out, Index> scout(p, notes);
  SddmmCopies<T, kInner> copies(warp);
  uint32_t picked = 0;  // tiles
  int slot = 0;
  // The unit before the first one is empty.
#pragma unroll 1
  for (int tiles = 0;; slot ^= 1) {
    const SddmmUnit next = scout.Note(slot);
    copies.Add(notes, next);
    WaitForKernelBefore();  // it writes components of y
    SampledRows<T, Out, Index, kScaled> entries(notes.prepared, notes.units[slot ^ 1],
                                                static_cast<int>(p.pattern.nse));
#pragma unroll 1
    while (true) {
      copies.Copy(p, notes, stages, picked);
      if (tiles == 0) break;
      const uint32_t place = picked % kSddmmProducts;
      WaitForPhase(&notes.computed[place][warp], picked / kSddmmProducts % 2);
      entries.Write(products + place * kSddmmProductBytes, &notes.picked[place][warp]);
      ++picked;
      --tiles;
      entries.Load();
    }
    entries.WriteOthers(p);
    tiles = __popc(next.tiles);
    if (tiles == 0) return;
  }
}

// Before SddmmTensorCores.
template <typename T, typename Index, int kInner>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocks)
    SddmmPrepare(const __grid_constant__ SddmmProblem p) {
  Prepare<T, Index, kInner>(PreparationOf<T, kInner>(p), p.batch, p.pattern, p.y, p.workspace);
}

// `kInner` is no less than d.
template <typename T, typename Out, typename Index, int kInner, bool kScaled>
__global__ void __launch_bounds__(kSddmmTensorThreads, 1)
    SddmmTensorCores(const __grid_constant__ SddmmProblem p) {
  constexpr int kStages = SddmmStages(kComponents<T>, kInner);
  constexpr int kNotesAt = SddmmSharedBytes(kComponents<T>, kInner) - kSddmmNotesBytes;
  extern __shared__ __align__(1024) unsigned char sddmm_shared[];
  SddmmNotes& notes = *reinterpret_cast<SddmmNotes*>(sddmm_shared + kNotesAt);
  // By several warps, as all wait for it.
  if (threadIdx.x < kSddmmWarps) {
    const int i = threadIdx.x;
    if (i < 2) InitBarrier(&notes.noted[i], 1);
    if (i < kStages) {
      InitBarrier(&notes.full[i], 1);
      InitBarrier(&notes.empty[i], kSddmmTensorRole);
    }
    for (int product = 0; product < kSddmmProducts; ++product) {
      InitBarrier(&notes.computed[product][i], kWarp);
      InitBarrier(&notes.picked[product][i], kWarp);
    }
    FenceShared();
  }
  if (threadIdx.x == kWarp) notes.schedule = SddmmSchedule(p);
  if (threadIdx.x == 2 * kWarp) {
    notes.prepared = PreparationOf<T, kInner>(p);
    notes.components_of_y = notes.prepared.ComponentsIn(p.workspace);
  }
  if (threadIdx.x == 3 * kWarp) notes.units[1] = {};
  __syncthreads();
  if (threadIdx.x < kSddmmTensorRole) {
    TakeRegisters<kRegistersToMultiply>();
    MultiplyUnits<T, kInner>(p, notes, sddmm_shared);
  } else {
    GiveUpRegisters<kRegistersToPick>();
    PickUnits<T, Out, Index, kInner, kScaled>(p, notes, sddmm_shared);
  }
}

}  // namespace jaxsparse
