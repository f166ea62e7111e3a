// The sparse-dense product on tensor cores: tile by tile the matrix is written out densely in
// shared memory, and multiplied there. A stored entry costs one store however many columns x has,
// where a product entry by entry reads a row of x for each; a position that is not stored costs
// what a tensor core takes for it. Products of float32 are as exact as in float32.
//
// A kernel before it splits x into planes of 16 bits (common/tensor_cores.cuh) and leaves them in
// the workspace, tile by tile as they are copied to shared memory; and it finds out where the
// entries of each row in each tile begin. Half of a block's warps write tiles of the matrix out and
// have those of x copied, the others, two warpgroups, multiply: they share a ring of stages, take
// every other one, and in the end add up what they have.
//
// A number that is infinite or NaN, or too large for a plane, makes sums that are not finite: zeros
// of the tile meet a NaN of x. These, and columns that are not in order or stand twice, make the
// block compute its part of the result entry by entry instead.
//
// Floors: 6 * rows * columns * n multiply-adds of tensor cores in float32, a sixth of them in 16
// bits, of which a multiprocessor does 2,048 a clock. From shared memory at 128 bytes a clock, for
// a tile of 64 x 64 and 128 columns in float32: 96 KB that tensor cores read of x and 48 that are
// copied of it, 24 each to clear and to read the tile, and the entries. From memory the entries, x
// and the result, once each; from L2 x as often as there are tiles down the result.
#include "common/prepare.cuh"
#include "spmm/matrices.cuh"

namespace jaxsparse {

// Threads of a block: two warpgroups multiply, behind them come those that write entries, who leave
// registers to them.
constexpr int kMultipliers = kSpmmTensorRole, kWriters = kSpmmTensorRole;
constexpr int kRegistersToMultiply = 160, kRegistersToWrite = 96;
constexpr int kOfMultipliers = 1;  // the barrier at which they meet
constexpr int kGroups = 2;
static_assert(kMultipliers == kGroups * kWarpgroup);
constexpr int kWriterRows = kSpmmTensorRows / (kWriters / kWarp);  // of a warp

// Writes zeros over what a warp has to itself.
template <int kBytes>
__device__ __forceinline__ void ClearBytes(uint32_t from) {
  using Zeros = Packet<uint32_t, 4>;
#pragma unroll
  for (int at = 0; at < kBytes; at += kWarp * sizeof(Zeros)) {
    const int mine = at + static_cast<int>(threadIdx.x % kWarp * sizeof(Zeros));
    if (mine < kBytes) SharedAt<Zeros>(from + mine) = {};
  }
}

// A tile of the matrix in planes, in which a number takes a store for each.
template <typename T, bool kInPlanes>
struct MatrixTile {
  using OfRows = Plane<kSpmmTensorRows, kSpmmTensorInner>;
  static constexpr int kBytes = kPlanes<T> * OfRows::kBytes;
  static constexpr int kRowBytes = kSpmmTensorInner * 2;

  // Writes zeros over kRows rows of a warp.
  template <int kRows>
  __device__ __forceinline__ static void Clear(uint32_t tile, int row) {
#pragma unroll
    for (int plane = 0; plane < kPlanes<T>; ++plane) {
      ClearBytes<kRows * kRowBytes>(tile + plane * OfRows::kBytes + row * kRowBytes);
    }
  }
  // `row` is row number `number` of the tile. Only what is stored depends on the condition, for
  // which no branch is taken: those took 1.4 times as long.
  __device__ __forceinline__ static void WriteIf(bool condition, uint32_t row, int number,
                                                 uint32_t column, T value) {
    const uint32_t place = column % kSpmmTensorInner * 2;
    const uint32_t at = row + (place ^ number % 8 * 16);  // as OfRows::At
    uint32_t words[kPlanes<T>];
    SplitOne(value, words);
#pragma unroll
    for (int plane = 0; plane < kPlanes<T>; ++plane) {
      StoreSharedIf(condition, at + plane * OfRows::kBytes, static_cast<uint16_t>(words[plane]));
    }
  }
};

// One of float32 as it is.
template <>
struct MatrixTile<float, false> {
  using OfRows = PlainTile<float, kSpmmTensorRows, kSpmmTensorInner>;
  static constexpr int kBytes = OfRows::kBytes, kRowBytes = OfRows::kRowBytes;
  static_assert(OfRows::kPitch == kSpmmTensorPitch);

