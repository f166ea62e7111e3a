// The sparse-dense product on tensor cores: tile by tile the matrix is written out densely in
// shared memory, and multiplied there. A stored entry costs one store however many columns x has,
// where a product entry by entry reads a row of x for each; a position that is not stored costs
// what a tensor core takes for it. Products of float32 are as exact as in float32.
//
// A kernel before it splits x into components of 16 bits (cuda/tensor_cores.cuh) and leaves them in
// the workspace, tile by tile as they are copied to shared memory, unless x has 16 bits, and tensor
// maps can copy its tiles as they are; and it finds out where the entries of each row in each tile
// begin, unless that is given with the pattern. This one begins meanwhile. Some of a block's
// warps write tiles of the matrix out and have those of x copied, the others, two warpgroups,
// multiply, each half of the inner places of a tile: all share a ring of stages, and in the end the
// warpgroups add up what they have. Who writes waits for its instructions more than for memory:
// hence two teams, if registers allow, and what saves instructions there.
//
// A transposed product reads the matrix as it is stored, by rows, and writes these as columns of
// the tiles: its entries never have to be looked up one by one. Where tiles of the result are few,
// several blocks share one, each with its part of the inner places, and the last to be done adds up
// what they have left in the workspace, in the order of parts.
//
// A number that is infinite or NaN, or too large for a component, makes sums that are not finite:
// zeros of the tile meet a NaN of x. These, and columns that are not in order or stand twice, make
// the block compute its part of the result entry by entry instead. Of a transposed product all
// blocks meet all rows of the stored matrix: one that is not in order is enough for all of them.
//
// Floors: 6 * rows * columns * n multiply-adds of tensor cores in float32, a sixth of them in 16
// bits, of which a multiprocessor does 2,048 a clock. From shared memory at 128 bytes a clock, for
// a tile of 64 x 64 and 128 columns in float32: 96 KB that tensor cores read of x and 48 that are
// copied of it, 18 each to clear and to read the tile, and the entries. From memory the entries, x
// and the result, once each; from L2, at 42 bytes a clock, x as often as there are tiles down the
// result.
#include "cuda/preparation.cuh"
#include "spmm/matrices.cuh"
#include "spmm/matrix_tiles.cuh"

namespace jaxsparse {

// Threads of a block: two warpgroups multiply every stage, behind them come those that write
// entries, in one team or two, of which each has every other one.
constexpr int kMultipliers = kSpmmTensorRole;
constexpr int kOfMultipliers = 1;  // the barrier at which they meet
constexpr int kGroups = 2;
static_assert(kMultipliers == kGroups * kWarpgroup);

template <typename T, int kColumns>
struct SpmmTensorShape {
  using TileA = MatrixTile<T>;
  static constexpr bool kSplits = kComponents<T> > 1;
  using TileX = BlockedTile<kSpmmTensorInner, kColumns>;
  static constexpr int kXBytes = kComponents<T> * TileX::kBytes;
  static constexpr int kStageBytes = kXBytes + TileA::kBytes;
  static constexpr int kStages = SpmmTensorStages(kStageBytes);
  static constexpr int kCountersAt = kStages * kStageBytes;
  static constexpr int kFlagAt = kCountersAt + kStages * kSpmmCounterBytes;
  static constexpr int kBiasAt = kFlagAt + kSpmmFlagBytes;
  static constexpr int kOrdersAt = kBiasAt + kSpmmBiasBytes;
  static_assert(kStageBytes == SpmmTensorStageBytes(kComponents<T>, kColumns));
  static_assert(kStageBytes % 1024 == 0 && kStages >= 3);
  static constexpr int kTeams = SpmmWriterTeams(kComponents<T>, kColumns);
  static constexpr int kThreads = SpmmTensorThreads(kComponents<T>, kColumns);
  static_assert(kStages % kTeams == 0);  // so that a stage is always filled by the same one
  // Writers leave some to multipliers.
  static constexpr int kRegistersToMultiply = kTeams == 1 ? 160 : kColumns > 64 ? 96 : 80;
  static constexpr int kRegistersToWrite = kTeams == 1 ? 96 : kColumns > 64 ? 72 : 80;
};

// Stages that writers fill and multipliers empty, in turn. By addresses that stay in registers:
// writers have few warps, which wait for each instruction.
template <typename Shape>
class TileRing {
  static constexpr int kFullAt = Shape::kCountersAt;
  static constexpr int kEmptyAt = kFullAt + Shape::kStages * sizeof(uint64_t);
  uint32_t stages_;
  uint32_t stage_ = 0, odd_ = 0;  // the phase that its barriers are in

