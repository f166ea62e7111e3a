// Attention by the rows of a pattern: its configuration, launch, workspace, fit and cost.
#include "attention/kernels/csr.h"

#include "attention/attention_cuda.h"
#include "attention/kernels/csr_launch.h"

namespace jaxsparse {
namespace {

template <CsrTuning kTuning>
AttentionCsrConfig ConfigOf(const AttentionProblem& p) {
  return CsrConfigOf(kTuning, {p.head_size, p.dtype, {&p.query, &p.key}},
                     {p.value_size, p.dtype, {&p.value, &p.out}}, p.dtype);
}

template <CsrTuning kTuning>
KernelSource Source(const AttentionProblem& p) {
  return {"attention/kernels/csr.cu",
          KernelExpression("AttentionCsr", {TypeName(p.dtype), TypeName(p.pattern.index_type),
                                            CsrConfigExpression(ConfigOf<kTuning>(p))})};
}

CsrPassPlan PlanOf(const AttentionProblem& p) {
  constexpr int64_t kOfSoftmax = 2;  // the greatest score and the total
  return {p, p.pattern, p.groups * p.per_group, p.value_size + kOfSoftmax};
}

template <CsrTuning kTuning>
LaunchShape Shape(const AttentionProblem& p) {
  return {PlanOf(p).Blocks(p, p.pattern, ConfigOf<kTuning>(p)), kCsrThreads};
}

int64_t WorkspaceBytes(const AttentionProblem& p, bool) {
  const CsrPassPlan plan = PlanOf(p);
  return plan.CounterBytes() + plan.SumBytes();
}

template <CsrTuning kTuning>
std::string Launch(const AttentionProblem& p, const CudaLaunch& launch) {
  AttentionCsrProblem csr{p};
  const CsrPassPlan plan = PlanOf(p);
  const bool cuts = WorkspaceBytes(p, false) <= p.workspace.bytes;
  char* counters = cuts ? p.workspace.data : nullptr;
  char* sums = cuts ? counters + plan.CounterBytes() : nullptr;
  csr.pass = plan.Pass(p, p.pattern, ConfigOf<kTuning>(p), counters, sums);
  csr.log2_scale = p.scale * kLog2OfE;
  const std::string reason = ClearCounters(counters, cuts ? plan.CounterBytes() : 0, launch);
  return reason.empty() ? launch.With(&csr) : reason;
}

template <CsrTuning kTuning>
bool Fits(const AttentionProblem& p) {
  return FitsCsr(p, ConfigOf<kTuning>(p)) && Shape<kTuning>(p).blocks < kMostCsrBlocks;
}

// As the floor of the kernel says, and a launch.
double Cost(const AttentionProblem& p) {
  return 4 + CsrMicroseconds(p, ConfigOf<CsrTuning{}>(p), 1);
}

template <CsrTuning kTuning>
constexpr CudaVariant<AttentionProblem> VariantOf(const char* name,
                                                  double (*cost)(const AttentionProblem&)) {
  return {name,    Fits<kTuning>,   cost,          Source<kTuning>, Shape<kTuning>,
          nullptr, Launch<kTuning>, WorkspaceBytes};
}

}  // namespace

extern constinit const CudaVariant<AttentionProblem> kAttentionCsr =
    VariantOf<CsrTuning{}>("csr", Cost);
extern constinit const CudaVariant<AttentionProblem> kAttentionCsrBy2 =
    VariantOf<CsrTuning{.step = 2}>("csr_by_2", kByName);
extern constinit const CudaVariant<AttentionProblem> kAttentionCsrBy8 =
    VariantOf<CsrTuning{.step = 8}>("csr_by_8", kByName);
extern constinit const CudaVariant<AttentionProblem> kAttentionCsrTwice =
    VariantOf<CsrTuning{.accesses = 2}>("csr_twice", kByName);

}  // namespace jaxsparse
