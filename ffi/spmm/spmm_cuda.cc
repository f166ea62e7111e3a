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

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// As the kernel cuts its work: lanes by columns, four columns a lane.
LaunchShape RowsShape(const SpmmProblem& p) {
  int64_t lanes = 1;
  while (lanes < p.n && lanes < 32) lanes *= 2;
  const int64_t units = p.batch.count * CeilDivide(p.n, lanes * 4) * p.pattern.rows;
  return {CeilDivide(units, kThreads / lanes), kThreads};
}

LaunchShape DotsShape(const SpmmProblem& p) {
  return {CeilDivide(p.batch.count * p.n * p.pattern.rows, kThreads / 32), kThreads};
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