  template <int kRows>
  __device__ __forceinline__ static void Clear(uint32_t tile, int row) {
    ClearBytes<kRows * kRowBytes>(tile + row * kRowBytes);
  }
  __device__ __forceinline__ static void WriteIf(bool condition, uint32_t row, int, uint32_t column,
                                                 float value) {
    StoreSharedIf(condition, row + column % kSpmmTensorInner * sizeof(float), value);
  }
};

template <typename T, int kColumns>
struct SpmmTensorShape {
  static constexpr bool kWritesPlanes = SpmmWritesPlanes(kPlanes<T>, kColumns);
  using TileA = MatrixTile<T, kWritesPlanes>;
  using PlaneX = BlockPlane<kSpmmTensorInner, kColumns>;
  static constexpr int kXBytes = kPlanes<T> * PlaneX::kBytes;
  static constexpr int kStageBytes = kXBytes + TileA::kBytes;
  static constexpr int kStages = SpmmTensorStages(kStageBytes);
  static constexpr int kCountersAt = kStages * kStageBytes;
  static constexpr int kFlagAt = kCountersAt + kStages * kSpmmCounterBytes;
  static_assert(kStageBytes == SpmmTensorStageBytes(kPlanes<T>, kColumns));
  static_assert(kStageBytes % 1024 == 0 && kStages >= 3);
};

// Stages that writers fill and multipliers empty, in turn.
template <typename Shape>
class TileRing {
  uint64_t* full_;  // counts writers, one more time who has x copied, and bytes of it
  uint64_t* empty_;
  uint32_t stage_ = 0, odd_ = 0;  // the phase that its barriers are in

 public:
  __device__ explicit TileRing(unsigned char* counters)
      : full_(reinterpret_cast<uint64_t*>(counters)), empty_(full_ + Shape::kStages) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        InitBarrier(full_ + stage, kWriters + 1);
        InitBarrier(empty_ + stage, kMultipliers);
      }
      FenceShared();
    }
    __syncthreads();
  }

  __device__ __forceinline__ uint32_t Stage() const { return stage_ * Shape::kStageBytes; }
  __device__ __forceinline__ void WaitUntilEmpty() { WaitForPhase(empty_ + stage_, odd_ ^ 1); }
  __device__ __forceinline__ void WaitUntilFull() { WaitForPhase(full_ + stage_, odd_); }
  // By one thread.
  __device__ __forceinline__ void CopyX(unsigned char* stages, const char* planes) {
    ArriveAndExpect(full_ + stage_, Shape::kXBytes);
    BulkCopy(stages + Stage(), planes, Shape::kXBytes, full_ + stage_);
  }
  __device__ __forceinline__ void Filled() { Arrive(full_ + stage_); }
  __device__ __forceinline__ void Emptied() { Arrive(empty_ + stage_); }
  __device__ __forceinline__ void Next() {
    if (++stage_ == Shape::kStages) {
      stage_ = 0;
      odd_ ^= 1;
    }
  }
};

// Tells all of a block whether anything went wrong in a tile of the result.
class TileFlag {
  int* flags_;  // of this tile and of the one before or behind it
  int turn_ = 0;

 public:
  __device__ explicit TileFlag(unsigned char* flags) : flags_(reinterpret_cast<int*>(flags)) {
    if (threadIdx.x == 0) flags_[0] = flags_[1] = 0;
    __syncthreads();
  }

  // Called by all threads at the end of a tile, before they meet; between that and their next
  // meeting; and behind that, there.
  __device__ __forceinline__ void Raise(bool wrong) {
    if (wrong) flags_[turn_] = 1;
  }
  __device__ __forceinline__ bool IsRaised() const { return flags_[turn_] != 0; }
  __device__ __forceinline__ void Next() {
    turn_ ^= 1;
    if (threadIdx.x == 0) flags_[turn_] = 0;
  }
};

