// Attention by the rows of a pattern: its configuration, launch, workspace, fit and cost.
#include "attention/kernels/csr.h"

#include <cuda_runtime_api.h>

#include "attention/attention_cuda.h"
#include "attention/kernels/csr_launch.h"

namespace jaxsparse {
namespace {

constexpr CsrTunings kTunings = {.of_16_bits = {8, 1}, .of_32_bits = {4, 2}, .of_64_bits = {4, 1}};

AttentionCsrConfig ConfigOf(const AttentionProblem& p) {
  return CsrConfigOf(kTunings, {p.head_size, p.dtype, {&p.query, &p.key}},
                     {p.value_size, p.dtype, {&p.value, &p.out}}, p.dtype);
}

KernelSource Source(const AttentionProblem& p) {
  return {"attention/kernels/csr.cu",
          KernelExpression("AttentionCsr", {TypeName(p.dtype), TypeName(p.pattern.index_type),
                                            CsrConfigExpression(ConfigOf(p))})};
}

CsrPassPlan PlanOf(const AttentionProblem& p) {
  constexpr int64_t kOfSoftmax = 2;  // the greatest score and the total
  return {p, p.pattern, p.groups * p.per_group, p.value_size + kOfSoftmax};
}

std::string ClearCounters(char* counters, int64_t bytes, const CudaLaunch& launch) {
  if (bytes == 0) return "";
  const ScopedDevice scoped(launch.device);
  const cudaError_t status =
      cudaMemsetAsync(counters, 0, bytes, static_cast<cudaStream_t>(launch.stream));
  return status == cudaSuccess ? "" : cudaGetErrorString(status);
}

LaunchShape Shape(const AttentionProblem& p) {
  return {PlanOf(p).Blocks(p, p.pattern, ConfigOf(p)), kCsrThreads};
}

std::string Launch(const AttentionProblem& p, const CudaLaunch& launch) {
  AttentionCsrProblem csr{p};
  const CsrPassPlan plan = PlanOf(p);
  const bool cuts = plan.Bytes() <= p.workspace.bytes;
  char* counters = cuts ? p.workspace.data : nullptr;
  char* sums = cuts ? counters + plan.CounterBytes() : nullptr;
  csr.pass = plan.Pass(p, p.pattern, ConfigOf(p), counters, sums);
  csr.log2_scale = p.scale * kLog2OfE<double>;
  const std::string reason = ClearCounters(counters, cuts ? plan.CounterBytes() : 0, launch);
  return reason.empty() ? launch.With(&csr) : reason;
}

bool Fits(const AttentionProblem& p) {
  return FitsCsr(p, ConfigOf(p)) && Shape(p).blocks < kMostCsrBlocks;
}

int64_t WorkspaceBytes(const AttentionProblem& p, bool) { return Fits(p) ? PlanOf(p).Bytes() : 0; }

// Fitted to an H200's times: 7.8 us of 10,556 entries and 8 heads of 8, 402 to 1,239 us of 2
// million.
double Cost(const AttentionProblem& p) { return 7 + CsrMicroseconds(p, ConfigOf(p), 1); }

}  // namespace

extern constinit const CudaVariant<AttentionProblem> kAttentionCsr = {
    "csr", Fits, Cost, Source, Shape, nullptr, Launch, WorkspaceBytes};

}  // namespace jaxsparse
