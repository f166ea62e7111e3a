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
    const int64_t workspace = call.Integer("workspace", 0, kMostBytes);
    p.out = call.Result("out", dtype, {nse});
    p.workspace = call.ResultWorkspace(workspace);
    p.values = call.Operand("values", dtype, {nse});
    p.pattern = call.OperandPattern(m, columns, nse);
    p.row_cuts = call.OperandRowCuts(p.pattern);
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
  int32_t cuts = 0;  // only whether there are any counts
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (const bool backward : {false, true}) {
      SparseSoftmaxProblem problem;
      problem.dtype = dtype;
      problem.backward = backward;
      problem.row_cuts.data = &cuts;
      problems.push_back(problem);
    }
  }
  return MakeEntry<SparseSoftmax>(problems);
}

}  // namespace jaxsparse
