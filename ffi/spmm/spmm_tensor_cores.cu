// The sparse-dense product on tensor cores: tile by tile the matrix is written out densely in
// shared memory, and multiplied there. A stored entry costs one store however many columns x has,
// where a product entry by entry reads a row of x for each; a position that is not stored costs
// what a tensor core takes for it. Products of float32 are as exact as in float32.
//
// A kernel before it splits x into planes of 16 bits (common/tensor_cores.cuh) and leaves them in
// the workspace, tile by tile as they are copied to shared memory. Half of a block's warps write
// tiles of the matrix out and have those of x copied, the others, two warpgroups, multiply: they
// share a ring of stages, take every other one, and in the end add up what they have.
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
#include "common/warpgroup.cuh"
#include "spmm/matrices.cuh"

namespace jaxsparse {

// Threads of a block: two warpgroups multiply, behind them come those that write entries, who leave
// registers to them.
constexpr int kMultipliers = kSpmmTensorRole, kWriters = kSpmmTensorRole;
constexpr int kRegistersToMultiply = 184, kRegistersToWrite = 72;
constexpr int kOfMultipliers = 1;  // the barrier at which they meet
constexpr int kGroups = 2;
static_assert(kMultipliers == kGroups * kWarpgroup);

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
  // `row` is row number `number` of the tile.
  __device__ __forceinline__ static void Write(uint32_t row, int number, uint32_t place, T value) {
    const uint32_t at = row + (place * 2 ^ number % 8 * 16);  // as OfRows::At
    uint32_t words[kPlanes<T>];
    SplitOne(value, words);
#pragma unroll
    for (int plane = 0; plane < kPlanes<T>; ++plane) {
      SharedAt<uint16_t>(at + plane * OfRows::kBytes) = static_cast<uint16_t>(words[plane]);
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
  __device__ __forceinline__ static void Write(uint32_t row, int, uint32_t place, float value) {
    SharedAt<float>(row + place * sizeof(float)) = value;
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
  static_assert(kStageBytes == SpmmTensorStageBytes(kPlanes<T>, kColumns));
  static_assert(kStageBytes % 1024 == 0 && kStages >= 3);
};

// Stages that writers fill and multipliers empty, in turn.
template <typename Shape>
class TileRing {
  uint64_t* full_;  // counts the writers' warps, and bytes of x
  uint64_t* empty_;
  RingPlace<Shape::kStages> stage_;

 public:
  __device__ explicit TileRing(unsigned char* counters)
      : full_(reinterpret_cast<uint64_t*>(counters)), empty_(full_ + Shape::kStages) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        InitBarrier(full_ + stage, kWriters / kWarp + 1);
        InitBarrier(empty_ + stage, kMultipliers / kWarp);
      }
      FenceShared();
    }
    __syncthreads();
  }

  __device__ __forceinline__ uint32_t Stage() const { return stage_.at * Shape::kStageBytes; }
  __device__ __forceinline__ void WaitUntilEmpty() {
    WaitForPhase(empty_ + stage_.at, stage_.odd ^ 1);
  }
  __device__ __forceinline__ void WaitUntilFull() { WaitForPhase(full_ + stage_.at, stage_.odd); }
  // By one thread.
  __device__ __forceinline__ void CopyX(unsigned char* stages, const char* planes) {
    ArriveAndExpect(full_ + stage_.at, Shape::kXBytes);
    BulkCopy(stages + Stage(), planes, Shape::kXBytes, full_ + stage_.at);
  }
  __device__ __forceinline__ void Filled() { ArriveAsWarp(full_ + stage_.at); }
  __device__ __forceinline__ void Emptied() { ArriveAsWarp(empty_ + stage_.at); }
  __device__ __forceinline__ void Next() { stage_.Advance(); }
};

// The entries of a tile's rows, in the order of their columns. Four lanes hold a row's next 16 or
// 32 in registers, each every fourth one, which were loaded while the tile before was written.
template <typename T, typename Index, bool kPermuted, typename TileA>
class EntriesOfRow {
  static constexpr int kLanes = kWriters / kSpmmTensorRows;
  static constexpr int kHalf = 4, kSlots = 2 * kHalf;  // entries of a lane
  static constexpr int kNone = -1;                     // no column
  const T* stored_values_;
  const Index* column_indices_;
  const int32_t* permutation_;
  bool can_overrun_;        // all rows can be read on beyond their ends: no lane has to look
  int number_, lane_;       // of the row in the tile, and the lane's of the row
  int next_ = 0, end_ = 0;  // of the row's entries: the first one that is not written, their end
  const char* ahead_;       // what the lane has brought nearer, of entry 0, and in bytes an entry
  int step_;
  int held_ = 0;   // entries of a row that lanes hold, from there on: of all rows as many
  int taken_ = 0;  // of the row by the last tile
  int columns_[kSlots];
  int places_[kSlots];  // of values, if permuted
  T values_[kSlots];

