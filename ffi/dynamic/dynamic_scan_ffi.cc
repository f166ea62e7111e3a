// FFI target of scans over graphs. What to launch was planned when the program was lowered
// (dynamic/team_plan.h): the attributes carry the kernel's source and its launch, the last result
// is its workspace. There is no CPU kernel: elsewhere the scan is a loop of XLA.
#include <string>
#include <string_view>
#include <vector>

#include "dynamic/graph_call.h"
#include "dynamic/problem.h"
#include "dynamic/script.h"
#include "dynamic/team_plan.h"
#include "dynamic/workspace.h"
#include "persistent/fill.h"
#include "recurrent/scan_targets.h"
#include "recurrent/variants.h"

namespace jaxsparse {
namespace {

struct DynamicScanCall {
  Batch batch;
  KernelLaunch launch;
  int64_t teams = 1;
  char* workspace = nullptr;
  ScriptForm form;
  bool emits = false;
  int64_t window = 0;  // tiles whose sums need no memory
  int64_t hidden = 0;

  int64_t state_bytes = 0;  // of an element
  int64_t states_of_row = 1;
  int64_t weight_row_stride = 0, weight_column_stride = 0, weight_kind_bytes = 0;
  Array weights, script, states, leaf_states, leaf_sums;
  std::vector<Array> leaf_carries, carries;  // float32; where rows emit, the latter are workspace
  ScanArrays arrays;                         // inputs and outputs

