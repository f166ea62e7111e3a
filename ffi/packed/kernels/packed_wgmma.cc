// The product by a packed matrix on tensor cores of warpgroups: its configuration, launch, fit and
// cost.
#include "packed/kernels/packed_wgmma.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "nvrtc/tensor_map.h"
#include "packed/kernels/packed_launch.h"

namespace jaxsparse {
namespace {

// Whole rows in a block, where x is small enough for as many ranges to read it from the L2 cache
// for few strips, and to have room.
constexpr int MostRanges(int columns) { return columns <= 16 ? 4 : 2; }

constexpr bool AllHaveRoom() {
  for (int cell = 1; cell <= 2; ++cell) {
    for (int columns = 8; columns <= kWidestPackedTile; columns *= 2) {
      for (int ranges = 1; ranges <= MostRanges(columns); ranges *= 2) {
        const PackedWgmmaConfig config{.cell = cell, .columns = columns, .ranges = ranges};
        if (!config.HasRoom()) return false;
      }
    }
  }
  return true;
}
static_assert(AllHaveRoom());

PackedWgmmaConfig ConfigOf(const PackedProblem& p) {
  PackedWgmmaConfig config;
  config.numbers = p.numbers;
  config.cell = p.cell;
  config.x_on_left = p.x_on_left || p.n == 1;  // one column is a line
  while (config.columns < kWidestPackedTile && config.columns < p.n) config.columns *= 2;
  const int most = MostRanges(config.columns);
  while (config.ranges < most && p.parts % (2 * config.ranges) == 0) config.ranges *= 2;
  return config;
}

int BlocksOfCluster(const PackedProblem& p, const PackedWgmmaConfig& config) {
  return static_cast<int>(p.parts) / config.ranges;
}

KernelSource Source(const PackedProblem& p) {
  const PackedWgmmaConfig config = ConfigOf(p);
  return {"packed/kernels/packed_wgmma.cu",
          KernelExpression(
              "PackedWgmma",
              {TypeName(p.dtype), TypeName(p.out_dtype),
               ConfigExpression("PackedWgmmaConfig",
                                {NumbersField(config.numbers), Field("cell", config.cell),
                                 Field("columns", config.columns), Field("ranges", config.ranges),
                                 Field("x_on_left", config.x_on_left)})})};
}

LaunchShape Shape(const PackedProblem& p) {
  const PackedWgmmaConfig config = ConfigOf(p);
  const int cluster = BlocksOfCluster(p, config);
  int64_t tiles = PackedTiles(p, config.TileRows(), config.columns);
  if (cluster == 1 && config.MakesMoreTiles()) {
    tiles = std::min<int64_t>(tiles, p.gpu.multiprocessors);
  }
  return {tiles * cluster, config.Threads(), config.SharedBytes(), cluster};
}

std::string Launch(const PackedProblem& p, const CudaLaunch& launch) {
  PackedWgmmaProblem wgmma{p};
  const PackedWgmmaConfig config = ConfigOf(p);
  std::string reason;
  if (CopiesTiles(p, config)) {
    const int64_t lines = config.x_on_left ? p.n : p.k, width = config.x_on_left ? p.k : p.n;
    reason = EncodeTensorMap({p.x.data, 1, lines, width}, &wgmma.tiles_of_x,
                             {config.XLines(), config.XWidth()});
  }
  return reason.empty() ? launch.With(&wgmma) : reason;
}

bool Fits(const PackedProblem& p) {
  if (p.cell == 0 || !FitsPacked(p)) return false;
  const PackedWgmmaConfig config = ConfigOf(p);
  return p.gpu.compute_capability == 90 && p.parts <= kMostBlocksOfCluster * config.ranges &&
         config.SharedBytes() <= p.gpu.shared_bytes;
}

// Predicted, as an H200 was measured with 8192 x 8192: what a fragment takes of a warp, or memory
// for all. Until the first words are there 3 us pass, which are most of kStart; clusters wait for
// theirs in each wave.
double Cost(const PackedProblem& p) {
  constexpr double kStart = 4.5, kForBlock = 0.4;
  const PackedWgmmaConfig config = ConfigOf(p);
  // An instruction takes a warp so many clocks more, as cells of 1 and of 2 were measured.
  constexpr double kOfInstruction = 0.3;
  const int cluster = BlocksOfCluster(p, config);
  const int64_t blocks = PackedTiles(p, config.TileRows(), config.columns) * cluster;
  // The blocks of a larger cluster are in one of the groups that multiprocessors come in, some of
  // which have fewer of these.
  constexpr int kGroup = 16, kMissing = 2;
  const int64_t groups = std::max<int64_t>(p.gpu.multiprocessors / kGroup, 1);
  const int64_t clusters = std::max<int64_t>(groups * (kGroup / cluster) - kMissing, 1);
  const int64_t at_once = cluster <= 2 ? p.gpu.multiprocessors : clusters * cluster;
  const double of_column = config.IsForTiles() ? 0.17 : 0.22;
  // Where one warp copies for all of a block, others wait for it.
  const double waits = config.ranges == 1 ? 8.5 : 0;
  const double clocks = (p.cell == 1 ? 13.9 : 9.7) +
                        kOfInstruction * InstructionsOfNumbers(p.numbers) +
                        of_column * config.columns + waits;
  const bool waves = cluster > 1 || !config.MakesMoreTiles();
  const double starts = waves ? static_cast<double>(CeilDivide(blocks, at_once)) : 1;
  return kStart * starts + PackedMicroseconds(p, blocks, at_once, config.warps, clocks) +
         kForBlock * (cluster - 1);
}

}  // namespace

extern constinit const PackedVariant kPackedWgmma{"packed_wgmma", Fits,    Cost,  Source,
                                                  Shape,          nullptr, Launch};

}  // namespace jaxsparse