// The entries of a warp's rows in one tile after another. Four lanes have a row, and hold up to 32
// of its entries in a tile in registers, each every fourth one, from when the tile but one before
// it has been written. Of rows that have more, all lanes take the others, one each.
template <typename T, typename Index, bool kPermuted, typename TileA>
class EntriesOfRows {
  static constexpr int kOfRow = kWarp / kWriterRows;
  static constexpr int kSlots = 8, kHeld = kSlots * kOfRow;
  static constexpr int kAhead = 64;  // entries, that lines are brought nearer at a time
  static constexpr int kLongRows = kPermuted ? 1 : 4;  // whose other entries are loaded at once
  static_assert(kHeld + kWarp == kTileSize);
  const T* stored_values_;
  const Index* column_indices_;
  const int32_t* permutation_;
  int last_;               // of all that are stored
  int lane_;               // of a row
  int row_;                // the lane's, of the warp's
  const int32_t* starts_;  // behind those of the tile that `next_` is the end of
  int left_;               // tiles there
  int end_ = 0, next_ = 0;

 public:
  struct Held {
    int begin, count;  // of the row's entries in the tile
    int most;          // that any of the warp's rows has
    int columns[kSlots];
    int places[kSlots];  // of values, if permuted
    T values[kSlots];
  };

  // `starts` are those of the warp's first row.
  template <typename M>
  __device__ __forceinline__ EntriesOfRows(const M& m, const SpmmProblem& p, const int32_t* starts)
      : stored_values_(m.values),
        column_indices_(m.column_indices),
        permutation_(m.permutation),
        last_(static_cast<int>(p.pattern.nse) - 1),
        lane_(threadIdx.x % kOfRow),
        row_(threadIdx.x % kWarp / kOfRow),
        starts_(starts + row_),
        left_(static_cast<int>(CeilDivide(p.pattern.columns, kTileSize)) + 1) {
    TakeStart();  // the first one
    TakeStart();
  }

  // Loads what the next tile has, if there is one. Half of the lanes of a row bring columns nearer,
  // the others values or where these are.
  __device__ __forceinline__ void Load(Held& held) {
    if (left_ < 0) return;
    held.begin = end_;
    TakeStart();
    held.count = end_ - held.begin;
    held.most = __reduce_max_sync(kAllLanes, held.count);
    const int first = held.begin + lane_;
    const Index* columns = column_indices_ + first;
    ForEach(held, [&](int j, bool stored) {
      // What would keep its value if nothing is loaded would take a register for the whole loop.
      if constexpr (kPermuted) held.places[j] = 0;
      if (!stored) return;
      held.columns[j] = static_cast<int>(columns[j * kOfRow]);
      if constexpr (kPermuted) held.places[j] = (permutation_ + first)[j * kOfRow];
      else held.values[j] = (stored_values_ + first)[j * kOfRow];
    });
    int ahead = held.begin + (1 + lane_ / 2) * kAhead;
    if (ahead > last_) ahead = last_;
    if (ahead < 0) return;
    if (lane_ % 2 == 0) Prefetch(column_indices_ + ahead);
    else if constexpr (kPermuted) Prefetch(permutation_ + ahead);
    else Prefetch(stored_values_ + ahead);
  }
  // What has to wait for that.
  __device__ __forceinline__ void LoadPermuted(Held& held) const {
    if constexpr (kPermuted) {
      ForEach(held, [&](int j, bool stored) {
        held.values[j] = {};
        if (stored) held.values[j] = stored_values_[held.places[j]];
      });
    }
  }

  // Writes the entries to the tile from the warp's first row on, where all is 0 yet.
  __device__ __forceinline__ void Write(const Held& held, uint32_t tile) const {
    if (held.most <= kHeld) {
      WriteHeld(held, tile);
      return;
    }
    unsigned rows = __ballot_sync(kAllLanes, lane_ == 0 && held.count > kHeld);
    LongRows long_rows(*this, held, rows);
    WriteHeld(held, tile);
    while (true) {
      long_rows.Write(tile);
      if (rows == 0) return;
      long_rows = LongRows(*this, held, rows);
    }
  }

  // Whether columns rise, at the last tile.
  __device__ __forceinline__ bool IsOrdered() const { return end_ >= 0; }

 private:
  // Of some rows the entries that their lanes do not hold.
  struct LongRows {
    int rows[kLongRows];
    bool stored[kLongRows];
    int columns[kLongRows];
    T values[kLongRows];

