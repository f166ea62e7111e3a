#include "persistent/densify.h"

#include "nvrtc/expression.h"

namespace jaxsparse {

KernelSource DensifySource(DType dtype, IndexType index_type) {
  return {"persistent/densify.cu",
          KernelExpression("Densify", {TypeName(dtype), TypeName(index_type)})};
}

std::string Densify(const DensifyProblem& problem, DType dtype, IndexType index_type, int device,
                    void* stream) {
  std::string reason;
  const void* kernel = GetKernel(DensifySource(dtype, index_type), device, &reason);
  if (kernel == nullptr) return reason;
  DensifyProblem p = problem;
  return LaunchKernel(kernel, {p.rows, kDensifyThreads}, &p, device, stream);
}

}  // namespace jaxsparse
