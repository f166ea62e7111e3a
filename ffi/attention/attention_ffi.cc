// FFI targets of attention over a block mask or a pattern, of its derivative and of the transpose
// of that.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "attention/attention.h"
#include "attention/scores_ffi.h"
#include "host/registry.h"

namespace jaxsparse {
namespace {

// Which heads have masks of their own.
struct MaskHeads {
  Extent groups, per_group;

  static MaskHeads Of(CallParser& call, AttentionDimensions& d) {
    Extent groups = 1, per_group = 1;
    if (call.Attribute<bool>("mask_of_group")) groups = d.groups;
    if (call.Attribute<bool>("mask_of_head")) per_group = d.per_group;
    return {groups, per_group};
  }
};

// What sums of such numbers are taken in.
ElementType AccumulatorOf(const ElementType& dtype) {
  if (dtype.is(ffi::F64)) return {ffi::F64};
  return {ffi::F32};
}

int64_t SizeOf(const Extent& extent) {
  return (extent.dimension == nullptr ? 0 : extent.dimension->size) + extent.more;
}

// `rows` and `columns` are positions.
MaskTiles OperandMask(CallParser& call, const MaskHeads& heads, int64_t rows, int64_t columns) {
  const auto [groups, per_group] = heads;
  Dimension capacity("capacity"), cells("cells");
  MaskTiles mask;
  mask.rows = CeilDivide(rows, kMaskTile);
  mask.columns = CeilDivide(columns, kMaskTile);
  mask.offsets = call.Operand("offsets", {ffi::S32}, {groups, per_group, mask.rows + 1});
  mask.entries = call.Operand("entries", {ffi::U32}, {groups, per_group, capacity});
  mask.bits_at = call.Operand("bits_at", {ffi::S32}, {groups, per_group, capacity});
  mask.bits = call.Operand("bits", {ffi::U32}, {groups, per_group, cells, kMaskCellWords});
  mask.order = call.Operand("order", {ffi::S32}, {groups, per_group, mask.rows});
  mask.groups = SizeOf(groups);
  mask.per_group = SizeOf(per_group);
  mask.capacity = capacity.size;
  mask.cells = cells.size;
  return mask;
}

// The dimensions are positions.
MaskPattern OperandPattern(CallParser& call, const MaskHeads& heads, Dimension& rows,
                           Dimension& columns) {
  const auto [groups, per_group] = heads;
  Dimension nse("nse");
  ElementType index(kIndices);
  MaskPattern pattern;
  pattern.row_offsets = call.Operand("row_offsets", {ffi::S32}, {groups, per_group, rows + 1});
  pattern.column_indices = call.Operand("column_indices", index, {groups, per_group, nse});
  pattern.row_order = call.Operand("row_order", {ffi::S32}, {groups, per_group, rows});
  pattern.groups = SizeOf(groups);
  pattern.per_group = SizeOf(per_group);
  pattern.rows = rows.size;
  pattern.columns = columns.size;
  // Without rows or columns all entries are padding.
  pattern.nse = rows.size == 0 || columns.size == 0 ? 0 : nse.size;
  pattern.index_type = IndexTypeOf(index);
  if (std::max({rows.size, columns.size, nse.size}) > kMostIndex) {
    call.Fail("rows, columns and stored entries of a pattern must be less than 2^31");
  }
  return pattern;
}

// What all targets take first, once their results are declared.
void ParseQueries(CallParser& call, AttentionDimensions& d, ElementType& dtype,
                  AttentionOperands* p) {
  p->workspace = call.ResultWorkspace(call.Integer("workspace", 0, kMostBytes));
  p->query = call.Operand("query", dtype, {d.queries, d.groups, d.per_group, d.head_size});
  p->scale = call.Attribute<double>("scale");
}

// The sizes of a problem of so many keys, once all that says them is declared.
void SetSizes(const AttentionDimensions& d, int64_t keys, const ElementType& dtype,
              AttentionOperands* p) {
  p->queries = d.queries.size;
  p->keys = keys;
  p->groups = d.groups.size;
  p->per_group = d.per_group.size;
  p->head_size = d.head_size.size;
  p->value_size = d.value_size.size;
  p->dtype = DTypeOf(dtype);
}

// What targets take first whose keys are in their order.
void ParseOperands(CallParser& call, AttentionDimensions& d, ElementType& dtype,
                   const MaskHeads& heads, AttentionOperands* operands) {
  AttentionOperands& p = *operands;
  ParseQueries(call, d, dtype, &p);
  p.key = call.Operand("key", dtype, {d.keys, d.groups, d.head_size});
  p.value = call.Operand("value", dtype, {d.keys, d.groups, d.value_size});
  p.has_mask = call.Attribute<bool>("has_mask");
  p.has_pattern = call.Attribute<bool>("has_pattern");
  if (!p.has_mask && !p.has_pattern) call.Fail("takes a block mask or a pattern, got neither");
  if (p.has_mask) p.mask = OperandMask(call, heads, d.queries.size, d.keys.size);
  SetSizes(d, d.keys.size, dtype, &p);
}

struct Attention {
  using Problem = AttentionProblem;
  static constexpr char kName[] = "attention";

  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    AttentionDimensions d;
    ElementType dtype(kFloats);
    p.out = call.Result("out", dtype, {d.queries, d.groups, d.per_group, d.value_size});
    ElementType sums = AccumulatorOf(dtype);
    p.lse = call.Result("lse", sums, {d.groups, d.per_group, d.queries});
    const MaskHeads heads = MaskHeads::Of(call, d);
    ParseOperands(call, d, dtype, heads, &p);
    if (p.has_pattern) p.pattern = OperandPattern(call, heads, d.queries, d.keys);
    p.scores = ParseScores(call, d, {});
    p.batch = call.batch();
  }