    // `left`: a bit for the first lane of each row, which is cleared when it is taken.
    __device__ __forceinline__ LongRows(const EntriesOfRows& entries, const Held& held,
                                        unsigned& left) {
      const int lane = threadIdx.x % kWarp;
#pragma unroll
      for (int r = 0; r < kLongRows; ++r) {
        const int from = left == 0 ? 0 : __ffs(static_cast<int>(left)) - 1;
        const int at = __shfl_sync(kAllLanes, held.begin, from) + kHeld + lane;
        const int count = __shfl_sync(kAllLanes, held.count, from);
        rows[r] = from / kOfRow;
        stored[r] = left != 0 && kHeld + lane < count;
        columns[r] = 0;
        values[r] = {};
        left &= left - 1;
        if (!stored[r]) continue;
        columns[r] = static_cast<int>(entries.column_indices_[at]);
        values[r] = entries.stored_values_[kPermuted ? entries.permutation_[at] : at];
      }
    }
    __device__ __forceinline__ void Write(uint32_t tile) const {
#pragma unroll
      for (int r = 0; r < kLongRows; ++r) {
        TileA::WriteIf(stored[r], tile + rows[r] * TileA::kRowBytes, rows[r], columns[r],
                       values[r]);
      }
    }
  };

  // Takes the start of the next tile but one, which is not waited for before that one is next.
  __device__ __forceinline__ void TakeStart() {
    end_ = next_;
    if (left_ > 0) next_ = *starts_;
    starts_ += kTileSize;
    --left_;
  }

  // Calls with each of the lane's slots that the warp has entries for, and whether the lane has.
  template <typename Function>
  __device__ __forceinline__ void ForEach(const Held& held, Function function) const {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (j % 2 == 0 && held.most <= j * kOfRow) return;  // fewer branches than slots
      function(j, j * kOfRow < held.count - lane_);
    }
  }
  __device__ __forceinline__ void WriteHeld(const Held& held, uint32_t tile) const {
    ForEach(held, [&](int j, bool stored) {
      TileA::WriteIf(stored, tile + row_ * TileA::kRowBytes, row_, held.columns[j], held.values[j]);
    });
  }
};

// A tile of the result entry by entry, by the multipliers: any numbers, in any order.
template <int kColumns, typename T, typename M>
__device__ void MultiplyEntryByEntry(const SpmmProblem& p, const M& m, int64_t first_row,
                                     int64_t first_column) {
  const int lane = threadIdx.x % kWarp;
  for (int r = threadIdx.x / kWarp; r < kSpmmTensorRows; r += kMultipliers / kWarp) {
    const int64_t row = first_row + r;
    if (row >= p.pattern.rows) break;
    const RowBounds bounds(m.row_offsets, row, p.pattern.nse);
    for (int64_t c = first_column + lane; c < first_column + kColumns && c < p.n; c += kWarp) {
      Accumulator<T> sum = 0;
      for (int64_t i = bounds.begin; i < bounds.end; ++i) {
        sum += m.Value(i) * ToAccumulator(m.x[m.column_indices[i] * p.n + c]);
      }
      m.Write(p.activation, row, row * p.n + c, sum);
    }
  }
}

// A tile of the result.
template <int kColumns>
struct ResultTile {
  int64_t entry, first_row, first_column;

  __device__ ResultTile(const SpmmProblem& p, int64_t tile) {
    const int64_t down = CeilDivide(p.pattern.rows, kSpmmTensorRows);
    const int64_t across = CeilDivide(p.n, kColumns);
    entry = tile / (down * across);
    first_row = tile / across % down * kSpmmTensorRows;
    first_column = tile % across * kColumns;
  }
  __device__ static int64_t Count(const SpmmProblem& p) {
    return p.batch.count * CeilDivide(p.pattern.rows, kSpmmTensorRows) * CeilDivide(p.n, kColumns);
  }
};

__device__ inline int StepsOf(const SpmmProblem& p) {
  return static_cast<int>(CeilDivide(p.pattern.columns, kSpmmTensorInner));
}

template <typename T, int kColumns>
__device__ __forceinline__ Preparation PreparationOf(const SpmmProblem& p) {
  return Preparation(p.batch, p.pattern, p.x, p.n, kColumns, kPlanes<T>);
}

