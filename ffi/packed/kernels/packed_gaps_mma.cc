// The product on tensor cores by a matrix that is packed by gaps: its configuration, launch, fit
// and cost.
#include "packed/kernels/packed_gaps_mma.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "packed/kernels/packed_launch.h"

namespace jaxsparse {
namespace {

int64_t Width(const PackedProblem& p) { return GapRangeColumns(p.k, p.parts); }

// A team for all parts of a strip where shared memory has room for what they read of x; else the
// blocks of a cluster have a part each, or a warp takes one after another. Columns are multiplied
// by sixteens where there are more than eight.
PackedGapsMmaConfig ConfigOf(const PackedProblem& p) {
  PackedGapsMmaConfig config;
  const auto fits = [&] { return config.SharedBytes(Width(p)) <= p.gpu.shared_bytes; };
  const auto parts = static_cast<int>(std::min<int64_t>(p.parts, config.kMostWarps + 1));
  config.numbers = p.numbers;
  config.x_on_left = p.x_on_left;
  for (config.columns = p.n > 8 ? 16 : 8;; config.columns = 8) {
    config.team = parts, config.cluster = 1;
    if (parts <= config.kMostWarps && fits()) return config;
    config.team = 1, config.cluster = parts;
    if (parts <= config.kMostCluster && p.gpu.compute_capability >= 90 && fits()) return config;
    config.cluster = 1;
    if (fits() || config.columns == 8) return config;
  }
}

KernelSource Source(const PackedProblem& p) {
  const PackedGapsMmaConfig config = ConfigOf(p);
  return {"packed/kernels/packed_gaps_mma.cu",
          KernelExpression(
              "PackedGapsMma",
              {TypeName(p.dtype), TypeName(p.out_dtype),
               ConfigExpression("PackedGapsMmaConfig",
                                {NumbersField(config.numbers), Field("columns", config.columns),
                                 Field("team", config.team), Field("cluster", config.cluster),
                                 Field("x_on_left", config.x_on_left)})})};
}

LaunchShape Shape(const PackedProblem& p) {
  const PackedGapsMmaConfig config = ConfigOf(p);
  return GapsShape(p, {config.columns, config.team, config.kMostWarps, config.cluster},
                   config.SharedBytes(Width(p)));
}

std::string Launch(const PackedProblem& p, const CudaLaunch& launch) {
  const PackedGapsMmaConfig config = ConfigOf(p);
  PackedGapsProblem gaps(p, config.columns, config.team * config.cluster,
                         Shape(p).blocks / config.cluster);
  return launch.With(&gaps);
}

bool Fits(const PackedProblem& p) {
  return p.cell == 0 && p.gpu.compute_capability >= 80 && FitsPacked(p) &&
         ConfigOf(p).SharedBytes(Width(p)) <= p.gpu.shared_bytes;
}

// Predicted: what passes through memory, or through shared memory, 128 bytes a clock, or the
// products of tensor cores.
double Cost(const PackedProblem& p) {
  constexpr double kStart = 4, kSharedBytes = 128, kClocksOfProduct = 7;
  const double rate = p.numbers == PackedNumbers::kPlain ? 4.5e6 : 3.9e6;  // bytes
  const PackedGapsMmaConfig config = ConfigOf(p);
  const double numbers = static_cast<double>(p.words) * kGapNumbers * kWarp;
  const double multiprocessors = p.gpu.multiprocessors;
  const double shared = numbers * 17 * config.Planes() / (kSharedBytes * multiprocessors);
  const double products = numbers / 16 * kClocksOfProduct / (4 * multiprocessors);
  const auto tiles = static_cast<double>(CeilDivide(p.n, config.columns));
  return kStart + tiles * std::max(GapBytes(p) / rate,
                                   1.1 * std::max(shared, products) / kClocksOfMicrosecond);
}

}  // namespace

extern constinit const PackedVariant kPackedGapsMma{"packed_gaps_mma", Fits,  Cost, Source, Shape,
                                                    nullptr,           Launch};

}  // namespace jaxsparse
