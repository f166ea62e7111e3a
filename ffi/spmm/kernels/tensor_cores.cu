// The sparse-dense product on tensor cores: tile by tile the matrix is written out densely in
// shared memory, and multiplied there. A stored entry costs one store however many columns x has,
// where a product entry by entry reads a row of x for each; a position that is not stored costs
// what a tensor core takes for it. Products of float32 are as exact as in float32.
//
// A prologue kernel splits x into components of 16 bits (cuda/tensor_cores.cuh) and leaves them in
// the workspace, tile by tile as they are copied to shared memory, unless x has 16 bits and tensor
// maps can copy its tiles as they are; and it finds out where the entries of each row in each tile
// begin, unless that is given with the pattern. This kernel begins meanwhile. Of a block, producer
// warps write tiles of the matrix to the stages of a pipeline and have those of x copied there; two
// consumer warpgroups multiply, each half of the inner places of a tile, and in the end add up what
// they have. Producers wait for their instructions more than for memory: hence two teams of them,
// if registers allow, and what saves instructions there.
//
// A transposed product reads the matrix as it is stored, by rows, and writes these as columns of
// the tiles: its entries never have to be looked up one by one. Where tiles of the result are few,
// several blocks share one (split-K), each with its part of the inner places, and the last to be
// done adds up what they have left in the workspace, in the order of parts.
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
#include "spmm/kernels/result_tiles.cuh"
#include "spmm/kernels/tile_pipeline.cuh"
#include "spmm/matrices.cuh"

