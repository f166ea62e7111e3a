// The softmax with rows in registers on the host: how it is configured, its predicted time, its
// instance and its launch.
#include "sparse_softmax/kernels/registers.h"

#include "nvrtc/expression.h"
#include "sparse_softmax/cost.h"
#include "sparse_softmax/sparse_softmax_cuda.h"

namespace jaxsparse {
namespace {

// The least of the softmax's kernels, so that this one is taken unless another is asked for.
constexpr SoftmaxCostModel kCostModel{.launch_us = 3.0, .entry_us = 2.3e-6};

// Room for rows of twice the mean length, in few lanes as long as they have few vectors. Where
// those of a warp have no room for rows somewhat longer than the mean, in as few of a block as
// have.
SparseSoftmaxRegistersConfig ConfigOf(const SparseSoftmaxProblem& p) {
  constexpr int kFewVectors = 2, kMostVectors = 8, kMostLanes = 256;
  const int64_t elements = 16 / SizeOf(p.dtype);  // of a vector
  const auto vectors_of = [&](int64_t eighths) {  // of the mean length
    return CeilDivide(eighths * p.pattern.nse, 8 * (p.pattern.rows + 1) * elements) + 1;
  };
  SparseSoftmaxRegistersConfig config{.backward = p.backward};
  while (config.lanes < kWarp && config.lanes * kFewVectors < vectors_of(16)) config.lanes *= 2;
  while (config.lanes < kMostLanes && config.lanes * kMostVectors < vectors_of(9)) {
    config.lanes *= 2;
  }
  while (config.vectors < kMostVectors && config.lanes * config.vectors < vectors_of(16)) {
    config.vectors *= 2;
  }
  return config;
}

KernelSource Source(const SparseSoftmaxProblem& p) {
  const SparseSoftmaxRegistersConfig config = ConfigOf(p);
  const std::string text =
      ConfigExpression("SparseSoftmaxRegistersConfig",
                       {Field("lanes", config.lanes), Field("vectors", config.vectors),
                        Field("backward", config.backward)});
  return {"sparse_softmax/kernels/registers.cu",
          KernelExpression("SparseSoftmaxInRegisters", {TypeName(p.dtype), text})};
}

LaunchShape Shape(const SparseSoftmaxProblem& p) {
  const SparseSoftmaxRegistersConfig config = ConfigOf(p);
  if (p.pattern.nse == 0) return {0, SparseSoftmaxRegistersConfig().Threads()};
  const int64_t of_entry = CeilDivide(p.pattern.rows, config.OwnerRows());
  const int64_t all = p.batch.count * (of_entry > 0 ? of_entry : 1);  // one for padding alone
  return {CeilDivide(all, config.Owners()), config.Threads()};
}

}  // namespace

extern constinit const CudaVariant<SparseSoftmaxProblem> kSparseSoftmaxRowsInRegisters = {
    "rows_in_registers", [](const SparseSoftmaxProblem&) { return true; },
    [](const SparseSoftmaxProblem& p) { return kCostModel.Of(p); }, Source, Shape};

}  // namespace jaxsparse
