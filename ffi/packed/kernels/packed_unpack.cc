// The kernel that writes a packed matrix out: its configuration, launch, fit and cost.
#include "packed/kernels/packed_unpack.h"

#include "nvrtc/expression.h"
#include "packed/kernels/packed_launch.h"

namespace jaxsparse {
namespace {

PackedUnpackConfig ConfigOf(const PackedProblem& p) {
  PackedUnpackConfig config;
  config.numbers = p.numbers;
  config.cell = p.cell;
  config.bulk = p.gpu.compute_capability >= 90;
  while (config.warps > 1 && config.SharedBytes() > p.gpu.shared_bytes) config.warps /= 2;
  return config;
}

KernelSource Source(const PackedProblem& p) {
  const PackedUnpackConfig config = ConfigOf(p);
  return {"packed/kernels/packed_unpack.cu",
          KernelExpression(
              "PackedUnpack",
              {TypeName(p.dtype),
               ConfigExpression("PackedUnpackConfig",
                                {NumbersField(config.numbers), Field("cell", config.cell),
                                 Field("warps", config.warps), Field("bulk", config.bulk)})})};
}

LaunchShape Shape(const PackedProblem& p) {
  const PackedUnpackConfig config = ConfigOf(p);
  return {CeilDivide(PackedStrips(p) * p.parts, config.warps), config.warps * kWarp,
          config.SharedBytes()};
}

bool Fits(const PackedProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return p.cell > 0 && p.gpu.compute_capability >= 80 && p.m < kMost && p.k < kMost &&
         ConfigOf(p).SharedBytes() <= p.gpu.shared_bytes;
}

// Predicted: what passes through memory.
double Cost(const PackedProblem& p) {
  constexpr double kStart = 2.5, kBytes = 4.1e6;
  const double places = static_cast<double>(p.m) * static_cast<double>(p.k);
  const double bytes = static_cast<double>(p.words * kPackedRowBytes) + places / (8 * p.cell);
  return kStart + (bytes + 2 * places) / kBytes;
}

}  // namespace

extern constinit const PackedVariant kPackedUnpack{"packed_unpack", Fits, Cost, Source, Shape};

}  // namespace jaxsparse