namespace jaxsparse {

// A tile of the result entry by entry, by the consumers: any numbers, in any order.
template <int kColumns, typename T, typename M>
__device__ void MultiplyEntryByEntry(const SpmmProblem& p, const M& m, int64_t first_row,
                                     int64_t first_column) {
  const int lane = threadIdx.x % kWarp;
  for (int r = threadIdx.x / kWarp; r < kSpmmTileRows; r += kConsumers / kWarp) {
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

template <typename T, int kColumns>
__device__ __forceinline__ Preparation PreparationOf(const SpmmProblem& p) {
  return SpmmPreparation(p, kColumns, kComponents<T>);
}

// Tiles of x in one step after another: components that were prepared, or x itself.
template <typename T, int kColumns>
class TilesOfX {
  static constexpr bool kMayCopy = kComponents<T> == 1 && kColumns >= 64;
  const SpmmTensorProblem& p_;
  const char* components_;  // or null
  int64_t tile_bytes_;
  int first_column_, own_entry_;

 public:
  __device__ __forceinline__ TilesOfX(const SpmmTensorProblem& p, const Preparation& prepared,
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
    using Tile = BlockedTile<kSpmmTileInner, kColumns>;
    if (!kMayCopy || components_ != nullptr) {
      BulkCopy(to, components_ + step * tile_bytes_, kComponents<T> * Tile::kBytes, full);
      return;
    }
#pragma unroll
    for (int block = 0; block < kColumns / Tile::kBlockWidth; ++block) {
      TensorCopy(to + block * Tile::Block::kBytes, p_.tiles_of_x,
                 first_column_ + block * Tile::kBlockWidth, step * kSpmmTileInner, own_entry_,
                 full);
    }
  }
};

// Writes the entries of a tile of the result to the stages, and has its components of x copied
// there. Returns whether the entries were in order. `ahead` is how many steps behind the first one
// the team's begin, in this tile and then in the next one.
template <typename T, typename Index, int kColumns, bool kTransposed, typename Shape>
__device__ __forceinline__ bool ProduceStages(const SpmmTensorProblem& p,
                                              const ResultTile<kColumns>& tile, int& ahead,
                                              TilePipeline<Shape>& pipeline) {
  using Part = WarpsPart<T, kTransposed>;
  if (tile.first_step == tile.end_step) return true;  // there may be no row of the matrix
  const Preparation prepared = PreparationOf<T, kColumns>(p);
  const TilesOfX<T, kColumns> x(p, prepared, tile);
  const int64_t at = tile.first_row / kTileSize;  // of the result's tiles down
  const int32_t* starts = prepared.StartsOf(p.batch, p.stored, p.workspace, tile.entry) +
                          (kTransposed ? at * kTileSize : prepared.starts.At(0, at));
  using Entries = EntriesOfRows<T, Index, kTransposed, Shape>;
  const int producer = WarpOfBlock() - kConsumers / kWarp;
  const int warp = producer % kProducerWarps;
  int step = tile.first_step + ahead;
  const int end = tile.end_step;
  Entries entries(p.values.At<const T>(p.batch, tile.entry),
                  p.stored.column_indices.At<const Index>(p.batch, tile.entry), p.stored, starts,
                  kTransposed ? at : 0, pipeline.Orders() + producer * kSpmmTileRows,
                  warp * kProducerRows, step, end);
  const auto write = [&](auto& held, auto& next) {
    const uint32_t matrix = pipeline.Stage() + Shape::kXBytes;
    uint32_t places[Entries::kOfLane];
    const int row = entries.RowOf(held, step);
    const bool two_runs = entries.HasTwoRuns(held);
    entries.Place(held, row, two_runs, matrix, places);
    pipeline.WaitUntilEmpty();
    if (step / Shape::kTeams % kProducerWarps == warp) {  // in turn, as it takes a while
      if (threadIdx.x % kWarp == 0) {
        pipeline.CopyX([&](char* to, uint64_t* full) { x.Copy(step, to, full); });
      }
      __syncwarp();
    }
    // A warp waits for all of its loads at once: so these were waited for before there are others.
    entries.Load(next, held);
    Part::Clear(matrix, row);
    __syncwarp();
    entries.Write(held, row, two_runs, matrix, places);
    pipeline.Filled();
    pipeline.Next(Shape::kTeams);
    step += Shape::kTeams;
  };
  pipeline.KeepAddress();
  typename Entries::Held held[2] = {};
  entries.LoadStarts(held[0]);
  entries.BringFirstNearer(held[0]);
  entries.Load(held[0], held[1]);
  if (!kTransposed && end - step > 2 * Shape::kTeams) {
    entries.PutLongRowsFirst(tile.first_step, end);  // while entries are loaded
  }
  WaitForPrologue();  // it writes components of x
#pragma unroll 1
  while (step < end) {
    write(held[0], held[1]);
    if (step < end) write(held[1], held[0]);
  }
  ahead = step - end;
  return entries.IsOrdered();
}

// Multiplies what is in so many stages, each warpgroup over its part of the inner places: had each
// of them every other stage, they would be full for twice as long, and the other warpgroup would
// wait for one that is late with its stage.
template <typename Product, typename Shape>
__device__ __forceinline__ void ConsumeStages(int steps, int group, TilePipeline<Shape>& pipeline,
                                              Product& product) {
  constexpr int kInner = kSpmmTileInner / kGroups;
  using OfRows = typename Shape::TileA::OfRows;
  using TileX = typename Shape::TileX;
  const int first = group * kInner;
  for (int step = 0; step < steps; ++step, pipeline.Next()) {
    pipeline.WaitUntilFull();
    const uint32_t x = pipeline.Stage(), matrix = x + Shape::kXBytes;
    if constexpr (Shape::kSplits) {
      product.template Add<OfRows::kPitch, kInner, TileX, true>(matrix, x, first);
    } else {
      product.template AddComponents<OfRows, kInner, TileX, true>(&SharedAt<unsigned char>(matrix),
                                                                  x, first);
    }
    pipeline.Emptied();
  }
}

template <typename T, typename Out, typename Index, int kColumns>
__device__ __forceinline__ void WriteTile(const SpmmProblem& p, const ResultTile<kColumns>& tile,
                                          const SumTiles<kColumns>& sums, const float* bias) {
  using Sums = SumTiles<kColumns>;
  Matrices<T, Out, Index> m(p, tile.entry);
  const bool has_bias = m.bias != nullptr;
  m.bias = nullptr;  // memory would be waited for at every turn
#pragma unroll 1
  for (int i = threadIdx.x; i < Sums::kAllRuns; i += kConsumers) {
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

// The prologue of SpmmTensorCores.
template <typename T, typename Index, SpmmTensorConfig kConfig>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocks)
    SpmmPrepare(const __grid_constant__ SpmmProblem p) {
  constexpr int kColumns = kConfig.columns;
  const Preparation prepared = PreparationOf<T, kColumns>(p);
  if (blockIdx.x == 0) {  // no block has come to a SplitTile yet
    auto* arrived = reinterpret_cast<uint32_t*>(p.workspace.data + prepared.Bytes());
    for (int i = threadIdx.x; i < kSpmmMostParts; i += kPrepareThreads) arrived[i] = 0;
  }
  Prepare<T, Index, kColumns>(prepared, p.batch, p.stored, p.x, p.workspace);
}

// `Index` is that of the stored matrix, `OwnIndex` that of the one that is multiplied by.
template <typename T, typename Out, typename Index, typename OwnIndex, SpmmTensorConfig kConfig>
__global__ void __launch_bounds__(kConfig.Threads(kComponents<T>), 1)
    SpmmTensorCores(const __grid_constant__ SpmmTensorProblem p) {
  constexpr int kColumns = kConfig.columns;
  using Shape = SpmmTensorShape<T, kConfig>;
  using Tile = ResultTile<kColumns>;
  extern __shared__ __align__(1024) unsigned char spmm_stages[];
  TilePipeline<Shape> pipeline(spmm_stages);
  TileFlags flags(spmm_stages + Shape::kFlagsAt);
  auto* bias = reinterpret_cast<float*>(spmm_stages + Shape::kBiasAt);  // of the tile's rows
  const int parts = Tile::PartsOfEach(p);
  const int64_t items = Tile::Count(p) * parts;
  if (threadIdx.x >= kConsumers) {
    GiveUpRegisters<Shape::kProducerRegisters>();
    if (p.stored.tile_starts.data == nullptr) WaitForPrologue();  // it finds them
    int ahead = WarpgroupOfBlock() * kWarpgroup / kTeamThreads - 1;
    pipeline.Next(ahead);
    for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
      const Tile tile(p, i, parts);
      const bool ordered =
          ProduceStages<T, Index, kColumns, kConfig.transposed>(p, tile, ahead, pipeline);
      const int row = static_cast<int>(threadIdx.x) - kConsumers;
      if (p.bias.data != nullptr && row < kSpmmTileRows && tile.first_row + row < p.pattern.rows) {
        bias[row] = ToAccumulator(p.bias.At<const T>(p.batch, tile.entry)[tile.first_row + row]);
      }
      flags.Raise(!ordered);
      WaitAt<Shape::kThreads>(kAllThreads);
      flags.Next();
      WaitAt<Shape::kThreads>(kAllThreads);
    }
    return;
  }
  TakeRegisters<Shape::kConsumerRegisters>();
  const int group = WarpgroupOfBlock();
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const Tile tile(p, i, parts);
    WarpgroupProduct<T, kColumns> product;
    ConsumeStages(tile.end_step - tile.first_step, group, pipeline, product);
    using Sums = SumTiles<kColumns>;
    static_assert(kGroups * Sums::kBytes <= Shape::kBarriersAt);
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
      WaitAt<kConsumers>(kConsumersMeet);
    }
    bool is_last = true;
    if (parts > 1) {
      const SplitTile<kColumns> shared(PreparationOf<T, kColumns>(p), p.workspace, tile);
      shared.Leave(sums, exact);
      WaitAt<kConsumers>(kConsumersMeet);
      if (threadIdx.x == 0) flags.Tell(shared.IsLast());
      WaitAt<kConsumers>(kConsumersMeet);
      is_last = flags.IsTold();
      if (is_last) {
        sums.count = 1;
        exact = shared.AddUp(sums);
        WaitAt<kConsumers>(kConsumersMeet);
        if (!exact) flags.Tell(false);
        WaitAt<kConsumers>(kConsumersMeet);
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
