// FFI targets of reductions of rows.
#include "host/registry.h"
#include "reduce_rows/reduce_rows.h"

namespace jaxsparse {
namespace {

constexpr struct {
  const char* name;
  Reduction value;
} kReductions[] = {{"max", Reduction::kMaximum}, {"logsumexp", Reduction::kLogSumExp}};

struct ReduceRows {
  using Problem = ReduceRowsProblem;
  static constexpr char kName[] = "reduce_rows";

  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    Dimension m("m"), nse("nse"), columns("columns");
    columns.size = 0;  // which are not read
    ElementType dtype(kFloats);
    p.reduction = call.Choice("reduction", kReductions);
    const int64_t workspace = call.Integer("workspace", 0, kMostBytes);
    p.out = call.Result("out", dtype, {m});
    p.workspace = call.ResultWorkspace(workspace);
    p.values = call.Operand("values", dtype, {nse});
    p.pattern = call.OperandPattern(m, columns, nse);
    p.row_cuts = call.OperandRowCuts(p.pattern);
    p.batch = call.batch();
    p.dtype = DTypeOf(dtype);
  }

  static Table<CpuVariant<Problem>> CpuVariants() {
    return ForCurrentIsa(portable::kReduceRowsCpuVariants, avx2::kReduceRowsCpuVariants,
                         avx512::kReduceRowsCpuVariants);
  }
  static Table<CudaVariant<Problem>> CudaVariants() { return kReduceRowsCudaVariants; }
};

}  // namespace

OperationEntry ReduceRowsEntry() {
  std::vector<ReduceRowsProblem> problems;
  int32_t cuts = 0;  // only whether there are any counts
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (const Reduction reduction : {Reduction::kMaximum, Reduction::kLogSumExp}) {
      ReduceRowsProblem problem;
      problem.dtype = dtype;
      problem.reduction = reduction;
      problem.row_cuts.data = &cuts;
      problems.push_back(problem);
    }
  }
  return MakeEntry<ReduceRows>(problems);
}

}  // namespace jaxsparse
