// Small planes of a depthwise convolution and of its transpose in x, on the host: which fit, their
// predicted time, their kernel and its launch.
#include "depthwise/kernels/depthwise_staged.h"

#include <algorithm>

#include "depthwise/cost.h"
#include "depthwise/depthwise_cuda.h"
#include "nvrtc/expression.h"

namespace jaxsparse {
namespace {

template <bool kTransposed>
int64_t PlanesOfBlock(const DepthwiseProblem& p) {
  return DepthwiseStagedPlanes(p, kTransposed, static_cast<int64_t>(SizeOf(p.dtype)));
}

template <bool kTransposed>
int64_t Blocks(const DepthwiseProblem& p) {
  return p.batch.count * CeilDivide(p.Planes(), PlanesOfBlock<kTransposed>(p));
}

// Blocks count planes in 32 bits. The transpose with stride 2 has other taps for every place.
template <bool kTransposed>
bool Fits(const DepthwiseProblem& p) {
  return PlanesOfBlock<kTransposed>(p) > 0 && p.batch.count * p.Planes() < kMostDepthwiseUnits &&
         !(kTransposed && p.stride == 2);
}

// Fitted to planes of 14 x 14, 512 channels of 256 images, on an H200, strides 1 and 2, in float32
// and bfloat16: within 14 %; in bfloat16 to 28 x 28 with stride 2 and to 7 x 7, too: within 16 %.
// Instructions take about as long as the copy there, and other blocks' copies overlap them. A
// multiprocessor that has less than four blocks waits for memory.
template <bool kTransposed>
double Microseconds(const DepthwiseProblem& p) {
  const int64_t width = kTransposed ? p.columns : p.width;
  // Bytes in a microsecond.
  const double rate = SizeOf(p.dtype) != 2 ? 3.0e6 : width % 4 == 0 ? 2.2e6 : 1.65e6;
  const auto wanted = 4 * int64_t{p.gpu.multiprocessors};
  const int64_t blocks = std::max(Blocks<kTransposed>(p), int64_t{1});
  const double share = blocks < wanted ? static_cast<double>(blocks) / wanted : 1;
  return kDepthwiseLaunch + DepthwiseBytes(p) / (rate * share);
}

// Many rows for each thread read less twice, but those that do not exist are computed, too.
int RowsOfThread(int64_t rows) {
  constexpr int kFew = 7, kMany = 14;
  return CeilDivide(rows, kMany) * kMany <= CeilDivide(rows, kFew) * kFew ? kMany : kFew;
}

template <bool kTransposed>
KernelSource Source(const DepthwiseProblem& p) {
  const int left = kTransposed ? kTaps - 1 - p.left : p.left;
  const int rows = RowsOfThread(kTransposed ? p.height : p.rows);
  return {"depthwise/kernels/depthwise_staged.cu",
          KernelExpression(
              "DepthwiseStaged",
              {TypeName(p.dtype), TypeName(p.out_dtype),
               ConfigExpression("DepthwiseStagedConfig",
                                {Field("stride", p.stride), Field("left", left),
                                 Field("rows", rows), Field("transposed", kTransposed)})})};
}

template <bool kTransposed>
LaunchShape Shape(const DepthwiseProblem& p) {
  return {Blocks<kTransposed>(p), kDepthwiseStagedThreads};
}

}  // namespace

extern constinit const CudaVariant<DepthwiseProblem> kDepthwiseStaged{
    "depthwise_staged", Fits<false>, Microseconds<false>, Source<false>, Shape<false>};
extern constinit const CudaVariant<DepthwiseProblem> kDepthwiseInputStaged{
    "depthwise_staged", Fits<true>, Microseconds<true>, Source<true>, Shape<true>};

}  // namespace jaxsparse
