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

constexpr int64_t kMultiprocessors = 132;

SparseSoftmaxRunsConfig ConfigOf(const SparseSoftmaxProblem& p) {
  SparseSoftmaxRunsConfig config{.backward = p.backward, .batched = p.batch.rank > 0};
  // Long runs take fewer instructions for an entry. But where there are few of them, some
  // multiprocessors would have nothing to do, and others one run behind the other.
  constexpr int64_t kLongRun = 6, kManyLongRuns = kMultiprocessors * 28;
  const int64_t units = p.batch.count * RowUnits(p.pattern.rows, p.pattern.nse);
  if (units >= kManyLongRuns * kLongRun && SizeOf(p.dtype) < 8) config.units = kLongRun;
  // All of the second kernel's blocks are to find room while the first one ends.
  const int64_t boundaries = units / config.UnitsOfBlock();
  while (config.team > kWarp && boundaries * config.team > kMultiprocessors * 8 * 128) {
    config.team /= 2;
  }
  return config;
}

// Of runs, each of four warps.
int64_t Blocks(const SparseSoftmaxProblem& p) {
  const int units = ConfigOf(p).UnitsOfBlock();
  return p.batch.count * SoftmaxBlocksDown(p.pattern.rows, p.pattern.nse, units);
}

KernelSource Source(const char* kernel, const SparseSoftmaxProblem& p) {
  const SparseSoftmaxRunsConfig config = ConfigOf(p);
  const std::string expression =
      ConfigExpression("SparseSoftmaxRunsConfig",
                       {Field("units", config.units), Field("team", config.team),
                        Field("backward", config.backward), Field("batched", config.batched)});
  return {"sparse_softmax/kernels/runs.cu",
          KernelExpression(kernel, {TypeName(p.dtype), expression})};
}

constexpr CudaKernel<SparseSoftmaxProblem> kRuns{
    [](const SparseSoftmaxProblem& p) { return Source("SparseSoftmaxRuns", p); },
    [](const SparseSoftmaxProblem& p) {
      // Of many runs as many as run at once: they have the next run on its way while they compute
      // one. Of few, blocks that end early make room for those of the second kernel.
      constexpr int64_t kManyTurns = 4;
      const int64_t at_once = kMultiprocessors * ConfigOf(p).Blocks(SizeOf(p.dtype));
      const int64_t blocks = Blocks(p) < kManyTurns * at_once ? Blocks(p) : at_once;
      return LaunchShape{blocks, kSoftmaxRunsThreads};
    }};

int64_t BytesOfPieces(const SparseSoftmaxProblem& p) {
  const int64_t number = std::max<int64_t>(SizeOf(p.dtype), 4);
  return Blocks(p) * kPiecesOfRun * 2 * number;
}

}  // namespace

extern constinit const CudaVariant<SparseSoftmaxProblem> kSparseSoftmaxRunsOfRows = {
    "runs_of_rows",
    [](const SparseSoftmaxProblem& p) {
      return RunsFit(p.pattern, p.batch, p.row_cuts) && BytesOfPieces(p) <= p.workspace.bytes;
    },
    [](const SparseSoftmaxProblem& p) { return kCostModel.Of(p); },
    [](const SparseSoftmaxProblem& p) { return Source("SparseSoftmaxPieces", p); },
    [](const SparseSoftmaxProblem& p) {
      const int64_t threads = Blocks(p) * ConfigOf(p).team;
      return LaunchShape{CeilDivide(threads, kSoftmaxRunsThreads), kSoftmaxRunsThreads};
    },
    &kRuns,
    nullptr,
    [](const SparseSoftmaxProblem& p, bool) {
      return RunsFit(p.pattern, p.batch, p.row_cuts) ? BytesOfPieces(p) : 0;
    }};

}  // namespace jaxsparse
