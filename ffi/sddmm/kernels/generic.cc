// The generic kernel of the sampled dense-dense product on the host: its predicted time, its
// instance and its launch.
#include "sddmm/kernels/generic.h"

#include "nvrtc/expression.h"
#include "sddmm/sddmm_cuda.h"

namespace jaxsparse {
namespace {

KernelSource Source(const SddmmProblem& p) {
  return {"sddmm/kernels/generic.cu",
          KernelExpression("SddmmEntries", {TypeName(p.dtype), TypeName(p.out_dtype),
                                            TypeName(p.pattern.index_type)})};
}

LaunchShape Shape(const SddmmProblem& p) {
  const int64_t groups = p.batch.count * CeilDivide(p.pattern.nse, SddmmEntriesOfGroup(p));
  return {CeilDivide(groups, kSddmmGenericThreads / LanesFor(p.d)), kSddmmGenericThreads};
}

struct CostModel {
  double launch_us;
  double load_latency_us;  // of each load that a group of lanes waits for
  double entry_us;         // of each entry, and of each of its elements of a row of y
  double element_us;
};
constexpr CostModel kCostModel{
    .launch_us = 4, .load_latency_us = 0.5, .entry_us = 0.125e-3, .element_us = 0.63e-6};

// A long row of few entries, of which groups of lanes load four at once, waits more than it loads.
double Cost(const SddmmProblem& p) {
  const int64_t loads = CeilDivide(p.d, LanesFor(p.d)) *
                        CeilDivide(SddmmEntriesOfGroup(p), kSddmmGenericEntriesAtOnce);
  const double wait = kCostModel.load_latency_us * static_cast<double>(loads);
  const double load = static_cast<double>(p.batch.count * p.pattern.nse) *
                      (kCostModel.entry_us + kCostModel.element_us * static_cast<double>(p.d));
  return kCostModel.launch_us + (load > wait ? load : wait);
}

}  // namespace

extern constinit const CudaVariant<SddmmProblem> kSddmmGenericEntries = {
    "generic_entries", [](const SddmmProblem&) { return true; }, Cost, Source, Shape};

}  // namespace jaxsparse
