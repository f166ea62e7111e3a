// Planes of a depthwise convolution and of its transpose in x, on the host: how the kernels are
// configured, their predicted time, their instances and launches.
#include "depthwise/kernels/depthwise_planes.h"

#include "depthwise/cost.h"
#include "depthwise/depthwise_cuda.h"
#include "nvrtc/expression.h"

namespace jaxsparse {
namespace {

// Many rows for each thread read less of the source twice, but few fill a GPU.
template <bool kTransposed>
DepthwisePlanesConfig ConfigOf(const DepthwiseProblem& p) {
  constexpr int64_t kEnoughThreads = 1024;  // of a multiprocessor
  const int64_t rows = kTransposed ? p.height : p.rows;
  const int64_t columns = kTransposed ? p.width : p.columns;
  const auto threads = [&](int of_thread) {
    return p.batch.count * p.Planes() * CeilDivide(rows, of_thread) *
           CeilDivide(columns, kDepthwiseColumns);
  };
  DepthwisePlanesConfig config{.stride = p.stride, .left = p.left, .transposed = kTransposed};
  if (kTransposed && p.stride == 2) {
    config.rows = kDepthwiseSpreadRows;
    return config;
  }
  if (kTransposed) config.left = kTaps - 1 - p.left;
  if (p.stride == 2) config.rows = 2;  // which read as much
  while (config.rows > 1 && threads(config.rows) < kEnoughThreads * p.gpu.multiprocessors) {
    config.rows /= 2;
  }
  return config;
}

template <bool kTransposed>
KernelSource Source(const DepthwiseProblem& p) {
  const DepthwisePlanesConfig config = ConfigOf<kTransposed>(p);
  return {
      "depthwise/kernels/depthwise_planes.cu",
      KernelExpression(kTransposed && p.stride == 2 ? "DepthwiseSpread" : "DepthwisePlanes",
                       {TypeName(p.dtype), TypeName(p.out_dtype),
                        ConfigExpression("DepthwisePlanesConfig",
                                         {Field("stride", config.stride),
                                          Field("left", config.left), Field("rows", config.rows),
                                          Field("transposed", config.transposed)})})};
}

template <bool kTransposed>
LaunchShape Shape(const DepthwiseProblem& p) {
  const DepthwisePlanesConfig config = ConfigOf<kTransposed>(p);
  const int64_t rows = kTransposed ? p.height : p.rows;
  const int64_t columns = kTransposed ? p.width : p.columns;
  const int64_t units = p.batch.count * p.Planes() * CeilDivide(rows, config.rows) *
                        CeilDivide(columns, kDepthwiseColumns);
  return {CeilDivide(units, kDepthwiseThreads), kDepthwiseThreads};
}

bool Always(const DepthwiseProblem&) { return true; }

}  // namespace

extern constinit const CudaVariant<DepthwiseProblem> kDepthwisePlanes{
    "depthwise_planes", Always, DepthwiseMicroseconds, Source<false>, Shape<false>};
extern constinit const CudaVariant<DepthwiseProblem> kDepthwiseInputPlanes{
    "depthwise_planes", Always, DepthwiseMicroseconds, Source<true>, Shape<true>};

}  // namespace jaxsparse
