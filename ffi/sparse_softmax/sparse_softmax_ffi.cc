// FFI targets of the softmax over stored entries and of its derivative.
#include "common/registry.h"
#include "sparse_softmax/sparse_softmax.h"

namespace jaxsparse {
namespace {

struct SparseSoftmax {
  using Problem = SparseSoftmaxProblem;
  static constexpr char kName[] = "sparse_softmax";
  static constexpr size_t kResultRank = 1;

  // Operands: values, the pattern's three, and for the derivative the tangent. Result: the values.
  static void Parse(CallParser& call, Problem* problem) {
    enum { kValues, kPattern, kTangent = kPattern + 3 };
    Problem& p = *problem;
    p.pattern = call.OperandPattern(kPattern, 0, false);
    p.scale = call.Attribute<double>("scale");
    p.backward = call.operands() > kTangent;
    p.batch = call.batch();
    p.dtype = call.OperandDType(kValues, "values");
    p.values = call.Operand(kValues, "values", {p.pattern.nse});
    if (p.backward) p.tangent = call.Operand(kTangent, "tangent", {p.pattern.nse});
    p.out = call.Result(0, "out", {p.pattern.nse});
  }

  static Table<CpuVariant<Problem>> CpuVariants() {
    return ForCurrentIsa(portable::kSparseSoftmaxCpuVariants, avx2::kSparseSoftmaxCpuVariants,
                         avx512::kSparseSoftmaxCpuVariants);
  }
  static Table<CudaVariant<Problem>> CudaVariants() { return kSparseSoftmaxCudaVariants; }
};

}  // namespace

OperationEntry SparseSoftmaxEntry() {
  std::vector<SparseSoftmaxProblem> problems;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (const bool backward : {false, true}) {
      SparseSoftmaxProblem problem;
      problem.dtype = dtype;
      problem.backward = backward;
      problems.push_back(problem);
    }
  }
  return MakeEntry<SparseSoftmax>(problems);
}

}  // namespace jaxsparse
