// Staged kernel of the sparse-dense product: its configuration, launch, fit and cost.
#include "spmm/kernels/staged.h"

#include "nvrtc/expression.h"
#include "spmm/cost.h"
#include "spmm/spmm_cuda.h"

namespace jaxsparse {
namespace {

constexpr int kWidestLoad = 16;  // bytes
// With so narrow rows of x, entries are waited for: bringing them nearer takes 3 to 12 % less time,
// with wider ones up to 8 % more.
constexpr int kMostPrefetchedLanes = 8;

struct Tiles {
  int64_t across, down;
};

Tiles TilesOf(const SpmmProblem& p, const SpmmStagedConfig& config) {
  const int64_t columns = config.RowBytes() / SizeOf(p.dtype);
  return {p.batch.count * CeilDivide(p.n, columns), CeilDivide(p.pattern.rows, config.TileRows())};
}

// Clocks of the multiprocessor that has most to do, fitted to 68 problems of float32, 1024 x 1024
// to 32768 x 8192, 32 and 128 columns, 10 to 30 % stored, and to 18 of float16.
double Clocks(const SpmmProblem& p, const SpmmStagedConfig& config) {
  constexpr double kStart = 6060, kForTile = 4235, kL2Bytes = 40;  // a clock and multiprocessor
  const double vector = static_cast<double>(kWidestLoad / SizeOf(p.dtype));
  const double bytes = config.RowBytes(), inner = static_cast<double>(p.pattern.columns);
  const Tiles tiles = TilesOf(p, config);
  const double rows =
      static_cast<double>(CeilDivide(p.pattern.rows, tiles.down > 0 ? tiles.down : 1));
  // What comes from shared memory, or else multiplications and conversions.
  const double by_bytes = bytes * 1.015 / 128, by_columns = config.lanes * vector * 0.0215;
  const double entry =
      0.78 + (config.permuted ? 1.2 : 0) + (by_bytes > by_columns ? by_bytes : by_columns);
  // Of a row, in a panel.
  const double visit = 8.3 * (config.permuted ? 5 : 1) * (kWarp / config.lanes) * vector / 4;
  const double shared =
      rows * (SpmmMeanRowLength(p) * entry + CeilDivide(p.pattern.columns, config.panel) * visit);
  const double l2 = inner * bytes / kL2Bytes;
  const double prefetched = config.prefetched ? 0.9 : 1;
  return static_cast<double>(CeilDivide(tiles.across * tiles.down, p.gpu.multiprocessors)) *
             ((shared > l2 ? shared : l2) * prefetched + kForTile) +
         kStart;
}

// The least clocks; among equals the widest rows of x, whose entries are walked over least often.
SpmmStagedConfig BestConfig(const SpmmProblem& p) {
  const int elements = static_cast<int>(kWidestLoad / SizeOf(p.dtype));  // of a lane
  const int least_lanes = p.dtype == DType::kFloat32 ? 8 : 4;            // 32 columns
  const int most_lanes = 4 * least_lanes;
  const int most_rows = 32 / elements;  // so that sums fit into registers
  SpmmStagedConfig config, best;
  config.permuted = p.pattern.permutation.data != nullptr;
  bool is_first = true;
  for (config.lanes = least_lanes; config.lanes <= most_lanes; config.lanes *= 2) {
    config.prefetched = config.lanes <= kMostPrefetchedLanes;
    config.panel = PanelRows(p.pattern.columns, kPanelsBytes / config.stages / config.RowBytes());
    for (config.rows = 1; config.rows <= most_rows; config.rows *= 2) {
      if (is_first || Clocks(p, config) <= Clocks(p, best)) best = config;
      is_first = false;
    }
  }
  return best;
}

KernelSource Source(const SpmmProblem& p) {
  const SpmmStagedConfig config = BestConfig(p);
  return {
      "spmm/kernels/staged.cu",
      KernelExpression(
          "SpmmStaged",
          {TypeName(p.dtype), TypeName(p.out_dtype), TypeName(p.pattern.index_type),
           ConfigExpression("SpmmStagedConfig",
                            {Field("lanes", config.lanes), Field("rows", config.rows),
                             Field("panel", config.panel), Field("stages", config.stages),
                             Field("warps", config.warps), Field("prefetched", config.prefetched),
                             Field("permuted", config.permuted)})})};
}

LaunchShape Shape(const SpmmProblem& p) {
  const SpmmStagedConfig config = BestConfig(p);
  const Tiles tiles = TilesOf(p, config);
  const int64_t all = tiles.across * tiles.down, blocks = p.gpu.multiprocessors;
  return {all < blocks ? all : blocks, config.warps * kWarp, config.SharedBytes()};
}

// Counters, of panels too, and places in the pipeline of 32 bits; barriers that count copies.
bool Fits(const SpmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30, kWidestRow = 512;
  return SpmmFitsTiledRows(p) && p.dtype != DType::kFloat64 &&
         p.pattern.columns * kWidestRow < kMost &&
         p.batch.count * CeilDivide(p.n, 8) * (p.pattern.rows / 16 + 1) <
             kMost / (p.pattern.columns / 16 + 1) &&
         p.gpu.compute_capability >= 90 && Shape(p).shared_bytes <= p.gpu.shared_bytes;
}

// Where rows of x are not aligned they come number by number, which was not measured. Where they
// begin amid a sector of memory, 16 problems with 52 and 196 columns took 0.93 to 1.32 times as
// long as predicted without that factor, 1.1 times in the mean; it is a little more, so that tiled
// rows are chosen where they are faster.
double Cost(const SpmmProblem& p) {
  constexpr int64_t kSector = 32;  // bytes
  constexpr double kForSplitSectors = 1.12;
  const int64_t row_bytes = p.n * SizeOf(p.dtype);
  if (row_bytes % kWidestLoad != 0) return kCostByName;
  return kSpmmForUnevenRows * (row_bytes % kSector == 0 ? 1 : kForSplitSectors) *
         Clocks(p, BestConfig(p)) / kClocksOfMicrosecond;
}

}  // namespace

extern constinit const SpmmVariant kSpmmStagedRows{"staged_rows", Fits, Cost, Source, Shape};

}  // namespace jaxsparse
