// CUDA variants of the sparse-dense product: which kernel, and how it is launched.
#include "nvrtc/type_names.h"
#include "spmm/spmm.h"

namespace jaxsparse {
namespace {

constexpr int kThreads = 128;

KernelSource Instance(const char* kernel, const SpmmProblem& p) {
  return {"spmm/spmm.cu", std::string("jaxsparse::") + kernel + "<" + TypeName(p.dtype) + ", " +
                              TypeName(p.out_dtype) + ", " + TypeName(p.pattern.index_type) + ">"};
}

LaunchShape RowsShape(const SpmmProblem& p) {
  const int lanes = LanesFor(p.n);
  const int64_t tiles = CeilDivide(p.n, static_cast<int64_t>(lanes) * kSpmmColumnsPerLane);
  return {CeilDivide(p.batch.count * tiles * p.pattern.rows, kThreads / lanes), kThreads};
}

LaunchShape DotsShape(const SpmmProblem& p) {
  return {CeilDivide(p.batch.count * p.n * p.pattern.rows, kThreads / kWarp), kThreads};
}

constexpr CudaVariant<SpmmProblem> kVariants[] = {
    {"generic_rows", [](const SpmmProblem& p) { return !p.dense_on_left; },
     [](const SpmmProblem&) { return 1.0; },
     [](const SpmmProblem& p) { return Instance("SpmmRows", p); }, RowsShape},
    {"generic_dots", [](const SpmmProblem& p) { return p.dense_on_left; },
     [](const SpmmProblem&) { return 1.0; },
     [](const SpmmProblem& p) { return Instance("SpmmDots", p); }, DotsShape},
};

}  // namespace

extern constinit const Table<CudaVariant<SpmmProblem>> kSpmmCudaVariants = MakeTable(kVariants);

}  // namespace jaxsparse
