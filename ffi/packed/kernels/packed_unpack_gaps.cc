// The kernel that writes a matrix packed by gaps out: its launch, fit and cost.
#include "nvrtc/expression.h"
#include "packed/kernels/packed_launch.h"
#include "packed/kernels/packed_unpack.h"

namespace jaxsparse {
namespace {

KernelSource Source(const PackedProblem& p) {
  return {"packed/kernels/packed_unpack_gaps.cu",
          KernelExpression("PackedUnpackGaps", {TypeName(p.dtype), NumbersField(p.numbers).value})};
}

LaunchShape Shape(const PackedProblem& p) {
  return {CeilDivide(GapStrips(p) * p.parts, UnpackGapsConfig::kWarps),
          UnpackGapsConfig::kWarps * kWarp, UnpackGapsConfig::kSharedBytes};
}

bool Fits(const PackedProblem& p) {
  return p.cell == 0 && p.gpu.compute_capability >= 80 && FitsPacked(p);
}

// Predicted: what passes through memory.
double Cost(const PackedProblem& p) {
  constexpr double kStart = 2.5, kBytes = 3.0e6;
  const double places = static_cast<double>(p.m) * static_cast<double>(p.k);
  return kStart + (GapBytes(p) + 2 * places) / kBytes;
}

}  // namespace

extern constinit const PackedVariant kPackedUnpackGaps{"packed_unpack_gaps", Fits, Cost, Source,
                                                       Shape};

}  // namespace jaxsparse
