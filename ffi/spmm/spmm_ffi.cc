// FFI targets of the sparse-dense product.
#include "common/registry.h"
#include "spmm/spmm.h"

namespace jaxsparse {
namespace {

Activation ParseActivation(CallParser& call) {
  static constexpr struct {
    std::string_view name;
    Activation value;
  } kTable[] = {
      {"none", Activation::kNone}, {"relu", Activation::kRelu}, {"gelu", Activation::kGelu}};
  const auto name = call.Attribute<std::string_view>("activation");
  for (const auto& row : kTable) {
    if (name == row.name) return row.value;
  }
  call.Fail("unknown activation '" + std::string(name) + "'");
  return Activation::kNone;
}

struct Spmm {
  using Problem = SpmmProblem;
  static constexpr char kName[] = "spmm";
  static constexpr size_t kResultRank = 2;

  // Operands: values, x, the pattern's three, or of a transposed product four and two of the stored
  // one, the starts of its tiles, bias if there is one. Results: out, the preactivation if it is
  // asked for, the workspace if there is one.
  static void Parse(CallParser& call, Problem* problem) {
    enum { kValues, kX, kPattern };
    Problem& p = *problem;
    const bool permuted = call.Attribute<bool>("permuted");
    const size_t starts = kPattern + (permuted ? 6 : 3), bias = starts + 1;
    p.dense_on_left = call.Attribute<bool>("dense_on_left");
    p.activation = ParseActivation(call);
    p.n = call.Size(kX, p.dense_on_left ? 1 : 0);
    const int64_t k = call.Size(kX, p.dense_on_left ? 0 : 1);
    p.pattern = call.OperandPattern(kPattern, k, permuted);
    const int64_t m = p.pattern.rows;
    p.transposed = permuted;
    p.stored = permuted ? call.OperandStored(kPattern + 4, m) : p.pattern;
    if (permuted && (p.stored.rows != k || p.stored.nse != p.pattern.nse)) {
      call.Fail("the stored pattern is not that of which the other one is the transpose");
    }
    p.stored.tile_starts = call.OperandTileStarts(starts, p.stored);
    p.batch = call.batch();
    p.dtype = call.OperandDType(kX, "x");
    p.out_dtype = call.ResultDType(0, "out");
    p.values = call.Operand(kValues, "values", {p.pattern.nse});
    p.x = p.dense_on_left ? call.Operand(kX, "x", {p.n, k}) : call.Operand(kX, "x", {k, p.n});
    if (call.operands() > bias) p.bias = call.Operand(bias, "bias", {m});
    const int64_t first = p.dense_on_left ? p.n : m, second = p.dense_on_left ? m : p.n;
    p.out = call.Result(0, "out", {first, second});
    p.workspace = call.ResultWorkspace(call.results() - 1);
    if (call.results() > (p.workspace.bytes > 0 ? 2 : 1)) {
      p.preactivation = call.Result(1, "preactivation", {first, second});
    }
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
  int32_t permuted = 0;  // only whether there is a permutation counts
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
