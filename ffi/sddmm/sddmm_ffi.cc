// FFI targets of the sampled dense-dense product.
#include "common/registry.h"
#include "sddmm/sddmm.h"

namespace jaxsparse {
namespace {

struct Sddmm {
  using Problem = SddmmProblem;
  static constexpr char kName[] = "sddmm";
  static constexpr size_t kResultRank = 1;

  // Operands: x, y, the pattern's three and the starts of its tiles, scale_by if there is one.
  // Results: the values, the workspace if there is one.
  static void Parse(CallParser& call, Problem* problem) {
    enum { kX, kY, kPattern, kStarts = kPattern + 3, kScaleBy };
    Problem& p = *problem;
    p.d = call.Size(kX, 0);
    const int64_t columns = call.Size(kY, 1);
    p.pattern = call.OperandPattern(kPattern, columns, false);
    p.pattern.tile_starts = call.OperandTileStarts(kStarts, p.pattern);
    p.batch = call.batch();
    p.dtype = call.OperandDType(kX, "x");
    p.out_dtype = call.ResultDType(0, "out");
    p.x = call.Operand(kX, "x", {p.pattern.rows, p.d});
    p.y = call.Operand(kY, "y", {columns, p.d});
    if (call.operands() > kScaleBy) {
      p.scale_by = call.Operand(kScaleBy, "scale_by", {p.pattern.nse});
    }
    p.out = call.Result(0, "out", {p.pattern.nse});
    p.workspace = call.ResultWorkspace(1);
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