  // `from` kFullAt, one that counts writers, one more time who has x copied, and bytes of it; from
  // kEmptyAt, one that counts multipliers.
  __device__ __forceinline__ uint64_t* Barrier(int from, uint32_t stage) const {
    return &SharedAt<uint64_t>(stages_ + stage * sizeof(uint64_t) + from);
  }

 public:
  __device__ explicit TileRing(const unsigned char* stages) : stages_(AddressOfShared(stages)) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        InitBarrier(Barrier(kFullAt, stage), kTeam + 1);
        InitBarrier(Barrier(kEmptyAt, stage), kMultipliers);
      }
      FenceShared();
    }
    __syncthreads();
  }

  // For who has a register left: otherwise it is computed again for each stage.
  __device__ __forceinline__ void KeepAddress() { KeepInRegister(stages_); }

  // Space of the writers.
  __device__ __forceinline__ uint32_t Orders() const { return stages_ + Shape::kOrdersAt; }
  __device__ __forceinline__ uint32_t Stage() const {
    return stages_ + stage_ * Shape::kStageBytes;
  }
  __device__ __forceinline__ void WaitUntilEmpty() {
    WaitForPhase(Barrier(kEmptyAt, stage_), odd_ ^ 1);
  }
  __device__ __forceinline__ void WaitUntilFull() { WaitForPhase(Barrier(kFullAt, stage_), odd_); }
  // By one thread; calls with where x belongs, and the barrier.
  template <typename Copy>
  __device__ __forceinline__ void CopyX(Copy copy) {
    uint64_t* full = Barrier(kFullAt, stage_);
    ArriveAndExpect(full, Shape::kXBytes);
    copy(&SharedAt<char>(Stage()), full);
  }
  __device__ __forceinline__ void Filled() { Arrive(Barrier(kFullAt, stage_)); }
  __device__ __forceinline__ void Emptied() { Arrive(Barrier(kEmptyAt, stage_)); }
  __device__ __forceinline__ void Next(int stages = 1) {
    stage_ += stages;
    if (stage_ >= Shape::kStages) {
      stage_ -= Shape::kStages;
      odd_ ^= 1;
    }
  }
};

// Tells all of a block whether anything went wrong in a tile of the result.
class TileFlags {
  int* flags_;  // of this tile and of the one before or behind it; what multipliers tell each other
  int turn_ = 0;

 public:
  __device__ explicit TileFlags(unsigned char* flags) : flags_(reinterpret_cast<int*>(flags)) {
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

  __device__ __forceinline__ void Tell(bool what) { flags_[2] = what; }
  __device__ __forceinline__ bool IsTold() const { return flags_[2] != 0; }
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
        sum += m.Value(i) * ToAccumulator(m.x[m.Column(i) * p.n + c]);
      }
      m.Write(p.activation, row, row * p.n + c, sum);
    }
  }
}

__device__ inline int StepsOf(const SpmmProblem& p) {
  return static_cast<int>(CeilDivide(p.pattern.columns, kSpmmTensorInner));
}

// A tile of the result, or one of the parts into which its inner places are cut.
template <int kColumns>
struct ResultTile {
  int64_t number, entry, first_row, first_column;
  int part, parts;
  int first_step, end_step;

  __device__ ResultTile(const SpmmProblem& p, int64_t item, int of_tile)
      : number(item / of_tile), part(static_cast<int>(item % of_tile)), parts(of_tile) {
    const int64_t down = CeilDivide(p.pattern.rows, kSpmmTensorRows);
    const int64_t across = CeilDivide(p.n, kColumns);
    entry = number / (down * across);
    first_row = number / across % down * kSpmmTensorRows;
    first_column = number % across * kColumns;
    const int steps = StepsOf(p);
    first_step = steps * part / parts;
    end_step = steps * (part + 1) / parts;
  }
  __device__ static int64_t Count(const SpmmProblem& p) {
    return p.batch.count * CeilDivide(p.pattern.rows, kSpmmTensorRows) * CeilDivide(p.n, kColumns);
  }
  // There are more blocks than tiles only if each tile has several.
  __device__ static int PartsOfEach(const SpmmProblem& p) {
    const int64_t tiles = Count(p);
    return gridDim.x > tiles ? static_cast<int>(gridDim.x / tiles) : 1;
  }
};