  static Table<CpuVariant<Problem>> CpuVariants() {
    return ForCurrentIsa(portable::kAttentionCpuVariants, avx2::kAttentionCpuVariants,
                         avx512::kAttentionCpuVariants);
  }
  static Table<CudaVariant<Problem>> CudaVariants() { return kAttentionCudaVariants; }
};

struct AttentionTangent {
  using Problem = AttentionTangentProblem;
  static constexpr char kName[] = "attention_tangent";

  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    AttentionDimensions d;
    ElementType sums({ffi::F32, ffi::F64});
    p.weighted = call.Result("weighted", sums, {d.queries, d.groups, d.per_group, d.value_size});
    p.sums = call.Result("sums", sums, {d.groups, d.per_group, d.queries});
    ElementType dtype = ElementType::FactorsOf(sums);
    ParseOperands(call, d, dtype, MaskHeads::Of(call, d), &p);
    if (p.has_pattern) call.Fail("takes a block mask, got a pattern");
    p.lse = call.Operand("lse", sums, {d.groups, d.per_group, d.queries});
    p.d_query = call.Operand("d_query", dtype, {d.queries, d.groups, d.per_group, d.head_size});
    p.d_key = call.Operand("d_key", dtype, {d.keys, d.groups, d.head_size});
    p.d_value = call.Operand("d_value", dtype, {d.keys, d.groups, d.value_size});
    p.batch = call.batch();
  }

  static Table<CpuVariant<Problem>> CpuVariants() {
    return ForCurrentIsa(portable::kAttentionTangentCpuVariants, avx2::kAttentionTangentCpuVariants,
                         avx512::kAttentionTangentCpuVariants);
  }
  static Table<CudaVariant<Problem>> CudaVariants() { return kAttentionTangentCudaVariants; }
};

// Keys and values in pages; there is none for CPUs.
struct PagedAttention {
  using Problem = PagedAttentionProblem;
  static constexpr char kName[] = "paged_attention";

  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    AttentionDimensions d;
    Dimension of_sequence("pages"), count("pages of the pool"), size("positions of a page");
    ElementType dtype(kFloats);
    p.out = call.Result("out", dtype, {d.queries, d.groups, d.per_group, d.value_size});
    ElementType sums = AccumulatorOf(dtype);
    p.lse = call.Result("lse", sums, {d.groups, d.per_group, d.queries});
    ParseQueries(call, d, dtype, &p);
    p.key = call.Operand("key", dtype, {count, size, d.groups, d.head_size});
    p.value = call.Operand("value", dtype, {count, size, d.groups, d.value_size});
    p.pages.numbers = call.Operand("pages", {ffi::S32}, {of_sequence});
    p.pages.of_sequence = of_sequence.size;
    p.pages.count = count.size;
    p.pages.size = size.size;
    const int64_t longest = std::max(of_sequence.size, size.size);
    if (longest > kMostIndex) {
      return call.Fail("pages of a sequence and positions of a page must be less than 2^31, got " +
                       std::to_string(longest));
    }
    const int64_t keys = of_sequence.size * size.size;
    p.has_mask = true;
    p.mask = OperandMask(call, MaskHeads::Of(call, d), d.queries.size, keys);
    SetSizes(d, keys, dtype, &p);
    p.batch = call.batch();
  }

  static Table<CpuVariant<Problem>> CpuVariants() { return {nullptr, 0}; }
  static Table<CudaVariant<Problem>> CudaVariants() { return kPagedAttentionCudaVariants; }
};

