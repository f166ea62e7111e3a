// FFI targets of the sampled dense-dense product.
#include "host/registry.h"
#include "sddmm/sddmm.h"

namespace jaxsparse {
namespace {

struct Sddmm {
  using Problem = SddmmProblem;
  static constexpr char kName[] = "sddmm";

  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    Dimension m("m"), n("n"), d("d"), nse("nse");
    ElementType out_dtype(kFloats);
    p.out = call.Result("out", out_dtype, {nse});
    p.workspace = call.ResultWorkspace(call.Integer("workspace", 0, kMostBytes));
    ElementType dtype = ElementType::FactorsOf(out_dtype);
    p.x = call.Operand("x", dtype, {m, d});
    p.y = call.Operand("y", dtype, {n, d});
    p.pattern = call.OperandPattern(m, n, nse);
    p.pattern.tile_starts = call.OperandTileStarts(p.pattern);
    if (call.operands_left() > 0) p.scale_by = call.Operand("scale_by", dtype, {nse});
    if (n.size == 0) p.pattern.rows = 0;  // no entry has a place: all of them are padding
    p.d = d.size;
    p.batch = call.batch();
    p.dtype = DTypeOf(dtype);
    p.out_dtype = DTypeOf(out_dtype);
  }

  static Table<CpuVariant<Problem>> CpuVariants() {
    return ForCurrentIsa(portable::kSddmmCpuVariants, avx2::kSddmmCpuVariants,
                         avx512::kSddmmCpuVariants);
  }
  static Table<CudaVariant<Problem>> CudaVariants() { return kSddmmCudaVariants; }
};

}  // namespace

OperationEntry SddmmEntry() {
  std::vector<SddmmProblem> problems;
  for (const DTypePair types : kDTypePairs) {
    for (const IndexType index : {IndexType::kInt32, IndexType::kUint16}) {
      for (const int64_t rows : {1024, 16384}) {  // of 512 entries, and of 32
        SddmmProblem problem;
        problem.d = rows == 1024 ? 32 : 128;
        problem.pattern.rows = problem.pattern.columns = rows;
        problem.pattern.nse = 1 << 19;
        problem.workspace.bytes = int64_t{1} << 30;
        problem.dtype = types.dtype;
        problem.out_dtype = types.out_dtype;
        problem.pattern.index_type = index;
        problems.push_back(problem);
      }
    }
  }
  return MakeEntry<Sddmm>(problems);
}

}  // namespace jaxsparse