  // Calls with the place of each entry that the lane has to load.
  template <int kFirst, typename Function>
  __device__ __forceinline__ void ForHalf(Function function) const {
    const int first = next_ + lane_ + kFirst * kLanes;
    if (can_overrun_) {
#pragma unroll
      for (int j = 0; j < kHalf; ++j) function(kFirst + j, first + j * kLanes);
    } else {
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
        if (first + j * kLanes < end_) function(kFirst + j, first + j * kLanes);
      }
    }
  }
  template <int kFirst>
  __device__ __forceinline__ void LoadHalf() {
    ForHalf<kFirst>([&](int j, int at) {
      columns_[j] = static_cast<int>(column_indices_[at]);
      if constexpr (kPermuted) places_[j] = permutation_[at];
      else values_[j] = stored_values_[at];
    });
  }

  // Writes those entries of a half that lie in the tile's columns, from `first` on; how many the
  // lane has; none, if its row is not `open`. `before` is the column of the entry in front of a
  // row's first one. `rises` becomes false if one does not stand behind the one before it.
  template <int kFirst>
  __device__ __forceinline__ int ScatterHalf(uint32_t row, int first, bool open, int* before,
                                             bool* rises) const {
    const int lane = threadIdx.x % kWarp, stored = open ? end_ - next_ - lane_ : 0;
    int taken = 0;
#pragma unroll
    for (int j = kFirst; j < kFirst + kHalf; ++j) {
      const auto place = static_cast<uint32_t>(columns_[j]) - static_cast<uint32_t>(first);
      const bool inside = place < kSpmmTensorInner && j * kLanes < stored;
      // The lane's neighbour has the entry before; of the row's first lane that was its last one.
      const int left = __shfl_sync(kAllLanes, columns_[j],
                                   lane / kLanes * kLanes + (lane + kLanes - 1) % kLanes);
      *rises = *rises && (!inside || columns_[j] > (lane_ == 0 ? *before : left));
      *before = left;
      if (inside) TileA::Write(row, number_, place, values_[j]);
      taken += inside;
    }
    return taken;
  }

 public:
  template <typename M>
  __device__ __forceinline__ EntriesOfRow(const M& m, const SpmmProblem& p, int64_t first_row,
                                          int number, int lane)
      : stored_values_(m.values),
        column_indices_(m.column_indices),
        permutation_(m.permutation),
        number_(number),
        lane_(lane) {
    const int64_t row = first_row + number;
    if (row < p.pattern.rows) {
      const RowBounds bounds(m.row_offsets, row, p.pattern.nse);
      next_ = static_cast<int>(bounds.begin);
      end_ = static_cast<int>(bounds.end < bounds.begin ? bounds.begin : bounds.end);
    }
    // Half of the lanes care for columns, the others for values or where these are, as far as 64
    // and 128 entries behind the next one.
    constexpr int kAhead = 64;
    const void* arrays[2] = {m.column_indices, m.values};
    if constexpr (kPermuted) arrays[1] = m.permutation;
    const int sizes[2] = {sizeof(Index), kPermuted ? 4 : sizeof(T)};
    step_ = lane % 2 == 0 ? sizes[0] : sizes[1];
    ahead_ = static_cast<const char*>(lane % 2 == 0 ? arrays[0] : arrays[1]) +
             (1 + lane / 2) * kAhead * step_;
    can_overrun_ = !__any_sync(kAllLanes, end_ + (kLanes / 2 + 1) * kAhead > p.pattern.nse);
  }

  // Loads what the next tile may have: more than 16 entries of a row only where so many may come,
  // as many as the last time and half as many again.
  __device__ __forceinline__ void Load() {
    constexpr int kFew = kLanes * kHalf;
    if (can_overrun_) Prefetch(ahead_ + int64_t{next_} * step_);
    LoadHalf<0>();
    held_ = kFew;
    if (__any_sync(kAllLanes, taken_ + taken_ / 2 + 2 > kFew)) {
      LoadHalf<kHalf>();
      held_ = 2 * kFew;
    }
  }
  // What has to wait for that.
  __device__ __forceinline__ void LoadPermuted() {
    if constexpr (kPermuted) {
      const auto load = [&](int j, int at) { values_[j] = stored_values_[places_[j]]; };
      ForHalf<0>(load);
      if (held_ > kLanes * kHalf) ForHalf<kHalf>(load);
    }
  }

  // Writes the row's numbers in columns `first` to first + kSpmmTensorInner, which are 0 yet.
  // `ordered` becomes false if a column stands twice, or behind a higher one.
  __device__ __forceinline__ void Write(uint32_t row, int first, bool* ordered) {
    taken_ = 0;
    int before = kNone;
    bool open = true;  // entries may come: else some that are out of order would count twice
    while (true) {
      int taken = ScatterHalf<0>(row, first, open, &before, ordered);
      const auto place = static_cast<uint32_t>(columns_[kHalf]) - static_cast<uint32_t>(first);
      if (held_ > kLanes * kHalf && __any_sync(kAllLanes, place < kSpmmTensorInner || !*ordered)) {
        taken += ScatterHalf<kHalf>(row, first, open, &before, ordered);
      }
#pragma unroll
      for (int distance = 1; distance < kLanes; distance *= 2) {
        taken += __shfl_xor_sync(kAllLanes, taken, distance);
      }
      next_ += taken;
      taken_ += taken;
      // All that lanes hold of a row lies in the tile: more may.
      open = taken == held_ && next_ < end_;
      if (!__any_sync(kAllLanes, open)) return;
      Load();
      LoadPermuted();
    }
  }

  // Whether all entries of the row have been written: if not, some stood behind higher columns.
  __device__ __forceinline__ bool AllWritten() const { return next_ >= end_; }
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

