// The reduction of rows by lanes that own a row on the host: how it is configured, its predicted
// time, its instance and its launch.
#include "reduce_rows/kernels/rows.h"

#include "nvrtc/expression.h"
#include "reduce_rows/cost.h"
#include "reduce_rows/reduce_rows_cuda.h"

namespace jaxsparse {
namespace {

// Lanes have at most two vectors of a row of the mean length, unless a warp has too few of them.
// Rows have more lanes than a warp's where they are so few that most of the GPU would be idle, and
// lanes then have all their loads on their way at once.
ReduceRowsConfig ConfigOf(const ReduceRowsProblem& p) {
  constexpr int64_t kThreadsOfGpu = 132 * 1024;
  ReduceRowsConfig config{.reduction = p.reduction};
  const int64_t rows = p.pattern.rows > 0 ? p.pattern.rows : 1;
  const int64_t vectors = CeilDivide(p.pattern.nse * SizeOf(p.dtype), 16 * rows);  // of a row
  while (config.lanes < kWarp && config.lanes * 2 < vectors) config.lanes *= 2;
  while (config.lanes >= kWarp && config.lanes < config.kMostLanes &&
         config.lanes * config.kLoads < vectors &&
         p.batch.count * rows * config.lanes < kThreadsOfGpu) {
    config.lanes *= 2;
  }
  return config;
}

// The lengths of rows are not known here. Only patterns of graphs come with cuts, of which some
// have rows that take a group of lanes far longer than the mean.
double Cost(const ReduceRowsProblem& p) {
  constexpr ReductionCost kEven{.launch_us = 2.5, .bytes_of_us = 3.6e6, .row_us = 3.2e-5};
  const double even = kEven.Of(p);
  return p.row_cuts.data == nullptr ? even : 2 * even;
}

KernelSource Source(const ReduceRowsProblem& p) {
  const ReduceRowsConfig config = ConfigOf(p);
  const std::string text = ConfigExpression(
      "ReduceRowsConfig",
      {Field("reduction", NameInDeviceCode(p.reduction)), Field("lanes", config.lanes)});
  return {"reduce_rows/kernels/rows.cu", KernelExpression("ReduceRows", {TypeName(p.dtype), text})};
}

}  // namespace

extern constinit const CudaVariant<ReduceRowsProblem> kReduceRowsByRows = {
    "rows", [](const ReduceRowsProblem&) { return true; }, Cost, Source,
    [](const ReduceRowsProblem& p) {
      const ReduceRowsConfig config = ConfigOf(p);
      return LaunchShape{CeilDivide(p.batch.count * p.pattern.rows, config.Owners()),
                         config.Threads()};
    }};

}  // namespace jaxsparse