struct AttentionCotangent {
  using Problem = AttentionCotangentProblem;
  static constexpr char kName[] = "attention_cotangent";

  static void Parse(CallParser& call, Problem* problem) {
    Problem& p = *problem;
    AttentionDimensions d;
    ElementType dtype(kFloats);
    p.ct_query = call.Result("ct_query", dtype, {d.queries, d.groups, d.per_group, d.head_size});
    ElementType sums = AccumulatorOf(dtype);
    p.ct_key = call.Result("ct_key", dtype, {d.keys, d.groups, d.head_size});
    p.ct_value = call.Result("ct_value", dtype, {d.keys, d.groups, d.value_size});
    AttentionScores gradients = ParseScoreGradients(call, d);
    const MaskHeads heads = MaskHeads::Of(call, d);
    ParseOperands(call, d, dtype, heads, &p);
    if (p.has_pattern) p.pattern = OperandPattern(call, heads, d.queries, d.keys);
    if (p.has_mask) p.transposed_mask = OperandMask(call, heads, d.keys.size, d.queries.size);
    if (p.has_pattern) p.transposed_pattern = OperandPattern(call, heads, d.keys, d.queries);
    p.lse = call.Operand("lse", sums, {d.groups, d.per_group, d.queries});
    p.ct_out = call.Operand("ct_out", dtype, {d.queries, d.groups, d.per_group, d.value_size});
    p.ct_sums = call.Operand("ct_sums", sums, {d.groups, d.per_group, d.queries});
    p.scores = ParseScores(call, d, gradients);
    p.batch = call.batch();
  }

  static Table<CpuVariant<Problem>> CpuVariants() {
    return ForCurrentIsa(portable::kAttentionCotangentCpuVariants,
                         avx2::kAttentionCotangentCpuVariants,
                         avx512::kAttentionCotangentCpuVariants);
  }
  static Table<CudaVariant<Problem>> CudaVariants() { return kAttentionCotangentCudaVariants; }
};

// One for every kernel instance: of each type and some sizes of heads, with many queries and with
// few, by a block mask, or by a pattern of each type of indices.
template <typename Problem>
std::vector<Problem> Problems() {
  std::vector<Problem> problems;
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (const auto& [head_size, value_size] : {std::pair{64, 64}, {128, 128}, {192, 128}}) {
      Problem problem;
      problem.dtype = dtype;
      problem.batch.rank = 0;
      problem.queries = problem.keys = 4096;
      problem.head_size = head_size;
      problem.value_size = value_size;
      problem.workspace.bytes = int64_t{1} << 30;
      problem.has_mask = true;
      problems.push_back(problem);
      problem.queries = 1;
      problems.push_back(problem);
      problem.queries = problem.keys;
      problem.has_mask = false;
      problem.has_pattern = true;
      if constexpr (requires { problem.pattern; }) {
        problem.pattern.index_type = head_size == 64 ? IndexType::kInt32 : IndexType::kUint16;
      }
      problems.push_back(problem);
    }
  }
  return problems;
}

}  // namespace

OperationEntry AttentionEntry() { return MakeEntry<Attention>(Problems<AttentionProblem>()); }
OperationEntry AttentionTangentEntry() {
  return MakeEntry<AttentionTangent>(Problems<AttentionTangentProblem>());
}
OperationEntry PagedAttentionEntry() {
  std::vector<PagedAttentionProblem> problems = Problems<PagedAttentionProblem>();
  for (PagedAttentionProblem& problem : problems) {
    problem.pages.size = kMaskTile;
    problem.pages.count = problem.pages.of_sequence = problem.keys / kMaskTile;
  }
  return MakeEntry<PagedAttention>(problems);
}
OperationEntry AttentionCotangentEntry() {
  return MakeEntry<AttentionCotangent>(Problems<AttentionCotangentProblem>());
}

}  // namespace jaxsparse
