// The transpose of attention's derivative by the rows of a pattern: its configuration, launch,
// workspace, fit and cost.
#include "attention/attention_cuda.h"
#include "attention/kernels/csr_launch.h"

namespace jaxsparse {
namespace {

using Problem = AttentionCotangentProblem;

// Tensor cores take weights and their cotangents as numbers of 16 bits. These have no least size,
// as probabilities of a long row times cotangents of the result: in float16 they would lose their
// digits below 6e-5, and all of them below 3e-8. bfloat16 has the range of float32.
constexpr CsrTunings kTunings = {
    .of_16_bits = {4, 1},
    .of_32_bits = {4, 2},
    .of_64_bits = {4, 1},
    .on_tensor_cores = {.of_64 = {1, 7}, .of_128 = {2, 4}, .of_more = {1, 4}},
    .float16_on_tensor_cores = false};

// Of both passes, and where the workspace has what: counters, pairs of queries' numbers, sums of
// parts.
struct Plans {
  CsrPassPlan queries, keys;
  int64_t pair_bytes;

  explicit Plans(const Problem& p)
      : queries(p, p.pattern, p.groups * p.per_group, p.head_size),
        keys(p, p.transposed_pattern, p.groups, p.head_size + p.value_size),
        pair_bytes(p.batch.count * p.groups * p.per_group * p.queries *
                   (p.dtype == DType::kFloat64 ? 16 : 8)) {}

  int64_t CounterBytes() const { return queries.CounterBytes() + keys.CounterBytes(); }
  int64_t BeforeSums() const { return CounterBytes() + CeilDivide(pair_bytes, 16) * 16; }
  int64_t Bytes() const { return BeforeSums() + queries.SumBytes() + keys.SumBytes(); }
};

// Programs for any sizes may have less: then no row is cut, and there are no pairs.
bool HasWorkspace(const Problem& p) { return Plans(p).Bytes() <= p.workspace.bytes; }

AttentionCsrConfig ConfigOf(const Problem& p) {
  AttentionCsrConfig config =
      CsrConfigOf(kTunings, {p.head_size, p.dtype, {&p.query, &p.key, &p.ct_query, &p.ct_key}},
                  {p.value_size, p.dtype, {&p.value, &p.ct_out, &p.ct_value}}, p);
  config.in_pairs = HasWorkspace(p);
  return config;
}

KernelSource Source(const Problem& p) {
  return {
      "attention/kernels/csr_cotangent.cu",
      KernelExpression("AttentionCsrCotangent", {TypeName(p.dtype), TypeName(p.pattern.index_type),
                                                 TypeName(p.transposed_pattern.index_type),
                                                 CsrConfigExpression(ConfigOf(p))})};
}

LaunchShape Shape(const Problem& p) {
  const AttentionCsrConfig config = ConfigOf(p);
  const Plans plans(p);
  return {plans.queries.Blocks(p, p.pattern, config) +
              plans.keys.Blocks(p, p.transposed_pattern, config),
          kCsrThreads};
}

AttentionCsrCotangentProblem WithPasses(const Problem& p) {
  AttentionCsrCotangentProblem csr{p};
  const AttentionCsrConfig config = ConfigOf(p);
  const Plans plans(p);
  const auto at = [&](int64_t bytes) {
    return config.in_pairs ? p.workspace.data + bytes : nullptr;
  };
  csr.of_queries = plans.queries.Pass(p, p.pattern, config, at(0), at(plans.BeforeSums()));
  csr.of_keys = plans.keys.Pass(p, p.transposed_pattern, config, at(plans.queries.CounterBytes()),
                                at(plans.BeforeSums() + plans.queries.SumBytes()));
  csr.log2_scale = p.scale * kLog2OfE<double>;
  csr.queries_in_pairs = at(plans.CounterBytes());
  csr.counters = plans.CounterBytes() / static_cast<int64_t>(sizeof(uint32_t));
  return csr;
}

std::string Launch(const Problem& p, const CudaLaunch& launch) {
  AttentionCsrCotangentProblem csr = WithPasses(p);
  return launch.With(&csr);
}

// Clears counters and writes pairs.
constexpr CudaKernel<Problem> kPrologue{
    [](const Problem& p) {
      const char* acc = p.dtype == DType::kFloat64 ? "double" : "float";
      return KernelSource{"attention/kernels/csr_prologue.cu",
                          KernelExpression("AttentionCsrPrologue", {acc})};
    },
    [](const Problem& p) {
      constexpr int64_t kOfThread = 4;  // queries
      const int64_t queries = p.groups * p.per_group * p.queries;
      const int64_t blocks = std::max<int64_t>(CeilDivide(queries, kOfThread * kCsrThreads), 1);
      return LaunchShape{HasWorkspace(p) ? p.batch.count * blocks : 0, kCsrThreads};
    },
    Launch};

int64_t Bytes(const Problem& p) { return Plans(p).Bytes(); }

// Fitted to an H200's times: on tensor cores 1,019 to 1,466 us of 2 million entries and 8 heads,
// otherwise, with lse and ct_sums read one by one, 14.3 us of 10,556 entries and 8 heads of 8, and
// 1,266 to 2,894 us of 2 million. An entry takes more than it gathers.
double Cost(const Problem& p) {
  const AttentionCsrConfig config = ConfigOf(p);
  const double of_entry = config.on_tensor_cores ? 20e-6 : 27e-6;
  const auto heads = static_cast<double>(p.batch.count * p.groups * p.per_group);
  return 10 + CsrMicroseconds(p, config, 2) + of_entry * heads * static_cast<double>(p.pattern.nse);
}

}  // namespace

extern constinit const CudaVariant<AttentionCotangentProblem> kAttentionCotangentCsr =
    CsrVariant<Problem, ConfigOf, Shape, Bytes>::With(Cost, Source, &kPrologue, Launch);

}  // namespace jaxsparse
