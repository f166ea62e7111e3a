// The product by a matrix that is packed by gaps: its configuration, launch, fit and cost.
#include "packed/kernels/packed_gaps.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "packed/kernels/packed_launch.h"

namespace jaxsparse {
namespace {

constexpr int kMostTeam = 8;

int64_t Width(const PackedProblem& p) { return GapRangeColumns(p.k, p.parts); }

// A team for all parts of a strip where shared memory has room for what they read of x; else a warp
// takes one after another.
PackedGapsConfig ConfigOf(const PackedProblem& p) {
  PackedGapsConfig config;
  config.numbers = p.numbers;
  while (config.columns < kMostGapColumns && config.columns < p.n) config.columns *= 2;
  config.x_on_left = p.x_on_left;
  if (p.parts <= kMostTeam) config.team = static_cast<int>(p.parts);
  if (config.SharedBytes(Width(p)) > p.gpu.shared_bytes) config.team = 1;
  return config;
}

KernelSource Source(const PackedProblem& p) {
  const PackedGapsConfig config = ConfigOf(p);
  return {
      "packed/kernels/packed_gaps.cu",
      KernelExpression(
          "PackedGaps",
          {TypeName(p.dtype), TypeName(p.out_dtype),
           ConfigExpression("PackedGapsConfig",
                            {NumbersField(config.numbers), Field("columns", config.columns),
                             Field("team", config.team), Field("x_on_left", config.x_on_left)})})};
}

LaunchShape Shape(const PackedProblem& p) {
  const PackedGapsConfig config = ConfigOf(p);
  return GapsShape(p, {config.columns, config.team, config.MostWarps()},
                   config.SharedBytes(Width(p)));
}

std::string Launch(const PackedProblem& p, const CudaLaunch& launch) {
  const PackedGapsConfig config = ConfigOf(p);
  PackedGapsProblem gaps(p, config.columns, config.team, Shape(p).blocks);
  return launch.With(&gaps);
}

bool Fits(const PackedProblem& p) {
  return p.cell == 0 && p.gpu.compute_capability >= 80 && FitsPacked(p) &&
         ConfigOf(p).SharedBytes(Width(p)) <= p.gpu.shared_bytes;
}

// Instructions that a number takes more than one of 16 bits, counted in machine code of compute
// capability 9.0. On 8.0 both take 2.2 to 2.4.
double InstructionsOfByte(PackedNumbers numbers) {
  switch (numbers) {
    case PackedNumbers::kPlain:
      return 0;
    case PackedNumbers::kInt8:
      return 1.1;
    case PackedNumbers::kE4M3:
      return 0.7;
  }
  return 0;
}

// Predicted: what passes through memory, or instructions of numbers.
double Cost(const PackedProblem& p) {
  constexpr double kStart = 4, kSchedulers = 4;
  const double rate = p.numbers == PackedNumbers::kPlain ? 4.7e6 : 3.9e6;  // bytes
  const PackedGapsConfig config = ConfigOf(p);
  const double numbers = static_cast<double>(p.words) * kGapNumbers;  // of a lane
  const double instructions =
      (config.columns == 1 ? 6.2 : 17 + 0.8 * config.columns) + InstructionsOfByte(p.numbers);
  const double issued = numbers * instructions / (kSchedulers * p.gpu.multiprocessors);
  const double bytes = GapBytes(p) / rate;
  const auto tiles = static_cast<double>(CeilDivide(p.n, config.columns));
  return kStart + tiles * std::max(bytes, issued / kClocksOfMicrosecond);
}

}  // namespace

extern constinit const PackedVariant kPackedGaps{"packed_gaps", Fits,    Cost,  Source,
                                                 Shape,         nullptr, Launch};

}  // namespace jaxsparse
