// Generic kernels of the sparse-dense product: how they are launched, and what they cost.
#include "spmm/kernels/generic.h"

#include "nvrtc/expression.h"
#include "spmm/cost.h"
#include "spmm/spmm_cuda.h"

namespace jaxsparse {
namespace {

constexpr int kThreads = 128;

KernelSource Source(const char* kernel, const SpmmProblem& p) {
  return {"spmm/kernels/generic.cu",
          KernelExpression(
              kernel, {TypeName(p.dtype), TypeName(p.out_dtype), TypeName(p.pattern.index_type)})};
}

LaunchShape RowsShape(const SpmmProblem& p) {
  const int lanes = LanesFor(p.n);
  const int64_t tiles = CeilDivide(p.n, static_cast<int64_t>(lanes) * kSpmmColumnsPerLane);
  return {CeilDivide(p.batch.count * tiles * p.pattern.rows, kThreads / lanes), kThreads};
}

LaunchShape DotsShape(const SpmmProblem& p) {
  return {CeilDivide(p.batch.count * p.n * p.pattern.rows, kThreads / kWarp), kThreads};
}

// They take 1.4 to 3 times as long as tiled rows.
double Cost(const SpmmProblem& p) { return 2 * SpmmTiledMicroseconds(p); }

}  // namespace

extern constinit const SpmmVariant kSpmmGenericRows{
    "generic_rows", [](const SpmmProblem& p) { return !p.dense_on_left; }, Cost,
    [](const SpmmProblem& p) { return Source("SpmmRows", p); }, RowsShape};

extern constinit const SpmmVariant kSpmmGenericDots{
    "generic_dots", [](const SpmmProblem& p) { return p.dense_on_left; }, Cost,
    [](const SpmmProblem& p) { return Source("SpmmDots", p); }, DotsShape};

}  // namespace jaxsparse
