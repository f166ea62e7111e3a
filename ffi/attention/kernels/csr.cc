// Attention by the rows of a pattern: its configuration, launch, workspace, fit and cost.
#include "attention/kernels/csr.h"

#include <cuda_runtime_api.h>

#include "attention/attention_cuda.h"
#include "attention/kernels/csr_launch.h"

namespace jaxsparse {
namespace {

constexpr CsrTunings kTunings = {
    .of_16_bits = {8, 1},
    .of_32_bits = {4, 2},
    .of_64_bits = {4, 1},
    .on_tensor_cores = {.of_64 = {1, 7}, .of_128 = {2, 5}, .of_more = {1, 4}},
    .float16_on_tensor_cores = true};

AttentionCsrConfig ConfigOf(const AttentionProblem& p) {
  return CsrConfigOf(kTunings, {p.head_size, p.dtype, {&p.query, &p.key}},
                     {p.value_size, p.dtype, {&p.value, &p.out}}, p);
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

int64_t Bytes(const AttentionProblem& p) { return PlanOf(p).Bytes(); }

// Fitted to an H200's times: 7.8 us of 10,556 entries and 8 heads of 8, 380 to 1,239 us of 2
// million.
double Cost(const AttentionProblem& p) { return 7 + CsrMicroseconds(p, ConfigOf(p), 1); }

}  // namespace

extern constinit const CudaVariant<AttentionProblem> kAttentionCsr =
    CsrVariant<AttentionProblem, ConfigOf, Shape, Bytes>::With(Cost, Source, nullptr, Launch);

}  // namespace jaxsparse
