// The transpose of a depthwise convolution in the kernel, on the host: how its two kernels are
// configured, their workspace, predicted time, instances and launches.
#include "depthwise/kernels/depthwise_sums.h"

#include "depthwise/cost.h"
#include "depthwise/depthwise_cuda.h"
#include "nvrtc/expression.h"

namespace jaxsparse {
namespace {

constexpr int64_t kSums = kTaps * kTaps;

int64_t Blocks(const DepthwiseProblem& p) {
  return p.batch.count * p.channels * DepthwiseSlices(p);
}

int64_t WorkspaceBytes(const DepthwiseProblem& p, bool) {
  return Blocks(p) * kSums * static_cast<int64_t>(sizeof(float));
}

constexpr CudaKernel<DepthwiseProblem> kSlices{
    [](const DepthwiseProblem& p) {
      const std::string config = ConfigExpression(
          "DepthwiseSumsConfig", {Field("stride", p.stride), Field("left", p.left)});
      return KernelSource{"depthwise/kernels/depthwise_sums.cu",
                          KernelExpression("DepthwiseSlicesOfSums", {TypeName(p.dtype), config})};
    },
    [](const DepthwiseProblem& p) { return LaunchShape{Blocks(p), kDepthwiseSumThreads}; }};

KernelSource Source(const DepthwiseProblem& p) {
  return {"depthwise/kernels/depthwise_sums.cu",
          KernelExpression("DepthwiseSums", {TypeName(p.out_dtype)})};
}

LaunchShape Shape(const DepthwiseProblem& p) {
  return {CeilDivide(p.batch.count * p.channels * kSums, kDepthwiseSumThreads),
          kDepthwiseSumThreads};
}

}  // namespace

extern constinit const CudaVariant<DepthwiseProblem> kDepthwiseSums{
    "depthwise_sums",
    [](const DepthwiseProblem& p) {
      return WorkspaceBytes(p, false) <= p.workspace.bytes &&
             Blocks(p) * kSums < kMostDepthwiseUnits && DepthwisePieces(p) < kMostDepthwiseUnits &&
             p.height < kMostDepthwiseUnits && p.width < kMostDepthwiseUnits &&
             p.rows < kMostDepthwiseUnits && p.columns < kMostDepthwiseUnits;
    },
    [](const DepthwiseProblem& p) { return DepthwiseMicroseconds(p, p.width); },
    Source,
    Shape,
    &kSlices,
    nullptr,
    WorkspaceBytes};

}  // namespace jaxsparse