// Writes the entries of a tile of the result to the stages, and has its planes of x copied there.
// Returns whether the entries were in order.
template <typename T, typename Out, typename Index, int kColumns, bool kPermuted, typename Shape>
__device__ __forceinline__ bool WriteStages(const SpmmProblem& p, const ResultTile<kColumns>& tile,
                                            unsigned char* stages, TileRing<Shape>& ring) {
  using TileA = typename Shape::TileA;
  const Matrices<T, Out, Index> m(p, tile.entry);
  const Preparation prepared = PreparationOf<T, kColumns>(p);
  const PlaneTiles& planes = prepared.planes;
  const int64_t own_x = OwnEntry(p.batch, p.x, tile.entry);
  const char* x = prepared.PlanesIn(p.workspace) + own_x * planes.Bytes() +
                  tile.first_column / kColumns * planes.down * planes.tile_bytes;
  const int64_t own = OwnEntry(p.batch, p.pattern.row_offsets, tile.entry);
  const int32_t* starts =
      prepared.StartsIn(p.workspace) + prepared.starts.At(own, tile.first_row / kTileSize);
  using Entries = EntriesOfRows<T, Index, kPermuted, TileA>;
  const int writer = threadIdx.x - kMultipliers, steps = StepsOf(p);
  const int first_row = writer / kWarp * kWriterRows;
  Entries entries(m, p, starts + first_row);
  const auto write = [&](int step, auto& held, auto& next) {
    entries.LoadPermuted(next);
    ring.WaitUntilEmpty();
    if (writer == 0) ring.CopyX(stages, x + step * planes.tile_bytes);
    const uint32_t tile = AddressOfShared(stages) + ring.Stage() + Shape::kXBytes;
    TileA::template Clear<kWriterRows>(tile, first_row);
    __syncwarp();
    entries.Write(held, tile + first_row * TileA::kRowBytes);
    ring.Filled();
    ring.Next();
    entries.Load(held);
  };
  typename Entries::Held held[2] = {};
  entries.Load(held[0]);
  entries.Load(held[1]);
  entries.LoadPermuted(held[0]);
#pragma unroll 1
  for (int step = 0; step < steps; step += 2) {
    write(step, held[0], held[1]);
    if (step + 1 < steps) write(step + 1, held[1], held[0]);
  }
  return entries.IsOrdered();
}

// Multiplies what is in a warpgroup's stages of a tile of the result.
template <typename Product, typename Shape>
__device__ __forceinline__ void MultiplyStages(const SpmmProblem& p, unsigned char* stages,
                                               int group, TileRing<Shape>& ring, Product& product) {
  const int steps = StepsOf(p);
  for (int step = 0; step < steps; ++step, ring.Next()) {
    // Of the other one's stages, too: who left phases out could take a later one for its own.
    ring.WaitUntilFull();
    if (step % kGroups == group) {
      const uint32_t stage = AddressOfShared(stages) + ring.Stage();
      using OfRows = typename Shape::TileA::OfRows;
      if constexpr (Shape::kWritesPlanes) {
        product.template AddPlanes<OfRows, kSpmmTensorInner, typename Shape::PlaneX, true>(
            stages + ring.Stage() + Shape::kXBytes, stage);
      } else {
        product.template Add<OfRows::kPitch, kSpmmTensorInner, typename Shape::PlaneX, true>(
            stage + Shape::kXBytes, stage);
      }
    }
    ring.Emptied();
  }
}

// What the warpgroups have of a tile, in stages that are empty: a few instructions write it out
// from there, where one copy of the epilogue for each register took longer than the product, as
// instructions come from memory.
template <int kColumns>
struct SumTiles {
  static constexpr int kPitch =
      kColumns + 8;  // so that rows which a warp writes lie in other banks
  static constexpr int kBytes = kSpmmTensorRows * kPitch * sizeof(float);  // of a warpgroup
};