template <typename T, int kColumns>
__device__ __forceinline__ Preparation PreparationOf(const SpmmProblem& p) {
  Preparation prepared(p.batch, p.stored, p.pattern.columns, p.x, p.n, kColumns, kComponents<T>);
  if (SpmmCopiesX(p, kColumns)) prepared.own_components = 0;
  return prepared;
}

// Tiles of x in one step after another: components that were prepared, or x itself.
template <typename T, int kColumns>
class TilesOfX {
  static constexpr bool kMayCopy = kComponents<T> == 1 && kColumns >= 64;
  const SpmmProblem& p_;
  const char* components_;  // or null
  int64_t tile_bytes_;
  int first_column_, own_entry_;

 public:
  __device__ __forceinline__ TilesOfX(const SpmmProblem& p, const Preparation& prepared,
                                      const ResultTile<kColumns>& tile)
      : p_(p), components_(nullptr), tile_bytes_(prepared.components.tile_bytes) {
    const int64_t own_entry = OwnEntry(p.batch, p.x, tile.entry);
    first_column_ = static_cast<int>(tile.first_column);
    own_entry_ = static_cast<int>(own_entry);
    if (kMayCopy && prepared.own_components == 0) return;
    components_ = prepared.ComponentsIn(p.workspace) + own_entry * prepared.components.Bytes() +
                  tile.first_column / kColumns * prepared.components.down * tile_bytes_;
  }
  // By one thread.
  __device__ __forceinline__ void Copy(int step, char* to, uint64_t* full) const {
    using Tile = BlockedTile<kSpmmTensorInner, kColumns>;
    if (!kMayCopy || components_ != nullptr) {
      BulkCopy(to, components_ + step * tile_bytes_, kComponents<T> * Tile::kBytes, full);
      return;
    }
#pragma unroll
    for (int block = 0; block < kColumns / Tile::kBlockWidth; ++block) {
      TensorCopy(to + block * Tile::Block::kBytes, p_.tiles_of_x,
                 first_column_ + block * Tile::kBlockWidth, step * kSpmmTensorInner, own_entry_,
                 full);
    }
  }
};

// Writes the entries of a tile of the result to the stages, and has its components of x copied
// there. Returns whether the entries were in order. `ahead` is how many steps behind the first one
// the team's begin, in this tile and then in the next one.
template <typename T, typename Index, int kColumns, bool kTransposed, typename Shape>
__device__ __forceinline__ bool WriteStages(const SpmmProblem& p, const ResultTile<kColumns>& tile,
                                            int& ahead, TileRing<Shape>& ring) {
  using Part = WarpsPart<T, kTransposed>;
  if (tile.first_step == tile.end_step) return true;  // there may be no row of the matrix
  const Preparation prepared = PreparationOf<T, kColumns>(p);
  const TilesOfX<T, kColumns> x(p, prepared, tile);
  const int64_t at = tile.first_row / kTileSize;  // of the result's tiles down
  const int32_t* starts = prepared.StartsOf(p.batch, p.stored, p.workspace, tile.entry) +
                          (kTransposed ? at * kTileSize : prepared.starts.At(0, at));
  using Entries = EntriesOfRows<T, Index, kTransposed, Shape>;
  const int writer = WarpOfBlock() - kMultipliers / kWarp;
  const int warp = writer % kWriterWarps;
  int step = tile.first_step + ahead;
  const int end = tile.end_step;
  Entries entries(p.values.At<const T>(p.batch, tile.entry),
                  p.stored.column_indices.At<const Index>(p.batch, tile.entry), p.stored, starts,
                  kTransposed ? at : 0, ring.Orders() + writer * kSpmmTensorRows,
                  warp * kWriterRows, step, end);
  const auto write = [&](auto& held, auto& next) {
    const uint32_t matrix = ring.Stage() + Shape::kXBytes;
    uint32_t places[Entries::kOfLane];
    const int row = entries.RowOf(held, step);
    const bool two_runs = entries.HasTwoRuns(held);
    entries.Place(held, row, two_runs, matrix, places);
    ring.WaitUntilEmpty();
    if (step / Shape::kTeams % kWriterWarps == warp) {  // in turn, as it takes a while
      if (threadIdx.x % kWarp == 0) {
        ring.CopyX([&](char* to, uint64_t* full) { x.Copy(step, to, full); });
      }
      __syncwarp();
    }
    // Who waits for loads waits for all of them: so these were waited for before there are others.
    entries.Load(next, held);
    Part::Clear(matrix, row);
    __syncwarp();
    entries.Write(held, row, two_runs, matrix, places);
    ring.Filled();
    ring.Next(Shape::kTeams);
    step += Shape::kTeams;
  };
  ring.KeepAddress();
  typename Entries::Held held[2] = {};
  entries.LoadStarts(held[0]);
  entries.BringFirstNearer(held[0]);
  entries.Load(held[0], held[1]);
  if (!kTransposed && end - step > 2 * Shape::kTeams) {
    entries.PutLongRowsFirst(tile.first_step, end);  // while entries are loaded
  }
  WaitForKernelBefore();  // it writes components of x
#pragma unroll 1
  while (step < end) {
    write(held[0], held[1]);
    if (step < end) write(held[1], held[0]);
  }
  ahead = step - end;
  return entries.IsOrdered();
}

