// CPU kernels of attention over a block mask.
#include "attention/attention.h"
#include "attention/cotangent_cpu.h"
#include "attention/tiles_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

constexpr CpuVariant<AttentionProblem> kAttentionVariants[] = {
    {"tiles", [](const AttentionProblem& problem) { return !problem.scores.Exist(); },
     [](const AttentionProblem&) { return 1.0; },
     [](const AttentionProblem& problem, Workers& workers) {
       DispatchDType(problem.dtype, [&]<typename T>() { Attention<T>(problem, workers); });
     }},
};

constexpr CpuVariant<AttentionCotangentProblem> kCotangentVariants[] = {
    {"tiles", [](const AttentionCotangentProblem& problem) { return !problem.scores.Exist(); },
     [](const AttentionCotangentProblem&) { return 1.0; },
     [](const AttentionCotangentProblem& problem, Workers& workers) {
       DispatchDType(problem.dtype, [&]<typename T>() { AttentionCotangent<T>(problem, workers); });
     }},
};

}  // namespace

extern constinit const Table<CpuVariant<AttentionProblem>> kAttentionCpuVariants =
    MakeTable(kAttentionVariants);
extern constinit const Table<CpuVariant<AttentionCotangentProblem>> kAttentionCotangentCpuVariants =
    MakeTable(kCotangentVariants);

}  // namespace jaxsparse::JAXSPARSE_ISA
