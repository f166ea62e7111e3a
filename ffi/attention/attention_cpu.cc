// CPU kernels of attention over a block mask or a pattern.
#include "attention/attention.h"
#include "attention/cotangent_cpu.h"
#include "attention/csr_attention_cpu.h"
#include "attention/csr_cotangent_cpu.h"
#include "attention/tangent_cpu.h"
#include "attention/tiles_cpu.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// What a tile or one of its partial cells takes is as much as that of so many entries by rows.
constexpr double kEntriesOfCell = 400;
double CostOfTiles(const AttentionOperands& p) {
  return kEntriesOfCell * static_cast<double>(p.mask.capacity + p.mask.cells);
}
double CostOfRows(const MaskPattern& pattern) { return static_cast<double>(pattern.nse); }

constexpr CpuVariant<AttentionProblem> kAttentionVariants[] = {
    {"tiles", [](const AttentionProblem& p) { return p.has_mask && !p.scores.Exist(); },
     [](const AttentionProblem& p) { return CostOfTiles(p); },
     [](const AttentionProblem& problem, Workers& workers) {
       DispatchDType(problem.dtype, [&]<typename T>() { Attention<T>(problem, workers); });
     }},
    {"csr", [](const AttentionProblem& p) { return p.has_pattern && !p.scores.Exist(); },
     [](const AttentionProblem& p) { return CostOfRows(p.pattern); },
     [](const AttentionProblem& problem, Workers& workers) {
       DispatchDType(problem.dtype, [&]<typename T>() { CsrAttention<T>(problem, workers); });
     }},
};

constexpr CpuVariant<AttentionTangentProblem> kTangentVariants[] = {
    {"tiles", [](const AttentionTangentProblem& p) { return p.has_mask; },
     [](const AttentionTangentProblem& p) { return CostOfTiles(p); },
     [](const AttentionTangentProblem& problem, Workers& workers) {
       DispatchDType(problem.dtype, [&]<typename T>() { AttentionTangent<T>(problem, workers); });
     }},
};

constexpr CpuVariant<AttentionCotangentProblem> kCotangentVariants[] = {
    {"tiles", [](const AttentionCotangentProblem& p) { return p.has_mask && !p.scores.Exist(); },
     [](const AttentionCotangentProblem& p) { return CostOfTiles(p); },
     [](const AttentionCotangentProblem& problem, Workers& workers) {
       DispatchDType(problem.dtype, [&]<typename T>() { AttentionCotangent<T>(problem, workers); });
     }},
    {"csr", [](const AttentionCotangentProblem& p) { return p.has_pattern && !p.scores.Exist(); },
     [](const AttentionCotangentProblem& p) { return CostOfRows(p.pattern); },
     [](const AttentionCotangentProblem& problem, Workers& workers) {
       DispatchDType(problem.dtype, [&]<typename T>() { CsrCotangent<T>(problem, workers); });
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