// Multiplies what is in so many stages, each warpgroup over its part of the inner places: had each
// of them every other stage, they would be full for twice as long, and who is late with one would
// be waited for.
template <typename Product, typename Shape>
__device__ __forceinline__ void MultiplyStages(int steps, int group, TileRing<Shape>& ring,
                                               Product& product) {
  constexpr int kInner = kSpmmTensorInner / kGroups;
  using OfRows = typename Shape::TileA::OfRows;
  using TileX = typename Shape::TileX;
  const int first = group * kInner;
  for (int step = 0; step < steps; ++step, ring.Next()) {
    ring.WaitUntilFull();
    const uint32_t x = ring.Stage(), matrix = x + Shape::kXBytes;
    if constexpr (Shape::kSplits) {
      product.template Add<OfRows::kPitch, kInner, TileX, true>(matrix, x, first);
    } else {
      product.template AddComponents<OfRows, kInner, TileX, true>(&SharedAt<unsigned char>(matrix),
                                                                  x, first);
    }
    ring.Emptied();
  }
}

// What the warpgroups have of a tile, in stages that are empty: a few instructions write it out
// from there, where one copy of the epilogue for each register took longer than the product, as
// instructions come from memory.
template <int kColumns>
struct SumTiles {
  static constexpr int kRun = 4, kRuns = kColumns / kRun;
  static constexpr int kAllRuns = kSpmmTensorRows * kRuns;
  using Run = Vector<float, kRun>;
  static constexpr int kPitch =
      kColumns + 8;  // so that rows which a warp writes lie in other banks
  static constexpr int kBytes = kSpmmTensorRows * kPitch * sizeof(float);  // of a warpgroup

  uint32_t sums;  // the first warpgroup's
  int count;      // of warpgroups, 1 or 2

  // The place of run number `run`, of those of a warpgroup's row one behind the other.
  __device__ __forceinline__ Run& At(int run) const {
    return SharedAt<Run>(sums + (run / kRuns * kPitch + run % kRuns * kRun) * sizeof(float));
  }
  __device__ __forceinline__ Run Sum(int run) const {
    Run sum = At(run);
    if (count == 1) return sum;
    const Run other = SumTiles{sums + kBytes, 1}.At(run);
#pragma unroll
    for (int c = 0; c < kRun; ++c) sum.elements[c] += other.elements[c];
    return sum;
  }
};

