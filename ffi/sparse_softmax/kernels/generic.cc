// The generic kernel of the softmax over stored entries on the host: its predicted time, its
// instance and its launch.
#include "sparse_softmax/kernels/generic.h"

#include "nvrtc/expression.h"
#include "sparse_softmax/cost.h"
#include "sparse_softmax/sparse_softmax_cuda.h"

namespace jaxsparse {
namespace {

constexpr SoftmaxCostModel kCostModel{.launch_us = 4.2, .entry_us = 3e-6};

KernelSource Source(const SparseSoftmaxProblem& p) {
  const std::string text =
      ConfigExpression("SparseSoftmaxGenericConfig", {Field("backward", p.backward)});
  return {"sparse_softmax/kernels/generic.cu",
          KernelExpression("SparseSoftmaxRows", {TypeName(p.dtype), text})};
}

// A warp a row, and one for the padding.
LaunchShape Shape(const SparseSoftmaxProblem& p) {
  const int64_t units = p.pattern.nse == 0 ? 0 : p.batch.count * (p.pattern.rows + 1);
  return {CeilDivide(units, kSoftmaxGenericThreads / kWarp), kSoftmaxGenericThreads};
}

}  // namespace

extern constinit const CudaVariant<SparseSoftmaxProblem> kSparseSoftmaxGenericRows = {
    "generic_rows", [](const SparseSoftmaxProblem&) { return true; },
    [](const SparseSoftmaxProblem& p) { return kCostModel.Of(p); }, Source, Shape};

}  // namespace jaxsparse
