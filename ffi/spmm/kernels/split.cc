// Split kernel of the sparse-dense product: its configuration, launches, workspace, fit and cost.
#include "spmm/kernels/split.h"

#include <algorithm>
#include <string>

#include "nvrtc/expression.h"
#include "spmm/cost.h"
#include "spmm/spmm_cuda.h"

namespace jaxsparse {
namespace {

constexpr int kWidestLoad = 16;  // bytes

SpmmSplitConfig ConfigOf(const SpmmProblem& p) {
  SpmmSplitConfig config;
  config.permuted = p.pattern.permutation.data != nullptr;
  config.batched = p.batch.rank > 0;
  config.vector = static_cast<int>(kWidestLoad / SizeOf(p.dtype));
  while (p.n % config.vector != 0) config.vector /= 2;
  config.lanes = LanesFor(CeilDivide(p.n, config.vector));
  // Two units have fewer waits for columns, and groups of a block are done at about one time. But
  // where there are few, some multiprocessors would have nothing to do in the end.
  constexpr int64_t kManyWarps = 10 * 132 * 24;  // ten times as many as an H200 runs at once
  const int64_t tiles = p.batch.count * CeilDivide(p.n, config.Columns());
  const int64_t units = tiles * RowUnits(p.pattern.rows, p.pattern.nse);
  config.group_units = units * config.lanes / kWarp > kManyWarps ? 2 : 1;
  // Where all groups run at once, the time is that of waits for x, one after the other.
  constexpr int64_t kMultiprocessors = 132;
  const int64_t blocks = tiles * SpmmSplitBlocksDown(p, config.Units());
  if (SizeOf(p.dtype) < 8 &&
      blocks <= kMultiprocessors * (kSpmmSplitThreadsOfFew / config.Threads())) {
    config.at_once = kSpmmSplitAtOnceOfFew;
  }
  return config;
}

int64_t Tiles(const SpmmProblem& p) {
  return p.batch.count * CeilDivide(p.n, ConfigOf(p).Columns());
}

int64_t BlocksDown(const SpmmProblem& p) { return SpmmSplitBlocksDown(p, ConfigOf(p).Units()); }

std::string Expression(const SpmmSplitConfig& config) {
  return ConfigExpression(
      "SpmmSplitConfig",
      {Field("vector", config.vector), Field("lanes", config.lanes),
       Field("group_units", config.group_units), Field("at_once", config.at_once),
       Field("permuted", config.permuted), Field("batched", config.batched)});
}

constexpr CudaKernel<SpmmProblem> kSplitRows{
    [](const SpmmProblem& p) {
      return KernelSource{
          "spmm/kernels/split.cu",
          KernelExpression("SpmmSplitRows",
                           {TypeName(p.dtype), TypeName(p.out_dtype),
                            TypeName(p.pattern.index_type), Expression(ConfigOf(p))})};
    },
    [](const SpmmProblem& p) {
      return LaunchShape{Tiles(p) * BlocksDown(p), ConfigOf(p).Threads()};
    }};

// Of what stands in registers only the number of columns counts.
KernelSource AddPartsSource(const SpmmProblem& p) {
  const SpmmSplitConfig config = ConfigOf(p);
  const SpmmSplitConfig same{
      .vector = config.vector, .lanes = config.lanes, .group_units = config.group_units};
  return {"spmm/kernels/split.cu",
          KernelExpression("SpmmAddParts",
                           {TypeName(p.dtype), TypeName(p.out_dtype), Expression(same)})};
}

LaunchShape AddPartsShape(const SpmmProblem& p) {
  return {Tiles(p) * CeilDivide(BlocksDown(p), kSpmmAddBoundaries), kSpmmAddThreads};
}

int64_t BytesOfParts(const SpmmProblem& p) {
  return p.batch.count * BlocksDown(p) * kSpmmPartsOfBlock * p.n *
         std::max<int64_t>(SizeOf(p.dtype), 4);
}

// Whether 32-bit counters serve.
bool FitsCounters(const SpmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return SpmmFitsTiledRows(p) &&
         (p.n == 0 || Tiles(p) < kMost / std::max<int64_t>(BlocksDown(p), 1));
}

bool HasCuts(const SpmmProblem& p) { return p.row_cuts.data != nullptr; }

bool Fits(const SpmmProblem& p) {
  return HasCuts(p) && FitsCounters(p) && BytesOfParts(p) <= p.workspace.bytes;
}

int64_t WorkspaceBytes(const SpmmProblem& p, bool) {
  return HasCuts(p) && !p.dense_on_left && FitsCounters(p) ? BytesOfParts(p) : 0;
}

// What every entry reads of x comes from L2, and from memory where that has no room for x; the rest
// from memory, once. The start and the rate of L2 are fitted to 2 million entries in float32 on an
// H100, with n = 32 and 128: within 4 % in even rows, 5 % in those of a power law with n = 128.
// That was when groups had one unit, and fewer warps ran: now it predicts too much. The rest is
// expected: the least is a unit of the most entries, which waits for x a dozen times.
double Cost(const SpmmProblem& p) {
  constexpr double kL2Bytes = 4.9e6, kMemoryBytes = 4.1e6;  // a microsecond
  constexpr double kRoom = 60e6, kSector = 32;              // of L2, bytes
  constexpr double kStart = 5, kLeast = 12, kOverIssue = 1.4, kOverMemory = 1.1;
  constexpr double kInstructions = 10;  // a warp's for an entry of each of its groups
  const SpmmSplitConfig config = ConfigOf(p);
  const auto size = static_cast<double>(SizeOf(p.dtype));
  const auto entries = static_cast<double>(p.batch.count * p.pattern.nse);
  const double x_reads = entries * std::max(static_cast<double>(p.n) * size, kSector);
  const double x = static_cast<double>(p.batch.count * p.pattern.columns * p.n) * size;
  const double out = static_cast<double>(p.batch.count * p.pattern.rows * p.n) * size;
  const double of_tile = x / static_cast<double>(CeilDivide(p.n, config.Columns()));
  const double missed = of_tile > kRoom ? (1 - kRoom / of_tile) * x_reads : 0;
  const double memory = (std::max(x, missed) + out + entries * (size + 4)) / kMemoryBytes;
  const double tiles = static_cast<double>(CeilDivide(p.n, config.Columns()));
  const double issued = kInstructions * entries * tiles * config.lanes / kWarp /
                        (4 * p.gpu.multiprocessors * kClocksOfMicrosecond);
  return kStart + std::max({x_reads / kL2Bytes, kOverMemory * memory, kOverIssue * issued, kLeast});
}

}  // namespace

extern constinit const SpmmVariant kSpmmSplitRows{
    "split_rows", Fits, Cost, AddPartsSource, AddPartsShape, &kSplitRows, nullptr, WorkspaceBytes};

}  // namespace jaxsparse
