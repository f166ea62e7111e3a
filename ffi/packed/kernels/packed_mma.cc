// The product by a packed matrix on tensor cores of single warps: its configuration, launch,
// workspace, fit and cost.
#include "packed/kernels/packed_mma.h"

#include "nvrtc/expression.h"
#include "packed/kernels/packed_launch.h"

namespace jaxsparse {
namespace {

constexpr int kStaticBytes = 16;  // of shared memory, beside what the configuration asks for

// As many columns as there are, and as many warps and stages as shared memory has room for; without
// warps if it has for none.
PackedMmaConfig ConfigOf(const PackedProblem& p) {
  PackedMmaConfig config;
  config.numbers = p.numbers;
  config.cell = p.cell;
  config.x_on_left = p.x_on_left;
  config.bulk = p.gpu.compute_capability >= 90;
  while (config.columns < kWidestPackedTile && config.columns < p.n) config.columns *= 2;
  for (; config.columns >= 8; config.columns /= 2) {
    for (config.warps = 8; config.warps >= 2; config.warps /= 2) {
      for (config.stages = 3; config.stages >= 2; --config.stages) {
        if (config.SharedBytes() + kStaticBytes <= p.gpu.shared_bytes) return config;
      }
    }
  }
  config.warps = 0;
  return config;
}

KernelSource Source(const PackedProblem& p) {
  const PackedMmaConfig config = ConfigOf(p);
  return {
      "packed/kernels/packed_mma.cu",
      KernelExpression(
          "PackedMma",
          {TypeName(p.dtype), TypeName(p.out_dtype),
           ConfigExpression("PackedMmaConfig",
                            {NumbersField(config.numbers), Field("cell", config.cell),
                             Field("columns", config.columns), Field("warps", config.warps),
                             Field("stages", config.stages), Field("x_on_left", config.x_on_left),
                             Field("bulk", config.bulk)})})};
}

LaunchShape Shape(const PackedProblem& p) {
  const PackedMmaConfig config = ConfigOf(p);
  return {PackedTiles(p, config.TileRows(), config.columns) * p.parts, config.warps * kWarp,
          config.SharedBytes()};
}

// No block has arrived yet.
constexpr CudaKernel<PackedProblem> kPrologue{
    [](const PackedProblem&) {
      return KernelSource{"packed/kernels/packed_prologue.cu", "jaxsparse::PackedPrologue"};
    },
    [](const PackedProblem& p) {
      constexpr int kThreads = 256;
      return LaunchShape{CeilDivide(PackedCountsBytes(p) / 16, kThreads), kThreads};
    }};

// Whichever tiles there will be: the last of them may be nearly empty.
int64_t WorkspaceBytes(const PackedProblem& p, bool) {
  constexpr int kMostRows = 8 * kPackedStripRows;
  return PackedWorkspaceBytes(p, kMostRows, kWidestPackedTile);
}

bool Fits(const PackedProblem& p) {
  if (p.cell == 0 || !FitsPacked(p)) return false;
  const PackedMmaConfig config = ConfigOf(p);
  return config.warps > 0 && p.gpu.compute_capability >= 80 &&
         PackedWorkspaceBytes(p, config.TileRows(), config.columns) <= p.workspace.bytes;
}

// Predicted, as an H200 was measured with 8192 x 8192: what a fragment takes of a warp, which is
// bound by instructions, or memory for all.
double Cost(const PackedProblem& p) {
  constexpr double kStart = 3.9, kForPart = 0.3, kOfColumn = 0.6, kOfInstruction = 0.45;
  const PackedMmaConfig config = ConfigOf(p);
  const double clocks = (p.cell == 1 ? 19.0 : 15.0) +
                        kOfInstruction * InstructionsOfNumbers(p.numbers) +
                        kOfColumn * config.columns;
  return kStart +
         PackedMicroseconds(p, Shape(p).blocks, p.gpu.multiprocessors, config.warps, clocks) +
         kForPart * static_cast<double>(p.parts);
}

}  // namespace

extern constinit const PackedVariant kPackedMma{"packed_mma", Fits,       Cost,    Source,
                                                Shape,        &kPrologue, nullptr, WorkspaceBytes};

}  // namespace jaxsparse
