// CUDA variants of the sparse-dense product: which kernel, and how it is launched.
#include <string>

#include "nvrtc/tensor_map.h"
#include "nvrtc/expression.h"
#include "spmm/spmm.h"

namespace jaxsparse {
namespace {

constexpr int kThreads = 128;

KernelSource Instance(const char* kernel, const SpmmProblem& p) {
  return {"spmm/spmm.cu", std::string("jaxsparse::") + kernel + "<" + TypeName(p.dtype) + ", " +
                              TypeName(p.out_dtype) + ", " + TypeName(p.pattern.index_type) + ">"};
}

LaunchShape RowsShape(const SpmmProblem& p) {
  const int lanes = LanesFor(p.n);
  const int64_t tiles = CeilDivide(p.n, static_cast<int64_t>(lanes) * kSpmmColumnsPerLane);
  return {CeilDivide(p.batch.count * tiles * p.pattern.rows, kThreads / lanes), kThreads};
}

LaunchShape DotsShape(const SpmmProblem& p) {
  return {CeilDivide(p.batch.count * p.n * p.pattern.rows, kThreads / kWarp), kThreads};
}

// How the result is cut into tiles, and rows are shared.
struct Tiling {
  int vector;   // columns of a lane
  int lanes;    // of a group
  int rows;     // of a block, among which its groups are shared
  int at_once;  // entries that a group adds
};

constexpr int kWidestLoad = 16;  // bytes

int GroupsOf(const Tiling& tiling) { return kSpmmTiledThreads / tiling.lanes; }

int64_t TiledBlocks(const SpmmProblem& p, const Tiling& tiling) {
  const int64_t tiles = CeilDivide(p.n, tiling.lanes * tiling.vector);
  return p.batch.count * tiles * CeilDivide(p.pattern.rows, tiling.rows);
}

double MeanLength(const SpmmProblem& p) {
  return p.pattern.rows > 0 ? static_cast<double>(p.pattern.nse) / p.pattern.rows : 0;
}

int64_t TiledBlocksAtOnce(const SpmmProblem& p) {
  return int64_t{p.gpu.multiprocessors} * SpmmTiledBlocks(SizeOf(p.dtype));
}

// How many times all places for blocks are taken, a part of one as all of it if it is the only one.
double TiledWaves(const SpmmProblem& p, const Tiling& tiling) {
  const double waves =
      static_cast<double>(TiledBlocks(p, tiling)) / static_cast<double>(TiledBlocksAtOnce(p));
  return waves > 1 ? waves : 1;
}

// As few rows for a block as let all blocks run at once. On 72 pruned matrices of 64 to 2048 rows,
// and 64 to 2048 columns of x, half as many rows take 6 to 25 % more time in the mean, twice as
// many 10 to 21 %; eight entries at once 3 % less than four where a group has so many. In 16 bits
// eight take 3 to 25 % less time where a multiprocessor has few blocks, up to 18 % more where the
// threads of three hide what is waited for.
Tiling TilingOf(const SpmmProblem& p) {
  constexpr int kMostShares = 32;  // of a row of mean length: one group adds them all up
  constexpr int kMostAtOnce = 8;   // where registers have room for them
  Tiling tiling{static_cast<int>(kWidestLoad / SizeOf(p.dtype)), 1, 1, 4};
  while (p.n % tiling.vector != 0) tiling.vector /= 2;
  tiling.lanes = LanesFor(CeilDivide(p.n, tiling.vector));
  const int groups = GroupsOf(tiling);
  if (groups > kMostShares) tiling.rows = groups / kMostShares;
  while (tiling.rows < groups && TiledBlocks(p, tiling) > TiledBlocksAtOnce(p)) tiling.rows *= 2;
  const bool has_registers = p.dtype != DType::kFloat64 && p.pattern.permutation.data == nullptr;
  const bool hides = SizeOf(p.dtype) == 2 && TiledBlocks(p, tiling) > 2 * p.gpu.multiprocessors &&
                     TiledBlocks(p, tiling) <= TiledBlocksAtOnce(p);
  if (has_registers && !hides && MeanLength(p) * tiling.rows >= kMostAtOnce * groups) {
    tiling.at_once = kMostAtOnce;
  }
  return tiling;
}

// Counters of 32 bits.
bool FitsTiled(const SpmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return !p.dense_on_left && p.n * SizeOf(p.dtype) < kMost && p.pattern.nse < kMost &&
         (p.n == 0 || p.pattern.rows * p.batch.count < kMost / p.n);
}

// The tiling with all techniques, or without one.
Tiling TilingWithout(SpmmTechnique technique, const SpmmProblem& p) {
  Tiling tiling = TilingOf(p);
  if (technique == SpmmTechnique::kWideLoads) {
    tiling.lanes = LanesFor(p.n);
    tiling.vector = 1;
    if (tiling.rows > GroupsOf(tiling)) tiling.rows = GroupsOf(tiling);
  }
  if (technique == SpmmTechnique::kSharing) tiling.rows = GroupsOf(tiling);
  return tiling;
}

// Columns that are scaled when they are loaded become places of 32 bits.
bool FitsTiledWithout(SpmmTechnique technique, const SpmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 32;
  return FitsTiled(p) && (technique != SpmmTechnique::kLateScaling ||
                          p.pattern.columns * p.n * SizeOf(p.dtype) <= kMost);
}

KernelSource TiledInstance(const SpmmProblem& p, SpmmTechnique without) {
  const Tiling tiling = TilingWithout(without, p);
  return {"spmm/spmm_tiled.cu",
          "jaxsparse::SpmmTiled<" + TypeName(p.dtype) + ", " + TypeName(p.out_dtype) + ", " +
              TypeName(p.pattern.index_type) + ", " + std::to_string(tiling.vector) + ", " +
              std::to_string(tiling.lanes) + ", " + std::to_string(tiling.rows) + ", " +
              std::to_string(tiling.at_once) + ", " +
              (p.pattern.permutation.data == nullptr ? "false" : "true") +
              ", jaxsparse::SpmmTechnique(" + std::to_string(static_cast<int>(without)) + "), " +
              (p.batch.rank > 0 ? "true" : "false") + ">"};
}

// Groups that share a row leave parts of it, those that may help another one with a long row parts
// of one column.
LaunchShape TiledShape(const SpmmProblem& p, SpmmTechnique without) {
  const Tiling tiling = TilingWithout(without, p);
  const int groups = GroupsOf(tiling);
  const int of_helped = SpmmGroupsMayHelp(without, tiling.rows, groups) ? 1 : 0;
  const int columns = tiling.rows < groups ? tiling.vector : of_helped;
  return {TiledBlocks(p, tiling), kSpmmTiledThreads, SpmmTiledBytes(columns, SizeOf(p.dtype))};
}

// From where on one group would still add the longest row when all others are done with theirs, and
// for longer than it takes to deal rows.
std::string CompleteTiled(SpmmProblem* p, SpmmTechnique without) {
  constexpr double kMuch = 4, kToDeal = 96, kMost = 1 << 30;
  const double waves = TiledWaves(*p, TilingWithout(without, *p));
  const double length = kMuch * MeanLength(*p) * waves + kToDeal;
  p->long_row = static_cast<uint32_t>(length < kMost ? length : kMost);
  return "";
}

int64_t StepsOf(const SpmmProblem& p) { return CeilDivide(p.pattern.columns, kSpmmTensorInner); }

int64_t TensorTiles(const SpmmProblem& p, int columns) {
  return p.batch.count * CeilDivide(p.pattern.rows, kSpmmTensorRows) * CeilDivide(p.n, columns);
}

// How work is cut on tensor cores: a block multiplies by so many columns of x, in one of so many
// parts of the inner places.
struct TensorTiling {
  int columns, parts;
};

// Microseconds with the kernel before but for what it prepares. Fitted to 104 figures of 26
// problems, 32 to 128 columns, 1024 x 1024 to 12288 x 4096, 10 to 30 % stored, with tiles that are
// shared and that are not, half of them within 1.5 % and all within 8 %; what another tile costs to
// layers of ResNet-50, of which 802,816 columns meet as few as 64 inner places.
double TensorMicroseconds(const SpmmProblem& p, const TensorTiling& tiling) {
  struct Fit {
    int components, columns;
    // Of a step: by itself, if all were stored, if all multiprocessors have x copied at once.
    double start, step, of_entries, of_copies;
  };
  constexpr Fit kFits[] = {{3, 32, 10.06, 0.505, 0.898, 0.094}, {3, 64, 8.64, 0.674, 0.636, 0},
                           {3, 128, 11.1, 0.958, 0.605, 0.101}, {1, 32, 8.78, 0.274, 0.535, 0.044},
                           {1, 64, 7.88, 0.34, 0.521, 0.026},   {1, 128, 9.81, 0.273, 0.88, 0.178}};
  // A block writes what it has, and begins anew with the next tile; the blocks of a shared one
  // leave their sums, and the last of them reads those of all.
  constexpr double kForEntries = 1.4e-7, kForTile = 3.5, kOfColumns = 0.02;
  constexpr double kForSharing = 1.2, kForBlock = 2, kForSums = 0.0057;
  const double places =
      static_cast<double>(p.pattern.rows) * static_cast<double>(p.pattern.columns);
  const double density = places > 0 ? static_cast<double>(p.pattern.nse) / places : 0;
  const int64_t items = TensorTiles(p, tiling.columns) * tiling.parts;
  const double busy =
      items < p.gpu.multiprocessors ? static_cast<double>(items) / p.gpu.multiprocessors : 1;
  const double waves =
      items > 0 ? static_cast<double>(CeilDivide(items, p.gpu.multiprocessors)) : 1;
  const double steps = waves * static_cast<double>(CeilDivide(StepsOf(p), tiling.parts));
  const bool shares = tiling.parts > 1;
  const double tile = kForTile + kOfColumns * tiling.columns + (shares ? kForBlock : 0);
  const double sharing = shares ? kForSharing + kForSums * tiling.columns * (1 + tiling.parts) : 0;
  for (const Fit& fit : kFits) {
    if (fit.components != ComponentsOf(p.dtype) || fit.columns != tiling.columns) continue;
    return fit.start + steps * (fit.step + density * fit.of_entries + busy * fit.of_copies) +
           (waves - 1) * tile + sharing +
           static_cast<double>(p.batch.count * p.pattern.nse) * kForEntries;
  }
  return kOnDemand;
}

Preparation PreparationOf(const SpmmProblem& p, int columns) {
  Preparation prepared(p.batch, p.stored, p.pattern.columns, p.x, p.n, columns,
                       ComponentsOf(p.dtype));
  if (SpmmCopiesX(p, columns)) prepared.own_components = 0;
  return prepared;
}

// Whether there is space for what is prepared, and for parts if tiles are shared.
bool HasSpaceFor(const SpmmProblem& p, const TensorTiling& tiling) {
  const int64_t items = TensorTiles(p, tiling.columns) * tiling.parts;
  const int64_t parts = tiling.parts == 1 ? 0 : items;
  return parts <= kSpmmMostParts && PreparationOf(p, tiling.columns).Bytes() + kSpmmArrivedBytes +
                                            SpmmPartsBytes(parts, tiling.columns) <=
                                        p.workspace.bytes;
}

// Whether tiles of the result are shared by blocks: if that is faster, not at all, or wherever
// there is anything to share.
struct Sharing {
  int least, most;  // parts of a tile
};
constexpr Sharing kIfFaster{1, 8}, kUnshared{1, 1}, kShared{2, 8};

template <const Sharing& kSharing>
TensorTiling TensorTilingOf(const SpmmProblem& p) {
  const int least = StepsOf(p) < kSharing.least ? 1 : kSharing.least;
  TensorTiling best{32, least};
  for (int columns = 32; columns == 32 || (columns <= 128 && columns / 2 < p.n); columns *= 2) {
    for (int parts = least; parts <= kSharing.most; ++parts) {
      const TensorTiling tiling{columns, parts};
      if (parts > 1 && (parts > StepsOf(p) || !HasSpaceFor(p, tiling))) break;
      if (TensorMicroseconds(p, tiling) < TensorMicroseconds(p, best)) best = tiling;
    }
  }
  return best;
}

template <const Sharing& kSharing>
KernelSource TensorInstance(const SpmmProblem& p) {
  return {"spmm/spmm_tensor_cores.cu",
          "jaxsparse::SpmmTensorCores<" + TypeName(p.dtype) + ", " + TypeName(p.out_dtype) + ", " +
              TypeName(p.stored.index_type) + ", " + TypeName(p.pattern.index_type) + ", " +
              std::to_string(TensorTilingOf<kSharing>(p).columns) + ", " +
              (p.transposed ? "true" : "false") + ">"};
}

template <const Sharing& kSharing>
LaunchShape TensorShape(const SpmmProblem& p) {
  const auto [columns, parts] = TensorTilingOf<kSharing>(p);
  const int64_t tiles = TensorTiles(p, columns), blocks = p.gpu.multiprocessors;
  return {parts > 1        ? tiles * parts
          : tiles < blocks ? tiles
                           : blocks,
          SpmmTensorThreads(ComponentsOf(p.dtype), columns),
          SpmmTensorBytes(ComponentsOf(p.dtype), columns)};
}

template <const Sharing& kSharing>
constexpr CudaKernel<SpmmProblem> kPrepare{
    [](const SpmmProblem& p) {
      return KernelSource{"spmm/spmm_tensor_cores.cu",
                          "jaxsparse::SpmmPrepare<" + TypeName(p.dtype) + ", " +
                              TypeName(p.stored.index_type) + ", " +
                              std::to_string(TensorTilingOf<kSharing>(p).columns) + ">"};
    },
    [](const SpmmProblem& p) {
      const auto [columns, parts] = TensorTilingOf<kSharing>(p);
      LaunchShape shape = PrepareShape(PreparationOf(p, columns));
      if (parts > 1 && shape.blocks == 0) shape.blocks = 1;  // nobody has arrived yet
      return shape;
    }};

template <const Sharing& kSharing>
std::string Complete(SpmmProblem* p) {
  if (!SpmmCopiesX(*p, TensorTilingOf<kSharing>(*p).columns)) return "";
  return EncodeTensorMap({p->x.data, OwnEntries(p->batch, p->x), p->pattern.columns, p->n},
                         &p->tiles_of_x);
}

// Warpgroups are what GPUs of this compute capability have. Places of 32 bits: the distance between
// two of them, or the complement of one, is one, too; so are those of starts.
template <const Sharing& kSharing>
bool FitsTensorCores(const SpmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return !p.dense_on_left && p.dtype != DType::kFloat64 && p.pattern.nse < kMost - kWarp &&
         p.pattern.columns < kMost && p.gpu.compute_capability == 90 &&
         SpmmTensorBytes(3, 128) <= p.gpu.shared_bytes && IsBatchedAsOne(p.batch, p.stored) &&
         TileStarts(p.stored.rows, p.stored.columns).At(1, 0) < kMost &&
         HasSpaceFor(p, TensorTilingOf<kSharing>(p));
}

// How x is staged, and the result cut into tiles.
struct Staging {
  int lanes;  // that read a row of x, 16 bytes each
  int rows;   // of a warp, at most
  int panel;  // rows of x
};

constexpr int kStagedWarps = 16, kStagedStages = 3;
// With so narrow rows of x, entries are waited for: bringing them nearer takes 3 to 12 % less time,
// with wider ones up to 8 % more.
constexpr int kPrefetchedLanes = 8;

struct StagedTiles {
  int64_t across, down;
};

StagedTiles StagedTilesOf(const SpmmProblem& p, const Staging& staging) {
  const int64_t columns = staging.lanes * kWidestLoad / SizeOf(p.dtype);
  return {p.batch.count * CeilDivide(p.n, columns),
          CeilDivide(p.pattern.rows, kStagedWarps * staging.rows)};
}

// Clocks of the multiprocessor that has most to do, fitted to 68 problems of float32, 1024 x 1024
// to 32768 x 8192, 32 and 128 columns, 10 to 30 % stored, and to 18 of float16.
double StagedClocks(const SpmmProblem& p, const Staging& staging) {
  constexpr double kStart = 6060, kForTile = 4235, kL2Bytes = 40;  // a clock and multiprocessor
  const double vector = static_cast<double>(kWidestLoad / SizeOf(p.dtype));
  const double bytes = staging.lanes * kWidestLoad, inner = static_cast<double>(p.pattern.columns);
  const StagedTiles tiles = StagedTilesOf(p, staging);
  const double rows =
      static_cast<double>(CeilDivide(p.pattern.rows, tiles.down > 0 ? tiles.down : 1));
  // What comes from shared memory, or else multiplications and conversions.
  const double by_bytes = bytes * 1.015 / 128, by_columns = staging.lanes * vector * 0.0215;
  const bool permuted = p.pattern.permutation.data != nullptr;
  const double entry =
      0.78 + (permuted ? 1.2 : 0) + (by_bytes > by_columns ? by_bytes : by_columns);
  // Of a row, in a panel.
  const double visit = 8.3 * (permuted ? 5 : 1) * (kWarp / staging.lanes) * vector / 4;
  const double shared =
      rows * (MeanLength(p) * entry + CeilDivide(p.pattern.columns, staging.panel) * visit);
  const double l2 = inner * bytes / kL2Bytes;
  const double prefetched = staging.lanes <= kPrefetchedLanes ? 0.9 : 1;
  return static_cast<double>(CeilDivide(tiles.across * tiles.down, p.gpu.multiprocessors)) *
             ((shared > l2 ? shared : l2) * prefetched + kForTile) +
         kStart;
}

// The least clocks; among equals the widest rows of x, whose entries are walked over least often.
Staging StagingOf(const SpmmProblem& p) {
  const int elements = static_cast<int>(kWidestLoad / SizeOf(p.dtype));  // of a lane
  const int least_lanes = p.dtype == DType::kFloat32 ? 8 : 4;            // 32 columns
  const int most_lanes = 4 * least_lanes;
  const int most_rows = 32 / elements;  // so that sums fit into registers
  Staging best{0, 0, 0};
  for (int lanes = least_lanes; lanes <= most_lanes; lanes *= 2) {
    const int most = kPipelineBytes / kStagedStages / (lanes * static_cast<int>(kWidestLoad));
    const int panel = PanelRows(p.pattern.columns, most);
    for (int rows = 1; rows <= most_rows; rows *= 2) {
      const Staging staging{lanes, rows, panel};
      if (best.lanes == 0 || StagedClocks(p, staging) <= StagedClocks(p, best)) {
        best = staging;
      }
    }
  }
  return best;
}

KernelSource StagedInstance(const SpmmProblem& p) {
  const Staging staging = StagingOf(p);
  return {"spmm/spmm_staged.cu",
          "jaxsparse::SpmmStaged<" + TypeName(p.dtype) + ", " + TypeName(p.out_dtype) + ", " +
              TypeName(p.pattern.index_type) + ", " + std::to_string(staging.lanes) + ", " +
              std::to_string(staging.rows) + ", " + std::to_string(staging.panel) + ", " +
              std::to_string(kStagedStages) + ", " + std::to_string(kStagedWarps) + ", " +
              (staging.lanes <= kPrefetchedLanes ? "true, " : "false, ") +
              (p.pattern.permutation.data == nullptr ? "false" : "true") + ">"};
}

LaunchShape StagedShape(const SpmmProblem& p) {
  const Staging staging = StagingOf(p);
  const StagedTiles tiles = StagedTilesOf(p, staging);
  const int64_t all = tiles.across * tiles.down, blocks = p.gpu.multiprocessors;
  return {all < blocks ? all : blocks, kStagedWarps * kWarp,
          SpmmStagedBytes(staging.lanes * kWidestLoad, staging.panel, kStagedStages, kStagedWarps)};
}

// Counters, of panels too, and places in the ring of 32 bits; barriers that count copies.
bool FitsStaged(const SpmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30, kWidestRow = 512;
  return FitsTiled(p) && p.dtype != DType::kFloat64 && p.pattern.columns * kWidestRow < kMost &&
         p.batch.count * CeilDivide(p.n, 8) * (p.pattern.rows / 16 + 1) <
             kMost / (p.pattern.columns / 16 + 1) &&
         p.gpu.compute_capability >= 90 && StagedShape(p).shared_bytes <= p.gpu.shared_bytes;
}

// What patterns hide from costs, which are fitted to rows of about one length: where lengths vary
// by twice their mean tensor cores take 4 % longer, staged rows 15 %, and tiled rows of one group
// each 1.7 times as long. So something is added to what the latter two take.
constexpr double kForUnevenRows = 1.06;

// Where rows of x are not aligned they come number by number, which was not measured. Where they
// begin amid a sector of memory, 16 problems with 52 and 196 columns took 0.93 to 1.32 times as
// long as predicted without that factor, 1.1 times in the mean; it is a little more, so that tiled
// rows are chosen where they are faster.
double StagedCost(const SpmmProblem& p) {
  constexpr int64_t kSector = 32;  // bytes
  constexpr double kForSplitSectors = 1.12;
  const int64_t row_bytes = p.n * SizeOf(p.dtype);
  if (row_bytes % kWidestLoad != 0) return kOnDemand;
  return kForUnevenRows * (row_bytes % kSector == 0 ? 1 : kForSplitSectors) *
         StagedClocks(p, StagingOf(p)) / kClocksOfMicrosecond;
}

// Clocks are fitted to uniformly random matrices, 1024 x 1024 to 65536 x 2048, 0.5 to 30 % stored,
// of 32 to 256 columns; the rest in float32 to 28 problems on which it is the fastest, layers of a
// Transformer and of ResNet-50 and the smaller ones of the RNN set, most of them within 8 %. Where
// rows are very uneven it takes up to 1.9 times as long.
double TiledCost(const SpmmProblem& p) {
  struct Fit {
    double start, wave;               // of blocks that run at once
    double shared, own;               // of a wait of a group, with others or by itself
    double of_entry, of_lanes;        // clocks of a multiprocessor for an entry of a tile
    double permuted, permuted_lanes;  // and if it is, of more than eight lanes
  };
  constexpr Fit kWide{1.36, 2.26, 0.35, 0.505, 1.1, 0.1425, 0, 0.09};
  // Numbers of 16 bits are converted.
  constexpr Fit kNarrow{2, 2.15, 0.2, 1.6, 0.83, 0.268, 3.8, 0.25};
  constexpr double kMostWaits = 20;  // where values are permuted: then there are other loads
  const Fit& fit = SizeOf(p.dtype) == 2 ? kNarrow : kWide;
  const Tiling tiling = TilingOf(p);
  const int wide_lanes = tiling.lanes > 8 ? tiling.lanes - 8 : 0;
  const bool is_permuted = p.pattern.permutation.data != nullptr;
  const double permuted = is_permuted ? fit.permuted + fit.permuted_lanes * wide_lanes : 0;
  const double entry = permuted + fit.of_entry + tiling.lanes * fit.of_lanes;
  const auto tiles = static_cast<double>(CeilDivide(p.n, tiling.lanes * tiling.vector));
  const double entries = static_cast<double>(p.batch.count * p.pattern.nse) * tiles;
  // A group waits for memory each time: with a row to itself the first two times, then there are
  // other groups' loads; if it shares long ones, until the block's last group is done.
  const double times = MeanLength(p) * tiling.rows / (tiling.at_once * GroupsOf(tiling));
  const bool shared = tiling.rows < GroupsOf(tiling);
  const double waits = shared
                           ? fit.shared * (is_permuted && times > kMostWaits ? kMostWaits : times)
                           : fit.own * (times < 2 ? times : 2);
  const double microseconds = fit.start + fit.wave * TiledWaves(p, tiling) + waits +
                              entries * entry / (p.gpu.multiprocessors * kClocksOfMicrosecond);
  return shared ? microseconds : kForUnevenRows * microseconds;
}

double TensorCost(const SpmmProblem& p) {
  const TensorTiling tiling = TensorTilingOf<kIfFaster>(p);
  const Preparation prepared = PreparationOf(p, tiling.columns);
  constexpr double kToFindStarts = 1.4e-6;  // of an entry
  const double found = prepared.own_starts == 0 ? 0 : static_cast<double>(p.pattern.nse);
  return TensorMicroseconds(p, tiling) + found * kToFindStarts +
         static_cast<double>(prepared.ComponentsBytes()) / kComponentsBytes;
}

// The kernel before it, which takes 1.4 to 3 times as long.
double GenericCost(const SpmmProblem& p) { return 2 * TiledCost(p); }

// Rows of the table: on tensor cores, for tiles with all techniques or without one.
template <const Sharing& kSharing>
constexpr CudaVariant<SpmmProblem> TensorCores(const char* name,
                                               double (*cost)(const SpmmProblem&)) {
  return {name,
          FitsTensorCores<kSharing>,
          cost,
          TensorInstance<kSharing>,
          TensorShape<kSharing>,
          &kPrepare<kSharing>,
          Complete<kSharing>};
}
template <SpmmTechnique kWithout>
constexpr CudaVariant<SpmmProblem> TiledRows(const char* name, double (*cost)(const SpmmProblem&)) {
  return {name,
          [](const SpmmProblem& p) { return FitsTiledWithout(kWithout, p); },
          cost,
          [](const SpmmProblem& p) { return TiledInstance(p, kWithout); },
          [](const SpmmProblem& p) { return TiledShape(p, kWithout); },
          nullptr,
          [](SpmmProblem* p) { return CompleteTiled(p, kWithout); }};
}

constexpr CudaVariant<SpmmProblem> kVariants[] = {
    {"generic_rows", [](const SpmmProblem& p) { return !p.dense_on_left; }, GenericCost,
     [](const SpmmProblem& p) { return Instance("SpmmRows", p); }, RowsShape},
    {"generic_dots", [](const SpmmProblem& p) { return p.dense_on_left; }, GenericCost,
     [](const SpmmProblem& p) { return Instance("SpmmDots", p); }, DotsShape},
    TiledRows<SpmmTechnique::kNone>("tiled_rows", TiledCost),
    TiledRows<SpmmTechnique::kWideLoads>("tiled_rows_scalar", kByName),
    TiledRows<SpmmTechnique::kSharing>("tiled_rows_unshared", kByName),
    TiledRows<SpmmTechnique::kOrder>("tiled_rows_unordered", kByName),
    TiledRows<SpmmTechnique::kUnrolledRest>("tiled_rows_rolled", kByName),
    TiledRows<SpmmTechnique::kLateScaling>("tiled_rows_prescaled", kByName),
    {"staged_rows", FitsStaged, StagedCost, StagedInstance, StagedShape},
    TensorCores<kIfFaster>("tensor_cores", TensorCost),
    TensorCores<kUnshared>("tensor_cores_unshared", kByName),
    TensorCores<kShared>("tensor_cores_shared", kByName),
};

}  // namespace

extern constinit const Table<CudaVariant<SpmmProblem>> kSpmmCudaVariants = MakeTable(kVariants);

}  // namespace jaxsparse