template <typename T, typename Out, typename Index, int kColumns>
__device__ __forceinline__ void WriteTile(const SpmmProblem& p, const ResultTile<kColumns>& tile,
                                          uint32_t sums) {
  using Sums = SumTiles<kColumns>;
  constexpr int kRun = 4, kRuns = kColumns / kRun;
  const Matrices<T, Out, Index> m(p, tile.entry);
#pragma unroll 1
  for (int i = threadIdx.x; i < kSpmmTensorRows * kRuns; i += kMultipliers) {
    const int64_t row = tile.first_row + i / kRuns, first = tile.first_column + i % kRuns * kRun;
    if (row >= p.pattern.rows || first >= p.n) continue;
    const uint32_t at = sums + (i / kRuns * Sums::kPitch + i % kRuns * kRun) * sizeof(float);
    const auto one = SharedAt<const Packet<float, kRun>>(at);
    const auto other = SharedAt<const Packet<float, kRun>>(at + Sums::kBytes);
    float z[kRun];
#pragma unroll
    for (int c = 0; c < kRun; ++c) z[c] = one.elements[c] + other.elements[c];
    if (first + kRun <= p.n) {
      m.WriteRun(p.activation, row, row * p.n + first, z);
    } else {
#pragma unroll
      for (int c = 0; c < kRun; ++c) {
        if (first + c < p.n) m.Write(p.activation, row, row * p.n + first + c, z[c]);
      }
    }
  }
}

// Before SpmmTensorCores.
template <typename T, typename Index, int kColumns>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocks)
    SpmmPrepare(const __grid_constant__ SpmmProblem p) {
  Prepare<T, Index, kColumns>(PreparationOf<T, kColumns>(p), p.batch, p.pattern, p.x, p.workspace);
}

template <typename T, typename Out, typename Index, int kColumns, bool kPermuted>
__global__ void __launch_bounds__(kSpmmTensorThreads, 1)
    SpmmTensorCores(const __grid_constant__ SpmmProblem p) {
  using Shape = SpmmTensorShape<T, kColumns>;
  using Tile = ResultTile<kColumns>;
  extern __shared__ __align__(1024) unsigned char spmm_stages[];
  TileRing<Shape> ring(spmm_stages + Shape::kCountersAt);
  TileFlag inexact(spmm_stages + Shape::kFlagAt);
  const int64_t tiles = Tile::Count(p);
  if (threadIdx.x >= kMultipliers) {
    GiveUpRegisters<kRegistersToWrite>();
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
      const bool ordered =
          WriteStages<T, Out, Index, kColumns, kPermuted>(p, Tile(p, t), spmm_stages, ring);
      inexact.Raise(!ordered);
      WaitAt<kSpmmTensorThreads>(kAllThreads);
      inexact.Next();
      WaitAt<kSpmmTensorThreads>(kAllThreads);
    }
    return;
  }
  TakeRegisters<kRegistersToMultiply>();
  const int group = WarpgroupOfBlock();
  for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    WarpgroupProduct<T, kColumns> product;
    MultiplyStages(p, spmm_stages, group, ring, product);
    using Sums = SumTiles<kColumns>;
    static_assert(kGroups * Sums::kBytes <= Shape::kCountersAt);
    float not_finite = 0;  // NaN, if a sum is not
    product.ForEachPair([&](int, int, float low, float high) {
      not_finite += low * 0.0f;
      not_finite += high * 0.0f;
    });
    inexact.Raise(!(not_finite == 0));
    WaitAt<kSpmmTensorThreads>(kAllThreads);
    const bool exact = !inexact.IsRaised();
    inexact.Next();
    const Tile tile(p, t);
    if (exact) {
      const uint32_t sums = AddressOfShared(spmm_stages);
      product.ForEachPair([&](int r, int c, float low, float high) {
        SharedAt<Packet<float, 2>>(sums + group * Sums::kBytes +
                                   (r * Sums::kPitch + c) * sizeof(float)) = {{low, high}};
      });
      WaitAt<kMultipliers>(kOfMultipliers);
      WriteTile<T, Out, Index>(p, tile, sums);
      FenceShared();  // copies of x are written there next
    } else {
      MultiplyEntryByEntry<kColumns, T>(p, Matrices<T, Out, Index>(p, tile.entry), tile.first_row,
                                        tile.first_column);
    }
    WaitAt<kSpmmTensorThreads>(kAllThreads);
  }
}

}  // namespace jaxsparse
