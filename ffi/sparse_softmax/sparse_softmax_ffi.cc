// FFI targets of the softmax over stored entries and of its derivative.
#include "host/registry.h"
#include "sparse_softmax/sparse_softmax.h"

namespace jaxsparse {
namespace {

struct SparseSoftmax {
  using Problem = SparseSoftmaxProblem;
  static constexpr char kName[] = "sparse_softmax";

  // With a tangent it is the derivative.
  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    Dimension m("m"), nse("nse"), columns("columns");
    columns.size = 0;  // which are not read
    ElementType dtype(kFloats);
    p.scale = call.Attribute<double>("scale");
    p.out = call.Result("out", dtype, {nse});
    p.values = call.Operand("values", dtype, {nse});
    p.pattern = call.OperandPattern(m, columns, nse);
    p.backward = call.operands_left() > 0;
    if (p.backward) p.tangent = call.Operand("tangent", dtype, {nse});
    p.batch = call.batch();
    p.dtype = DTypeOf(dtype);
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