template <typename T, typename Out, typename Index, int kColumns>
__device__ __forceinline__ void WriteTile(const SpmmProblem& p, const ResultTile<kColumns>& tile,
                                          const SumTiles<kColumns>& sums, const float* bias) {
  using Sums = SumTiles<kColumns>;
  Matrices<T, Out, Index> m(p, tile.entry);
  const bool has_bias = m.bias != nullptr;
  m.bias = nullptr;  // memory would be waited for at every turn
#pragma unroll 1
  for (int i = threadIdx.x; i < Sums::kAllRuns; i += kMultipliers) {
    const int64_t row = tile.first_row + i / Sums::kRuns;
    const int64_t first = tile.first_column + i % Sums::kRuns * Sums::kRun;
    if (row >= p.pattern.rows || first >= p.n) continue;
    typename Sums::Run z = sums.Sum(i);
    if (has_bias) {
#pragma unroll
      for (int c = 0; c < Sums::kRun; ++c) z.elements[c] += bias[i / Sums::kRuns];
    }
    if (first + Sums::kRun <= p.n) {
      m.WriteRun(p.activation, row, row * p.n + first, z.elements);
    } else {
#pragma unroll
      for (int c = 0; c < Sums::kRun; ++c) {
        if (first + c < p.n) m.Write(p.activation, row, row * p.n + first + c, z.elements[c]);
      }
    }
  }
}

// A tile whose inner places several blocks share. Each leaves its sums in the workspace; who comes
// last adds up all of them, in the order of parts, so that nobody waits for a block that may not
// run yet.
template <int kColumns>
class SharedTile {
  using Sums = SumTiles<kColumns>;
  using Run = typename Sums::Run;
  uint32_t* arrived_;  // blocks
  Run* parts_;         // one tile behind the other
  int part_, count_;

 public:
  __device__ SharedTile(const Preparation& prepared, const Workspace& workspace,
                        const ResultTile<kColumns>& tile)
      : part_(tile.part), count_(tile.parts) {
    char* behind = workspace.data + prepared.Bytes();
    arrived_ = reinterpret_cast<uint32_t*>(behind) + tile.number;
    parts_ = reinterpret_cast<Run*>(behind + kSpmmArrivedBytes) +
             tile.number * tile.parts * Sums::kAllRuns;
  }

  // By the multipliers. Sums that are not exact become NaN, which tells the last one.
  __device__ __forceinline__ void Leave(const Sums& sums, bool exact) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < Sums::kAllRuns; i += kMultipliers) {
      Run sum = sums.Sum(i);
#pragma unroll
      for (int c = 0; c < Sums::kRun; ++c) {
        if (!exact) sum.elements[c] = __uint_as_float(0x7fffffff);
      }
      parts_[part_ * Sums::kAllRuns + i] = sum;
    }
  }
  // Whether all have left theirs, by one thread, behind what the block wrote.
  __device__ __forceinline__ bool IsLast() const {
    return FetchAndAddOfGpu(arrived_, 1) == static_cast<uint32_t>(count_ - 1);
  }
  // Adds up into what one warpgroup had; returns whether what the thread added is finite.
  __device__ __forceinline__ bool AddUp(const Sums& sums) const {
    constexpr int kAtOnce = Sums::kAllRuns / kMultipliers < 4 ? Sums::kAllRuns / kMultipliers : 4;
    static_assert(Sums::kAllRuns % (kAtOnce * kMultipliers) == 0);
    float not_finite = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < Sums::kAllRuns; i += kAtOnce * kMultipliers) {
      Run all[kAtOnce] = {};
#pragma unroll 1
      for (int part = 0; part < count_; ++part) {
        Run of_part[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          of_part[k] = parts_[part * Sums::kAllRuns + i + k * kMultipliers];
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
          for (int c = 0; c < Sums::kRun; ++c) all[k].elements[c] += of_part[k].elements[c];
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int c = 0; c < Sums::kRun; ++c) not_finite += all[k].elements[c] * 0.0f;
        sums.At(i + k * kMultipliers) = all[k];
      }
    }
    return not_finite == 0;
  }
};

// Before SpmmTensorCores.
template <typename T, typename Index, int kColumns>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocks)
    SpmmPrepare(const __grid_constant__ SpmmProblem p) {
  const Preparation prepared = PreparationOf<T, kColumns>(p);
  if (blockIdx.x == 0) {  // nobody has come to a SharedTile yet
    auto* arrived = reinterpret_cast<uint32_t*>(p.workspace.data + prepared.Bytes());
    for (int i = threadIdx.x; i < kSpmmMostParts; i += kPrepareThreads) arrived[i] = 0;
  }
  Prepare<T, Index, kColumns>(prepared, p.batch, p.stored, p.x, p.workspace);
}

