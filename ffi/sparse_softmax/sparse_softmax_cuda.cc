// CUDA variants of the softmax over stored entries: which kernel, and how it is launched.
#include "nvrtc/type_names.h"
#include "sparse_softmax/sparse_softmax.h"

namespace jaxsparse {
namespace {

constexpr int kThreads = 128;

KernelSource Rows(const SparseSoftmaxProblem& p) {
  return {"sparse_softmax/sparse_softmax.cu", "jaxsparse::SparseSoftmaxRows<" + TypeName(p.dtype) +
                                                  (p.backward ? ", true>" : ", false>")};
}

// A warp a row, and one for the padding.
LaunchShape RowsShape(const SparseSoftmaxProblem& p) {
  const int64_t units = p.pattern.nse == 0 ? 0 : p.batch.count * (p.pattern.rows + 1);
  return {CeilDivide(units, kThreads / kWarp), kThreads};
}

constexpr CudaVariant<SparseSoftmaxProblem> kVariants[] = {
    {"generic_rows", [](const SparseSoftmaxProblem&) { return true; },
     [](const SparseSoftmaxProblem&) { return 1.0; }, Rows, RowsShape},
};

}  // namespace

extern constinit const Table<CudaVariant<SparseSoftmaxProblem>> kSparseSoftmaxCudaVariants =
    MakeTable(kVariants);

}  // namespace jaxsparse