// Writes the entries of a tile of the result to the stages, and has its planes of x copied there.
// Returns whether the entries were in order.
template <typename T, typename Out, typename Index, int kColumns, bool kPermuted, typename Shape>
__device__ __forceinline__ bool WriteStages(const SpmmProblem& p, const ResultTile<kColumns>& tile,
                                            unsigned char* stages, TileRing<Shape>& ring) {
  using TileA = typename Shape::TileA;
  constexpr int kLanes = kWriters / kSpmmTensorRows, kRows = kWarp / kLanes;
  const Matrices<T, Out, Index> m(p, tile.entry);
  const PlaneTiles planes(p.pattern.columns, p.n, kColumns, kPlanes<T>);
  const int64_t of_x = p.pattern.columns * p.n;
  const int64_t own = of_x == 0 ? 0 : (m.x - static_cast<const T*>(p.x.data)) / of_x;
  const char* x = p.workspace.data + own * planes.Bytes() +
                  tile.first_column / kColumns * planes.down * planes.tile_bytes;
  const int writer = threadIdx.x - kMultipliers, row = writer / kLanes, steps = StepsOf(p);
  EntriesOfRow<T, Index, kPermuted, TileA> entries(m, p, tile.first_row, row, writer % kLanes);
  bool ordered = true;
  entries.Load();
  for (int step = 0; step < steps; ++step, ring.Next()) {
    entries.LoadPermuted();
    ring.WaitUntilEmpty();
    if (writer == 0) ring.CopyX(stages, x + step * planes.tile_bytes);
    const uint32_t to = AddressOfShared(stages) + ring.Stage() + Shape::kXBytes;
    TileA::template Clear<kRows>(to, writer / kWarp * kRows);
    __syncwarp();
    entries.Write(to + row * TileA::kRowBytes, step * kSpmmTensorInner, &ordered);
    ring.Filled();
    entries.Load();
  }
  return ordered && entries.AllWritten();
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

// Before SpmmTensorCores: writes the planes of x to the workspace.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kPlanesThreads)
    SpmmPlanes(const __grid_constant__ SpmmProblem p) {
  static_assert(kPlaneLines == kSpmmTensorInner);
  WritePlanes<T, kColumns>(p.batch, p.x, p.pattern.columns, p.n, p.workspace);
}

template <typename T, typename Out, typename Index, int kColumns, bool kPermuted>
__global__ void __launch_bounds__(kSpmmTensorThreads, 1)
    SpmmTensorCores(const __grid_constant__ SpmmProblem p) {
  using Shape = SpmmTensorShape<T, kColumns>;
  using Tile = ResultTile<kColumns>;
  extern __shared__ __align__(1024) unsigned char spmm_stages[];
  TileRing<Shape> ring(spmm_stages + Shape::kCountersAt);
  const int64_t tiles = Tile::Count(p);
  if (threadIdx.x >= kMultipliers) {
    GiveUpRegisters<kRegistersToWrite>();
    for (int64_t t = blockIdx.x; t < tiles; t += gridDim.x) {
      const bool ordered =
          WriteStages<T, Out, Index, kColumns, kPermuted>(p, Tile(p, t), spmm_stages, ring);
      AnyAt<kSpmmTensorThreads>(kAllThreads, !ordered);
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
    const bool exact = !AnyAt<kSpmmTensorThreads>(kAllThreads, !(not_finite == 0));
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
