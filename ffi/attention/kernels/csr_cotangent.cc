// The transpose of attention's derivative by the rows of a pattern: its configuration, launch,
// workspace, fit and cost.
#include "attention/attention_cuda.h"
#include "attention/kernels/csr_launch.h"

namespace jaxsparse {
namespace {

using Problem = AttentionCotangentProblem;

constexpr CsrTunings kTunings = {.of_16_bits = {4, 1}, .of_32_bits = {4, 2}, .of_64_bits = {4, 1}};

AttentionCsrConfig ConfigOf(const Problem& p) {
  return CsrConfigOf(kTunings, {p.head_size, p.dtype, {&p.query, &p.key, &p.ct_query, &p.ct_key}},
                     {p.value_size, p.dtype, {&p.value, &p.ct_out, &p.ct_value}}, p.dtype);
}

KernelSource Source(const Problem& p) {
  return {
      "attention/kernels/csr_cotangent.cu",
      KernelExpression("AttentionCsrCotangent", {TypeName(p.dtype), TypeName(p.pattern.index_type),
                                                 TypeName(p.transposed_pattern.index_type),
                                                 CsrConfigExpression(ConfigOf(p))})};
}

// Of both passes.
struct Plans {
  CsrPassPlan queries, keys;

  explicit Plans(const Problem& p)
      : queries(p, p.pattern, p.groups * p.per_group, p.head_size),
        keys(p, p.transposed_pattern, p.groups, p.head_size + p.value_size) {}

  int64_t CounterBytes() const { return queries.CounterBytes() + keys.CounterBytes(); }
};

LaunchShape Shape(const Problem& p) {
  const AttentionCsrConfig config = ConfigOf(p);
  const Plans plans(p);
  return {plans.queries.Blocks(p, p.pattern, config) +
              plans.keys.Blocks(p, p.transposed_pattern, config),
          kCsrThreads};
}

int64_t WorkspaceBytes(const Problem& p, bool) {
  const Plans plans(p);
  return plans.CounterBytes() + plans.queries.SumBytes() + plans.keys.SumBytes();
}

std::string Launch(const Problem& p, const CudaLaunch& launch) {
  AttentionCsrCotangentProblem csr{p};
  const AttentionCsrConfig config = ConfigOf(p);
  const Plans plans(p);
  const bool cuts = WorkspaceBytes(p, false) <= p.workspace.bytes;
  const auto at = [&](int64_t bytes) { return cuts ? p.workspace.data + bytes : nullptr; };
  const int64_t sums = plans.CounterBytes();
  csr.of_queries = plans.queries.Pass(p, p.pattern, config, at(0), at(sums));
  csr.of_keys = plans.keys.Pass(p, p.transposed_pattern, config, at(plans.queries.CounterBytes()),
                                at(sums + plans.queries.SumBytes()));
  csr.log2_scale = p.scale * kLog2OfE;
  const std::string reason = ClearCounters(at(0), cuts ? plans.CounterBytes() : 0, launch);
  return reason.empty() ? launch.With(&csr) : reason;
}

bool Fits(const Problem& p) { return FitsCsr(p, ConfigOf(p)) && Shape(p).blocks < kMostCsrBlocks; }

// As the floor of the kernel says, and a launch.
double Cost(const Problem& p) { return 6 + CsrMicroseconds(p, ConfigOf(p), 2); }

}  // namespace

extern constinit const CudaVariant<AttentionCotangentProblem> kAttentionCotangentCsr = {
    "csr", Fits, Cost, Source, Shape, nullptr, Launch, WorkspaceBytes};

}  // namespace jaxsparse
