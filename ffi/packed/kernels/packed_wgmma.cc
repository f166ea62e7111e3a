// The product by a packed matrix on tensor cores of warpgroups: its configuration, launch, fit and
// cost.
#include "packed/kernels/packed_wgmma.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "packed/kernels/packed_launch.h"

namespace jaxsparse {
namespace {

PackedWgmmaConfig ConfigOf(const PackedProblem& p) {
  PackedWgmmaConfig config;
  config.cell = p.cell;
  config.x_on_left = p.x_on_left;
  while (config.columns < kWidestPackedTile && config.columns < p.n) config.columns *= 2;
  return config;
}

KernelSource Source(const PackedProblem& p) {
  const PackedWgmmaConfig config = ConfigOf(p);
  return {"packed/kernels/packed_wgmma.cu",
          KernelExpression(
              "PackedWgmma",
              {TypeName(p.dtype), TypeName(p.out_dtype),
               ConfigExpression("PackedWgmmaConfig",
                                {Field("cell", config.cell), Field("columns", config.columns),
                                 Field("x_on_left", config.x_on_left)})})};
}

LaunchShape Shape(const PackedProblem& p) {
  const PackedWgmmaConfig config = ConfigOf(p);
  return {PackedTiles(p, config.TileRows(), config.columns) * p.parts, config.Threads(),
          config.SharedBytes(), static_cast<int>(p.parts)};
}

bool Fits(const PackedProblem& p) {
  const PackedWgmmaConfig config = ConfigOf(p);
  return p.gpu.compute_capability == 90 && FitsPacked(p) && p.parts <= kMostPartsOfCluster &&
         config.SharedBytes() <= p.gpu.shared_bytes;
}

// Predicted: what shared memory takes of a fragment, or memory for all.
double Cost(const PackedProblem& p) {
  constexpr double kStart = 2.5, kForPart = 0.3, kShare = 0.95;
  // The blocks of a cluster are in one of the groups that multiprocessors come in.
  constexpr int kGroup = 16;
  const int64_t at_once = p.parts <= 2 ? p.gpu.multiprocessors
                                       : std::max<int64_t>(p.gpu.multiprocessors / kGroup, 1) *
                                             (kGroup / p.parts * p.parts);
  const PackedWgmmaConfig config = ConfigOf(p);
  const double of_x = config.columns <= 8 ? 0.5 : config.columns / 16.0;
  const double clocks = (p.cell == 1 ? 9.9 : 5.2) + of_x;
  return kStart + PackedMicroseconds(p, Shape(p).blocks, at_once, config.warps, clocks) / kShare +
         kForPart * static_cast<double>(p.parts);
}

}  // namespace

extern constinit const PackedVariant kPackedWgmma{"packed_wgmma", Fits, Cost, Source, Shape};

}  // namespace jaxsparse
