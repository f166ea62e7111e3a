// The softmax by runs of rows on the host: its launches, workspace, fit, predicted time, instances.
#include "sparse_softmax/kernels/runs.h"

#include <algorithm>

#include "nvrtc/expression.h"
#include "sparse_softmax/cost.h"
#include "sparse_softmax/sparse_softmax_cuda.h"

namespace jaxsparse {
namespace {

// Expected of an H200. Below what rows in registers are said to take, which do not know of uneven
// rows: patterns that cuts come with are those of graphs.
constexpr SoftmaxCostModel kCostModel{.launch_us = 2.9, .entry_us = 2.2e-6};

int64_t Runs(const SparseSoftmaxProblem& p) { return SoftmaxRuns(p.pattern.rows, p.pattern.nse); }

int64_t Blocks(const SparseSoftmaxProblem& p, int runs_of_warp) {
  constexpr int kWarps = kSoftmaxRunsThreads / kWarp;
  return CeilDivide(p.batch.count * CeilDivide(Runs(p), runs_of_warp), kWarps);
}

KernelSource Source(const char* kernel, const SparseSoftmaxProblem& p) {
  const std::string config =
      ConfigExpression("SparseSoftmaxRunsConfig",
                       {Field("backward", p.backward), Field("batched", p.batch.rank > 0)});
  return {"sparse_softmax/kernels/runs.cu", KernelExpression(kernel, {TypeName(p.dtype), config})};
}

constexpr CudaKernel<SparseSoftmaxProblem> kRuns{
    [](const SparseSoftmaxProblem& p) { return Source("SparseSoftmaxRuns", p); },
    [](const SparseSoftmaxProblem& p) { return LaunchShape{Blocks(p, 1), kSoftmaxRunsThreads}; }};

int64_t BytesOfPieces(const SparseSoftmaxProblem& p) {
  const int64_t number = std::max<int64_t>(SizeOf(p.dtype), 4);
  return p.batch.count * Runs(p) * kPiecesOfRun * 2 * number;
}

// Whether counters of 32 bits serve.
bool HasCuts(const SparseSoftmaxProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return p.row_cuts.data != nullptr && p.pattern.nse < kMost &&
         Runs(p) < kMost / std::max<int64_t>(p.batch.count, 1);
}

}  // namespace

extern constinit const CudaVariant<SparseSoftmaxProblem> kSparseSoftmaxRunsOfRows = {
    "runs_of_rows",
    [](const SparseSoftmaxProblem& p) {
      return HasCuts(p) && BytesOfPieces(p) <= p.workspace.bytes;
    },
    [](const SparseSoftmaxProblem& p) { return kCostModel.Of(p); },
    [](const SparseSoftmaxProblem& p) { return Source("SparseSoftmaxPieces", p); },
    [](const SparseSoftmaxProblem& p) {
      return LaunchShape{Blocks(p, kSoftmaxRunsOfWarp), kSoftmaxRunsThreads};
    },
    &kRuns,
    nullptr,
    [](const SparseSoftmaxProblem& p, bool) { return HasCuts(p) ? BytesOfPieces(p) : 0; }};

}  // namespace jaxsparse
