// FFI targets of the sparse-dense product.
#include "host/activations.h"
#include "host/registry.h"
#include "spmm/spmm.h"

namespace jaxsparse {
namespace {

struct Spmm {
  using Problem = SpmmProblem;
  static constexpr char kName[] = "spmm";

  // Of a transposed product the pattern is that of the transposed matrix, and behind it comes the
  // one as it is stored.
  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    Dimension m("m"), k("k"), n("n"), nse("nse");
    p.transposed = call.Attribute<bool>("permuted");
    p.dense_on_left = call.Attribute<bool>("dense_on_left");
    p.activation = call.Choice("activation", kActivations);
    const int64_t workspace = call.Integer("workspace", 0, kMostBytes);

    const auto dense = [&](Dimension& rows) -> std::pair<Extent, Extent> {
      if (p.dense_on_left) return {n, rows};
      return {rows, n};
    };
    ElementType out_dtype(kFloats);
    const auto out = dense(m), x = dense(k);
    p.out = call.Result("out", out_dtype, {out.first, out.second});
    if (call.results_left() > (workspace > 0 ? 1 : 0)) {
      p.preactivation = call.Result("preactivation", out_dtype, {out.first, out.second});
    }
    p.workspace = call.ResultWorkspace(workspace);

    ElementType dtype = ElementType::FactorsOf(out_dtype);
    p.values = call.Operand("values", dtype, {nse});
    p.x = call.Operand("x", dtype, {x.first, x.second});
    p.pattern = call.OperandPattern(m, k, nse);
    p.stored = p.pattern;
    if (p.transposed) {
      p.pattern.permutation = call.Operand("permutation", {ffi::S32}, {nse});
      p.stored = call.OperandStored(k, m, nse);
    }
    if (m.size == 0 || k.size == 0) p.pattern.nse = p.stored.nse = 0;  // all of them are padding
    p.stored.tile_starts = call.OperandTileStarts(p.stored);
    p.row_cuts = call.OperandRowCuts(p.pattern);
    if (call.operands_left() > 0) p.bias = call.Operand("bias", dtype, {m});
    p.n = n.size;
    p.batch = call.batch();
    p.dtype = DTypeOf(dtype);
    p.out_dtype = DTypeOf(out_dtype);
  }

  static Table<CpuVariant<Problem>> CpuVariants() {
    return ForCurrentIsa(portable::kSpmmCpuVariants, avx2::kSpmmCpuVariants,
                         avx512::kSpmmCpuVariants);
  }
  static Table<CudaVariant<Problem>> CudaVariants() { return kSpmmCudaVariants; }
};

}  // namespace

OperationEntry SpmmEntry() {
  std::vector<SpmmProblem> problems;
  int32_t permuted = 0, cuts = 0;  // only whether there are a permutation and cuts counts
  for (const DTypePair types : kDTypePairs) {
    for (const IndexType index : {IndexType::kInt32, IndexType::kUint16}) {
      SpmmProblem problem;
      problem.dtype = types.dtype;
      problem.out_dtype = types.out_dtype;
      problem.pattern.index_type = index;
      problem.n = 128;  // a size at which variants are different kernels, but for tensor cores
      problem.workspace.bytes = int64_t{1} << 30;
      problem.pattern.rows = 512;
      problem.pattern.nse = 65536;
      problem.stored = problem.pattern;
      problem.row_cuts.data = &cuts;
      problems.push_back(problem);
      problem.transposed = true;
      problem.pattern.permutation.data = &permuted;
      problems.push_back(problem);
      problem.dense_on_left = true;
      problems.push_back(problem);
    }
  }
  return MakeEntry<Spmm>(problems);
}

}  // namespace jaxsparse
