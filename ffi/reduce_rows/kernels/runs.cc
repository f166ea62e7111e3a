// The reduction of rows by runs on the host: its launches, workspace, fit, predicted time and
// instances.
#include "reduce_rows/kernels/runs.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "reduce_rows/cost.h"
#include "reduce_rows/reduce_rows_cuda.h"

namespace jaxsparse {
namespace {

// Long runs take fewer instructions for an entry. But where there are few of them, some
// multiprocessors would have nothing to do, and others one run behind the other.
ReduceRunsConfig ConfigOf(const ReduceRowsProblem& p) {
  constexpr int64_t kLongRun = 8, kManyLongRuns = 132 * 28;
  ReduceRunsConfig config{.reduction = p.reduction};
  const int64_t units = p.batch.count * RowUnits(p.pattern.rows, p.pattern.nse);
  if (units >= kManyLongRuns * kLongRun) config.units = kLongRun;
  return config;
}

int64_t Runs(const ReduceRowsProblem& p) {
  return p.batch.count * ReduceRunsOf(p.pattern.rows, p.pattern.nse, ConfigOf(p).units);
}

KernelSource Source(const char* kernel, const ReduceRowsProblem& p) {
  const ReduceRunsConfig config = ConfigOf(p);
  const std::string text = ConfigExpression(
      "ReduceRunsConfig",
      {Field("reduction", NameInDeviceCode(p.reduction)), Field("units", config.units)});
  return {"reduce_rows/kernels/runs.cu", KernelExpression(kernel, {TypeName(p.dtype), text})};
}

constexpr CudaKernel<ReduceRowsProblem> kRuns{
    [](const ReduceRowsProblem& p) { return Source("ReduceRuns", p); },
    [](const ReduceRowsProblem& p) {
      return LaunchShape{CeilDivide(Runs(p), kReduceRunsThreads / kWarp), kReduceRunsThreads};
    }};

constexpr ReductionCost kCost{.launch_us = 3.8, .bytes_of_us = 2.5e6};

// A maximum, or a reference and a sum.
int64_t BytesOfPieces(const ReduceRowsProblem& p) {
  return Runs(p) * kReducedPieces * 2 * std::max<int64_t>(SizeOf(p.dtype), 4);
}

}  // namespace

extern constinit const CudaVariant<ReduceRowsProblem> kReduceRowsByRuns = {
    "runs_of_rows",
    [](const ReduceRowsProblem& p) {
      return RunsFit(p.pattern, p.batch, p.row_cuts) && BytesOfPieces(p) <= p.workspace.bytes;
    },
    [](const ReduceRowsProblem& p) { return kCost.Of(p); },
    [](const ReduceRowsProblem& p) { return Source("ReducePieces", p); },
    [](const ReduceRowsProblem& p) {
      return LaunchShape{CeilDivide(Runs(p), kReduceRunsThreads), kReduceRunsThreads};
    },
    &kRuns,
    nullptr,
    [](const ReduceRowsProblem& p, bool) {
      return RunsFit(p.pattern, p.batch, p.row_cuts) ? BytesOfPieces(p) : 0;
    }};

}  // namespace jaxsparse
