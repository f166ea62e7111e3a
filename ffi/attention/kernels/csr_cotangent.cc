// The transpose of attention's derivative by the rows of a pattern: its configuration, launch,
// workspace, fit and cost.
#include "attention/attention_cuda.h"
#include "attention/kernels/csr_launch.h"

namespace jaxsparse {
namespace {

using Problem = AttentionCotangentProblem;

template <CsrTuning kTuning>
AttentionCsrConfig ConfigOf(const Problem& p) {
  return CsrConfigOf(kTuning, {p.head_size, p.dtype, {&p.query, &p.key, &p.ct_query, &p.ct_key}},
                     {p.value_size, p.dtype, {&p.value, &p.ct_out, &p.ct_value}}, p.dtype);
}

template <CsrTuning kTuning>
KernelSource Source(const Problem& p) {
  return {
      "attention/kernels/csr_cotangent.cu",
      KernelExpression("AttentionCsrCotangent", {TypeName(p.dtype), TypeName(p.pattern.index_type),
                                                 TypeName(p.transposed_pattern.index_type),
                                                 CsrConfigExpression(ConfigOf<kTuning>(p))})};
}

// Of both passes.
struct Plans {
  CsrPassPlan queries, keys;

  explicit Plans(const Problem& p)
      : queries(p, p.pattern, p.groups * p.per_group, p.head_size),
        keys(p, p.transposed_pattern, p.groups, p.head_size + p.value_size) {}

  int64_t CounterBytes() const { return queries.CounterBytes() + keys.CounterBytes(); }
};

template <CsrTuning kTuning>
LaunchShape Shape(const Problem& p) {
  const AttentionCsrConfig config = ConfigOf<kTuning>(p);
  const Plans plans(p);
  return {plans.queries.Blocks(p, p.pattern, config) +
              plans.keys.Blocks(p, p.transposed_pattern, config),
          kCsrThreads};
}

int64_t WorkspaceBytes(const Problem& p, bool) {
  const Plans plans(p);
  return plans.CounterBytes() + plans.queries.SumBytes() + plans.keys.SumBytes();
}

template <CsrTuning kTuning>
std::string Launch(const Problem& p, const CudaLaunch& launch) {
  AttentionCsrCotangentProblem csr{p};
  const AttentionCsrConfig config = ConfigOf<kTuning>(p);
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

template <CsrTuning kTuning>
bool Fits(const Problem& p) {
  return FitsCsr(p, ConfigOf<kTuning>(p)) && Shape<kTuning>(p).blocks < kMostCsrBlocks;
}

// As the floor of the kernel says, and a launch.
double Cost(const Problem& p) { return 6 + CsrMicroseconds(p, ConfigOf<CsrTuning{}>(p), 2); }

template <CsrTuning kTuning>
constexpr CudaVariant<Problem> VariantOf(const char* name, double (*cost)(const Problem&)) {
  return {name,    Fits<kTuning>,   cost,          Source<kTuning>, Shape<kTuning>,
          nullptr, Launch<kTuning>, WorkspaceBytes};
}

}  // namespace

extern constinit const CudaVariant<Problem> kAttentionCotangentCsr =
    VariantOf<CsrTuning{}>("csr", Cost);
extern constinit const CudaVariant<Problem> kAttentionCotangentCsrBy2 =
    VariantOf<CsrTuning{.step = 2}>("csr_by_2", kByName);
extern constinit const CudaVariant<Problem> kAttentionCotangentCsrBy8 =
    VariantOf<CsrTuning{.step = 8}>("csr_by_8", kByName);
extern constinit const CudaVariant<Problem> kAttentionCotangentCsrTwice =
    VariantOf<CsrTuning{.accesses = 2}>("csr_twice", kByName);

}  // namespace jaxsparse
