// Planes of a depthwise convolution and of its transpose in x, on the host: how the kernels are
// configured, their predicted time, their instances and launches.
#include "depthwise/kernels/depthwise_planes.h"

#include "depthwise/cost.h"
#include "depthwise/depthwise_cuda.h"
#include "nvrtc/expression.h"

namespace jaxsparse {
namespace {

// Threads, each of so many rows and columns.
template <bool kTransposed>
int64_t Units(const DepthwiseProblem& p, int rows_of_thread, int columns_of_thread) {
  // With stride 2 the transpose's strips begin with the first row that windows read.
  const int64_t in_front = p.stride == 2 ? p.above : 0;
  const int64_t rows = kTransposed ? p.height + in_front : p.rows;
  const int64_t columns = kTransposed ? p.width : p.columns;
  return p.batch.count * p.Planes() * CeilDivide(rows, rows_of_thread) *
         CeilDivide(columns, columns_of_thread);
}

// Many rows for each thread read less of the source twice, but few fill a GPU.
template <bool kTransposed>
DepthwisePlanesConfig ConfigOf(const DepthwiseProblem& p) {
  constexpr int64_t kEnough = 1024;  // threads of a multiprocessor
  DepthwisePlanesConfig config{.stride = p.stride, .left = p.left, .transposed = kTransposed};
  const bool spreads = kTransposed && p.stride == 2;
  if (p.stride == 2 && !spreads) config.rows = 2;  // which read as much
  if (SizeOf(p.dtype) == 2) config.columns = 8;
  if (kTransposed && !spreads) config.left = kTaps - 1 - p.left;
  while (config.rows > (spreads ? 2 : 1) &&
         Units<kTransposed>(p, config.rows, config.columns) < kEnough * p.gpu.multiprocessors) {
    config.rows /= 2;
  }
  return config;
}

template <bool kTransposed>
KernelSource Source(const DepthwiseProblem& p) {
  const DepthwisePlanesConfig config = ConfigOf<kTransposed>(p);
  return {"depthwise/kernels/depthwise_planes.cu",
          KernelExpression(
              kTransposed && p.stride == 2 ? "DepthwiseSpread" : "DepthwisePlanes",
              {TypeName(p.dtype), TypeName(p.out_dtype),
               ConfigExpression("DepthwisePlanesConfig",
                                {Field("stride", config.stride), Field("left", config.left),
                                 Field("rows", config.rows), Field("columns", config.columns),
                                 Field("transposed", config.transposed)})})};
}

template <bool kTransposed>
LaunchShape Shape(const DepthwiseProblem& p) {
  const DepthwisePlanesConfig config = ConfigOf<kTransposed>(p);
  const int64_t units = Units<kTransposed>(p, config.rows, config.columns);
  return {CeilDivide(units, kDepthwiseThreads), kDepthwiseThreads};
}

// Kernels count units, and places of a plane, in 32 bits.
template <bool kTransposed>
bool Fits(const DepthwiseProblem& p) {
  return Units<kTransposed>(p, 1, 4) < kMostDepthwiseUnits && p.height < kMostDepthwiseUnits &&
         p.width < kMostDepthwiseUnits && p.rows < kMostDepthwiseUnits &&
         p.columns < kMostDepthwiseUnits;
}

// The rate depends on the width of the rows that are read.
template <bool kTransposed>
double Microseconds(const DepthwiseProblem& p) {
  return DepthwiseMicroseconds(p, kTransposed ? p.columns : p.width);
}

}  // namespace

extern constinit const CudaVariant<DepthwiseProblem> kDepthwisePlanes{
    "depthwise_planes", Fits<false>, Microseconds<false>, Source<false>, Shape<false>};
extern constinit const CudaVariant<DepthwiseProblem> kDepthwiseInputPlanes{
    "depthwise_planes", Fits<true>, Microseconds<true>, Source<true>, Shape<true>};

}  // namespace jaxsparse
