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
  config.numbers = p.numbers;
  config.cell = p.cell;
  config.x_on_left = p.x_on_left;
  while (config.columns < kWidestPackedTile && config.columns < p.n) config.columns *= 2;
  return config;
}

KernelSource Source(const PackedProblem& p) {
  const PackedWgmmaConfig config = ConfigOf(p);
  return {
      "packed/kernels/packed_wgmma.cu",
      KernelExpression("PackedWgmma",
                       {TypeName(p.dtype), TypeName(p.out_dtype),
                        ConfigExpression("PackedWgmmaConfig",
                                         {NumbersField(config.numbers), Field("cell", config.cell),
                                          Field("columns", config.columns),
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

// Predicted, as an H200 was measured with 8192 x 8192: what a fragment takes of a warp, which is
// bound by instructions, or memory for all.
double Cost(const PackedProblem& p) {
  constexpr double kStart = 3.9, kForPart = 0.3;
  // The blocks of a cluster are in one of the groups that multiprocessors come in.
  constexpr int kGroup = 16;
  const int64_t at_once = p.parts <= 2 ? p.gpu.multiprocessors
                                       : std::max<int64_t>(p.gpu.multiprocessors / kGroup, 1) *
                                             (kGroup / p.parts * p.parts);
  const PackedWgmmaConfig config = ConfigOf(p);
  const double of_column = p.x_on_left ? 0.22 : 0.16;
  const double clocks =
      (p.cell == 1 ? 19.0 : 15.4) + ClocksOfNumbers(p.numbers) + of_column * config.columns;
  return kStart + PackedMicroseconds(p, Shape(p).blocks, at_once, config.warps, clocks) +
         kForPart * static_cast<double>(p.parts);
}

}  // namespace

extern constinit const PackedVariant kPackedWgmma{"packed_wgmma", Fits, Cost, Source, Shape};

}  // namespace jaxsparse