  int64_t Rows() const { return form.tiles * form.width; }
  bool HasSums() const { return emits && form.tiles > window; }
  int64_t SumArrays() const {
    return HasSums() ? 1 + static_cast<int64_t>(leaf_carries.size()) : 0;
  }
  GraphWorkspace Workspace() const { return {teams, SumArrays(), Rows() * hidden}; }
};

void ParseArrays(CallParser& call, DynamicScanCall* c) {
  const int64_t products = call.Integer("products", 1, kMaxGraphArrays);
  const int64_t carries = call.Integer("carries", 0, kMaxGraphArrays);
  const std::vector<Span> inputs = Spans(call, "inputs", "rh", kMaxGraphArrays),
                          outputs = Spans(call, "outputs", "", kMaxGraphArrays);
  const auto input_dtypes = DTypeNames(call, "input_dtypes", inputs.size());
  const auto output_dtypes = DTypeNames(call, "output_dtypes", outputs.size());
  const int64_t rows = c->Rows(), leaves = c->form.leaves;
  Dimension h("units");
  ElementType dtype = ElementType::OneOf(kScanDTypes), float32 = {ffi::F32};
  c->states_of_row = c->emits ? products : 1;
  c->states = call.Result("states", dtype, {rows, c->states_of_row, h});
  if (c->emits) c->leaf_sums = call.Result("reached", float32, {leaves, 1, h});
  for (int64_t i = 0; i < carries; ++i) {
    const Array array = call.Result("carry", float32, {c->emits ? leaves : rows, h});
    (c->emits ? c->leaf_carries : c->carries).push_back(array);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    ElementType type = TypeNamed(call, output_dtypes[i], dtype);
    const Array array = call.Result("output", type, {rows, outputs[i].parts, h});
    c->arrays.outputs.push_back({array, SizeOf(DTypeOf(type))});
  }
  CheckUnits(call, products, c->form.slots, h);
  if (!call.ok()) return;
  c->hidden = h.size;
  c->state_bytes = SizeOf(DTypeOf(dtype));
  const int64_t columns = products * h.size;
  c->weights = call.Operand("weights", dtype, {c->form.kinds, c->form.slots * h.size, columns});
  c->weight_row_stride = c->emits ? columns : 1;
  c->weight_column_stride = c->emits ? 1 : columns;
  c->weight_kind_bytes = c->form.slots * h.size * columns * c->state_bytes;
  c->script = ParseScript(call, c->form.RootsAt());
  if (!c->emits) {
    c->leaf_states = call.Operand("state", dtype, {leaves, 1, h});
    for (int64_t i = 0; i < carries; ++i) {
      c->leaf_carries.push_back(call.Operand("carry", float32, {leaves, h}));
    }
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    c->arrays.inputs.push_back(ParseInput(call, inputs[i], input_dtypes[i], rows, h, dtype));
  }
}

// Where a batch entry has its arrays.
GraphScanProblem ProblemOf(const DynamicScanCall& c, int64_t entry) {
  const auto at = [&](const Array& array, int64_t bytes) {
    return EntryOf(c.batch, entry, array, bytes);
  };
  const auto floats = [&](const Array& array) {
    return reinterpret_cast<float*>(at(array, sizeof(float)));
  };
  const GraphWorkspace workspace = c.Workspace();
  GraphScanProblem p = LaunchedOn(reinterpret_cast<const int32_t*>(at(c.script, sizeof(int32_t))),
                                  c.form, c.launch, c.workspace, workspace.launches);
  p.weights = {at(c.weights, c.state_bytes), c.weight_row_stride, c.weight_column_stride};
  p.weight_kind_bytes = c.weight_kind_bytes;
  p.states = at(c.states, c.state_bytes);
  const auto sums_at = [&](int64_t array) {
    return reinterpret_cast<float*>(c.workspace + workspace.SumsAt(array));
  };
  if (c.HasSums()) p.sums = sums_at(0);
  if (c.emits) {
    p.leaf_sums = floats(c.leaf_sums);
  } else {
    p.leaf_states = at(c.leaf_states, c.state_bytes);
  }
  for (size_t i = 0; i < c.leaf_carries.size(); ++i) {
    p.leaf_carries[i] = floats(c.leaf_carries[i]);
    if (c.HasSums()) p.carries[i] = sums_at(1 + static_cast<int64_t>(i));
    if (!c.emits) p.carries[i] = floats(c.carries[i]);
  }
  for (size_t i = 0; i < c.arrays.inputs.size(); ++i) {
    p.inputs[i] = InputOf(c.batch, entry, c.arrays.inputs[i]);
  }
  for (size_t i = 0; i < c.arrays.outputs.size(); ++i) {
    p.outputs[i] = at(c.arrays.outputs[i].array, c.arrays.outputs[i].bytes);
  }
  return p;
}

// What a kernel finds before it begins: states that look unwritten, and sums of nothing. States of
// an earlier scan would be taken for this one's.
FillProblem Cleared(const DynamicScanCall& c, const GraphScanProblem& p) {
  constexpr uint32_t kUnwritten = 0xffffffff;
  const GraphWorkspace workspace = c.Workspace();
  FillProblem fill;
  AddRegion(c.workspace, workspace.launches.ClearedBytes(), kUnwritten, &fill);
  if (c.emits) {
    const int64_t leaf_bytes = c.form.leaves * c.hidden * int64_t{sizeof(float)};
    AddRegion(p.leaf_sums, leaf_bytes, 0, &fill);
    for (size_t i = 0; i < c.leaf_carries.size(); ++i) {
      AddRegion(p.leaf_carries[i], leaf_bytes, 0, &fill);
    }
    // Kernels clear the states of other tiles. Where rows gather, all are filled sooner than the
    // number is there.
    fill.used_parts = p.group_tiles + p.groups;
  }
  const int64_t tile_bytes = c.form.width * c.states_of_row * c.hidden * c.state_bytes;
  AddRegion(p.states, c.form.tiles * tile_bytes, kUnwritten, &fill, c.emits ? tile_bytes : 0);
  return fill;
}
static_assert(kMaxGraphArrays + 4 <= kMostFilledRegions);

struct DynamicScanOperation {
  using Call = DynamicScanCall;
  static constexpr char kName[] = "dynamic_scan";

  static void Parse(CallParser& call, Call* c) {
    c->emits = call.Attribute<bool>("emits");
    c->form = ParseScriptForm(call);
    c->window = call.Integer("window", 0, kMostIndex);
    c->form.kinds = call.Integer("kinds", 1, kMostIndex);
    ParseArrays(call, c);
    c->batch = call.batch();
    ScanLaunches launches;
    c->launch = ParseLaunch(call, &launches);
    c->teams = launches.scans;
    CheckTeams(call, c->teams, c->launch.shape.blocks);
    c->workspace = call.ResultWorkspace(c->Workspace().Bytes()).data;
  }

  static std::vector<KernelSource> MoreKernels(const Call&) { return {FillSource()}; }

  static std::string Launch(const Call& c, int64_t entry, const CudaLaunch& launch) {
    GraphScanProblem p = ProblemOf(c, entry);
    return LaunchFilled(Cleared(c, p), launch, &p);
  }
};

}  // namespace

OperationEntry DynamicScanEntry() {
  // Kernels of scans are printed for each plan; tests/test_dynamic_device.py compiles some of every
  // kind.
  OperationEntry entry = ScanEntry<DynamicScanOperation>();
  entry.kernels.push_back(FillSource());
  for (const TeamVariant& variant : kTeamVariants) entry.cuda_variants.push_back(variant.name);
  return entry;
}

}  // namespace jaxsparse
