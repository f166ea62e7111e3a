// CPU kernels of attention over a block mask.
#include "attention/attention.h"
#include "attention/cotangent_cpu.h"
#include "attention/tangent_cpu.h"
#include "attention/tiles_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

constexpr CpuVariant<AttentionProblem> kAttentionVariants[] = {
    {"tiles", [](const AttentionProblem&) { return true; },
     [](const AttentionProblem&) { return 1.0; },
     [](const AttentionProblem& problem, Workers& workers) {
       DispatchDType(problem.dtype, [&]<typename T>() { Attention<T>(problem, workers); });
     }},
};

constexpr CpuVariant<AttentionTangentProblem> kTangentVariants[] = {
    {"tiles", [](const AttentionTangentProblem&) { return true; },
     [](const AttentionTangentProblem&) { return 1.0; },
     [](const AttentionTangentProblem& problem, Workers& workers) {
       DispatchDType(problem.dtype, [&]<typename T>() { AttentionTangent<T>(problem, workers); });
     }},
};

constexpr CpuVariant<AttentionCotangentProblem> kCotangentVariants[] = {
    {"tiles", [](const AttentionCotangentProblem&) { return true; },
     [](const AttentionCotangentProblem&) { return 1.0; },
     [](const AttentionCotangentProblem& problem, Workers& workers) {
       DispatchDType(problem.dtype, [&]<typename T>() { AttentionCotangent<T>(problem, workers); });
     }},
};

}  // namespace

extern constinit const Table<CpuVariant<AttentionProblem>> kAttentionCpuVariants =
    MakeTable(kAttentionVariants);
extern constinit const Table<CpuVariant<AttentionTangentProblem>> kAttentionTangentCpuVariants =
    MakeTable(kTangentVariants);
extern constinit const Table<CpuVariant<AttentionCotangentProblem>> kAttentionCotangentCpuVariants =
    MakeTable(kCotangentVariants);

}  // namespace jaxsparse::JAXSPARSE_ISA