// `Index` is that of the stored matrix, `OwnIndex` that of the one that is multiplied by.
template <typename T, typename Out, typename Index, typename OwnIndex, int kColumns,
          bool kTransposed>
__global__ void __launch_bounds__(SpmmTensorThreads(kComponents<T>, kColumns), 1)
    SpmmTensorCores(const __grid_constant__ SpmmProblem p) {
  using Shape = SpmmTensorShape<T, kColumns>;
  using Tile = ResultTile<kColumns>;
  extern __shared__ __align__(1024) unsigned char spmm_stages[];
  TileRing<Shape> ring(spmm_stages);
  TileFlags flags(spmm_stages + Shape::kFlagAt);
  auto* bias = reinterpret_cast<float*>(spmm_stages + Shape::kBiasAt);  // of the tile's rows
  const int parts = Tile::PartsOfEach(p);
  const int64_t items = Tile::Count(p) * parts;
  if (threadIdx.x >= kMultipliers) {
    GiveUpRegisters<Shape::kRegistersToWrite>();
    if (p.stored.tile_starts.data == nullptr) WaitForKernelBefore();  // it finds them
    int ahead = WarpgroupOfBlock() * kWarpgroup / kTeam - 1;
    ring.Next(ahead);
    for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
      const Tile tile(p, i, parts);
      const bool ordered = WriteStages<T, Index, kColumns, kTransposed>(p, tile, ahead, ring);
      const int row = static_cast<int>(threadIdx.x) - kMultipliers;
      if (p.bias.data != nullptr && row < kSpmmTensorRows &&
          tile.first_row + row < p.pattern.rows) {
        bias[row] = ToAccumulator(p.bias.At<const T>(p.batch, tile.entry)[tile.first_row + row]);
      }
      flags.Raise(!ordered);
      WaitAt<Shape::kThreads>(kAllThreads);
      flags.Next();
      WaitAt<Shape::kThreads>(kAllThreads);
    }
    return;
  }
  TakeRegisters<Shape::kRegistersToMultiply>();
  const int group = WarpgroupOfBlock();
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const Tile tile(p, i, parts);
    WarpgroupProduct<T, kColumns> product;
    MultiplyStages(tile.end_step - tile.first_step, group, ring, product);
    using Sums = SumTiles<kColumns>;
    static_assert(kGroups * Sums::kBytes <= Shape::kCountersAt);
    float not_finite = 0;  // NaN, if a sum is not
    product.ForEachPair([&](int, int, float low, float high) {
      not_finite += low * 0.0f;
      not_finite += high * 0.0f;
    });
    flags.Raise(!(not_finite == 0));
    WaitAt<Shape::kThreads>(kAllThreads);
    bool exact = !flags.IsRaised();
    flags.Next();
    Sums sums{AddressOfShared(spmm_stages), kGroups};
    if (exact || parts > 1) {
      product.ForEachPair([&](int r, int c, float low, float high) {
        SharedAt<Vector<float, 2>>(sums.sums + group * Sums::kBytes +
                                   (r * Sums::kPitch + c) * sizeof(float)) = {{low, high}};
      });
      WaitAt<kMultipliers>(kOfMultipliers);
    }
    bool is_last = true;
    if (parts > 1) {
      const SharedTile<kColumns> shared(PreparationOf<T, kColumns>(p), p.workspace, tile);
      shared.Leave(sums, exact);
      WaitAt<kMultipliers>(kOfMultipliers);
      if (threadIdx.x == 0) flags.Tell(shared.IsLast());
      WaitAt<kMultipliers>(kOfMultipliers);
      is_last = flags.IsTold();
      if (is_last) {
        sums.count = 1;
        exact = shared.AddUp(sums);
        WaitAt<kMultipliers>(kOfMultipliers);
        if (!exact) flags.Tell(false);
        WaitAt<kMultipliers>(kOfMultipliers);
        exact = flags.IsTold();
      }
    }
    if (is_last && exact) {
      WriteTile<T, Out, OwnIndex>(p, tile, sums, bias);
    } else if (is_last) {
      MultiplyEntryByEntry<kColumns, T>(p, Matrices<T, Out, OwnIndex>(p, tile.entry),
                                        tile.first_row, tile.first_column);
    }
    FenceShared();  // copies of x are written there next
    WaitAt<Shape::kThreads>(kAllThreads);
  }
}

}  // namespace jaxsparse
