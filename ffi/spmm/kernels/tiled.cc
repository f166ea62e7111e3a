// Tiled kernel of the sparse-dense product: its configuration, launch, fit and cost.
#include "spmm/kernels/tiled.h"

#include <string>

#include "nvrtc/expression.h"
#include "spmm/cost.h"
#include "spmm/spmm_cuda.h"

namespace jaxsparse {
namespace {

constexpr int kWidestLoad = 16;  // bytes

int64_t Blocks(const SpmmProblem& p, const SpmmTiledConfig& config) {
  return p.batch.count * CeilDivide(p.n, config.Columns()) *
         CeilDivide(p.pattern.rows, config.rows);
}

int64_t BlocksAtOnce(const SpmmProblem& p) {
  return int64_t{p.gpu.multiprocessors} * SpmmTiledBlocks(SizeOf(p.dtype));
}

// How many times all places for blocks are taken, a part of one as all of it if it is the only one.
double Waves(const SpmmProblem& p, const SpmmTiledConfig& config) {
  const double waves =
      static_cast<double>(Blocks(p, config)) / static_cast<double>(BlocksAtOnce(p));
  return waves > 1 ? waves : 1;
}

// As few rows for a block as let all blocks run at once. On 72 pruned matrices of 64 to 2048 rows,
// and 64 to 2048 columns of x, half as many rows take 6 to 25 % more time in the mean, twice as
// many 10 to 21 %; eight entries at once 3 % less than four where a group has so many. In 16 bits
// eight take 3 to 25 % less time where a multiprocessor has few blocks, up to 18 % more where the
// threads of three hide what is waited for.
SpmmTiledConfig BestConfig(const SpmmProblem& p) {
  constexpr int kMostShares = 32;  // of a row of mean length: one group adds them all up
  constexpr int kMostAtOnce = 8;   // where registers have room for them
  SpmmTiledConfig config;
  config.permuted = p.pattern.permutation.data != nullptr;
  config.batched = p.batch.rank > 0;
  config.vector = static_cast<int>(kWidestLoad / SizeOf(p.dtype));
  while (p.n % config.vector != 0) config.vector /= 2;
  config.lanes = LanesFor(CeilDivide(p.n, config.vector));
  const int groups = config.Groups();
  if (groups > kMostShares) config.rows = groups / kMostShares;
  while (config.rows < groups && Blocks(p, config) > BlocksAtOnce(p)) config.rows *= 2;
  const bool has_registers = p.dtype != DType::kFloat64 && !config.permuted;
  const bool hides = SizeOf(p.dtype) == 2 && Blocks(p, config) > 2 * p.gpu.multiprocessors &&
                     Blocks(p, config) <= BlocksAtOnce(p);
  if (has_registers && !hides && SpmmMeanRowLength(p) * config.rows >= kMostAtOnce * groups) {
    config.at_once = kMostAtOnce;
  }
  return config;
}

// The best configuration with all techniques, or without one.
SpmmTiledConfig ConfigWithout(SpmmTechnique technique, const SpmmProblem& p) {
  SpmmTiledConfig config = BestConfig(p);
  config.without = technique;
  if (technique == SpmmTechnique::kWideLoads) {
    config.lanes = LanesFor(p.n);
    config.vector = 1;
    if (config.rows > config.Groups()) config.rows = config.Groups();
  }
  if (technique == SpmmTechnique::kSharing) config.rows = config.Groups();
  return config;
}

// Columns that are scaled when they are loaded become places of 32 bits.
bool FitsWithout(SpmmTechnique technique, const SpmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 32;
  return SpmmFitsTiledRows(p) && (technique != SpmmTechnique::kLateScaling ||
                                  p.pattern.columns * p.n * SizeOf(p.dtype) <= kMost);
}

constexpr const char* kTechniques[] = {"kNone",  "kWideLoads",    "kSharing",
                                       "kOrder", "kUnrolledRest", "kLateScaling"};

std::string Expression(const SpmmTiledConfig& config) {
  const std::string technique = kTechniques[static_cast<int>(config.without)];
  return ConfigExpression(
      "SpmmTiledConfig",
      {Field("vector", config.vector), Field("lanes", config.lanes), Field("rows", config.rows),
       Field("at_once", config.at_once), Field("permuted", config.permuted),
       Field("without", "jaxsparse::SpmmTechnique::" + technique),
       Field("batched", config.batched)});
}

KernelSource SourceWithout(SpmmTechnique technique, const SpmmProblem& p) {
  return {"spmm/kernels/tiled.cu",
          KernelExpression("SpmmTiled", {TypeName(p.dtype), TypeName(p.out_dtype),
                                         TypeName(p.pattern.index_type),
                                         Expression(ConfigWithout(technique, p))})};
}

LaunchShape ShapeWithout(SpmmTechnique technique, const SpmmProblem& p) {
  const SpmmTiledConfig config = ConfigWithout(technique, p);
  return {Blocks(p, config), kSpmmTiledThreads, config.SharedBytes(SizeOf(p.dtype))};
}

// From where on one group would still add the longest row when all others are done with theirs, and
// for longer than it takes to share rows out.
uint32_t LongRowWithout(SpmmTechnique technique, const SpmmProblem& p) {
  constexpr double kMuch = 4, kToShareOut = 96, kMost = 1 << 30;
  const double waves = Waves(p, ConfigWithout(technique, p));
  const double length = kMuch * SpmmMeanRowLength(p) * waves + kToShareOut;
  return static_cast<uint32_t>(length < kMost ? length : kMost);
}

template <SpmmTechnique kWithout>
std::string Launch(const SpmmProblem& p, const CudaLaunch& launch) {
  SpmmTiledProblem tiled{p, LongRowWithout(kWithout, p)};
  return launch.With(&tiled);
}

// Fitted, in microseconds, or in clocks of a multiprocessor where it says so.
struct Fit {
  double start, wave;                            // of blocks that run at once
  double shared_wait, own_wait;                  // of a group, with others or by itself
  double entry_clocks, lane_clocks;              // of an entry of a tile, of each of its lanes
  double permuted_clocks, permuted_lane_clocks;  // more, if it is; of each lane above eight
};
constexpr Fit kWideFit{.start = 1.36,
                       .wave = 2.26,
                       .shared_wait = 0.35,
                       .own_wait = 0.505,
                       .entry_clocks = 1.1,
                       .lane_clocks = 0.1425,
                       .permuted_clocks = 0,
                       .permuted_lane_clocks = 0.09};
// Numbers of 16 bits are converted.
constexpr Fit kNarrowFit{.start = 2,
                         .wave = 2.15,
                         .shared_wait = 0.2,
                         .own_wait = 1.6,
                         .entry_clocks = 0.83,
                         .lane_clocks = 0.268,
                         .permuted_clocks = 3.8,
                         .permuted_lane_clocks = 0.25};

template <SpmmTechnique kWithout>
constexpr SpmmVariant TiledRows(const char* name, double (*cost)(const SpmmProblem&)) {
  return {name,
          [](const SpmmProblem& p) { return FitsWithout(kWithout, p); },
          cost,
          [](const SpmmProblem& p) { return SourceWithout(kWithout, p); },
          [](const SpmmProblem& p) { return ShapeWithout(kWithout, p); },
          nullptr,
          Launch<kWithout>};
}

}  // namespace

bool SpmmFitsTiledRows(const SpmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return !p.dense_on_left && p.n * SizeOf(p.dtype) < kMost && p.pattern.nse < kMost &&
         (p.n == 0 || p.pattern.rows * p.batch.count < kMost / p.n);
}

// Clocks are fitted to uniformly random matrices, 1024 x 1024 to 65536 x 2048, 0.5 to 30 % stored,
// of 32 to 256 columns; the rest in float32 to 28 problems on which it is the fastest, layers of a
// Transformer and of ResNet-50 and the smaller ones of the RNN set, most of them within 8 %. Where
// rows are very uneven it takes up to 1.9 times as long.
double SpmmTiledMicroseconds(const SpmmProblem& p) {
  constexpr double kMostWaits = 20;  // where values are permuted: then there are other loads
  const Fit& fit = SizeOf(p.dtype) == 2 ? kNarrowFit : kWideFit;
  const SpmmTiledConfig config = BestConfig(p);
  const int wide_lanes = config.lanes > 8 ? config.lanes - 8 : 0;
  const double permuted =
      config.permuted ? fit.permuted_clocks + fit.permuted_lane_clocks * wide_lanes : 0;
  const double entry = permuted + fit.entry_clocks + config.lanes * fit.lane_clocks;
  const auto tiles = static_cast<double>(CeilDivide(p.n, config.Columns()));
  const double entries = static_cast<double>(p.batch.count * p.pattern.nse) * tiles;
  // A group waits for memory each time: with a row to itself the first two times, then there are
  // other groups' loads; if it shares long ones, until the block's last group is done.
  const double times = SpmmMeanRowLength(p) * config.rows / (config.at_once * config.Groups());
  const bool shared = config.rows < config.Groups();
  const double waits =
      shared ? fit.shared_wait * (config.permuted && times > kMostWaits ? kMostWaits : times)
             : fit.own_wait * (times < 2 ? times : 2);
  const double microseconds = fit.start + fit.wave * Waves(p, config) + waits +
                              entries * entry / (p.gpu.multiprocessors * kClocksOfMicrosecond);
  return (shared ? 1 : kSpmmForUnevenRows) * (p.row_cuts.data == nullptr ? 1 : kSpmmForGraphs) *
         microseconds;
}

extern constinit const SpmmVariant kSpmmTiledRows =
    TiledRows<SpmmTechnique::kNone>("tiled_rows", SpmmTiledMicroseconds);
extern constinit const SpmmVariant kSpmmTiledRowsScalar =
    TiledRows<SpmmTechnique::kWideLoads>("tiled_rows_scalar", kByName);
extern constinit const SpmmVariant kSpmmTiledRowsUnshared =
    TiledRows<SpmmTechnique::kSharing>("tiled_rows_unshared", kByName);
extern constinit const SpmmVariant kSpmmTiledRowsUnordered =
    TiledRows<SpmmTechnique::kOrder>("tiled_rows_unordered", kByName);
extern constinit const SpmmVariant kSpmmTiledRowsRolled =
    TiledRows<SpmmTechnique::kUnrolledRest>("tiled_rows_rolled", kByName);
extern constinit const SpmmVariant kSpmmTiledRowsPrescaled =
    TiledRows<SpmmTechnique::kLateScaling>("tiled_rows_prescaled", kByName);

}  // namespace jaxsparse
