// FFI target of losses over graphs and their gradients. As that of scans (dynamic_scan_ffi.cc) it
// is told what to launch; the last result is its workspace.
#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "dynamic/graph_call.h"
#include "dynamic/loss_problem.h"
#include "dynamic/script.h"
#include "dynamic/team_plan.h"
#include "dynamic/workspace.h"
#include "persistent/fill.h"
#include "recurrent/scan_targets.h"
#include "recurrent/variants.h"

namespace jaxsparse {
namespace {

// What the first pass saves for the second: (computed rows, parts, h), workspace.
struct SavedArray {
  int64_t parts = 0, bytes = 0;  // of an element
};

struct DynamicLossCall {
  Batch batch;
  KernelLaunch launch;
  int64_t teams = 1;
  char* workspace = nullptr;
  ScriptForm form;
  int64_t window = 0;            // tiles whose sums lie in shared memory
  int64_t labels_offset = -1;    // in the script; below 0 they are an operand
  uint32_t emit_poll_delay = 0;  // clock cycles, of the second pass
  int64_t products = 1, hidden = 0, classes = 0;

  int64_t state_bytes = 0, head_bias_bytes = 0;  // of an element
  Array weights, script, labels, head_weights, head_bias, leaf_states;
  std::vector<Array> leaf_carries;
  std::vector<ScanArrays::Input> inputs;
  std::vector<SavedArray> saved;
  std::vector<size_t> read;  // inputs that the second pass reads, too
  Array of_bias, totals, of_logits, of_leaves, states, of_products, of_leaf_states;
  std::vector<Array> of_leaf_carries;
  std::vector<ScanArrays::Output> outputs;  // of the second pass

  int64_t Carries() const { return static_cast<int64_t>(leaf_carries.size()); }
  int64_t Rows() const { return form.tiles * form.width; }
  bool HasSums() const { return form.tiles > window; }
  int64_t SavedBytes(const SavedArray& array) const {
    return Rows() * array.parts * hidden * array.bytes;
  }
  LossWorkspace Workspace() const {
    int64_t bytes = 0;
    for (const SavedArray& array : saved) bytes += SavedBytes(array);
    const int64_t parts =
        LossWorkspace::PartsOf(launch.shape.blocks, launch.shape.threads, classes);
    return {teams, HasSums() ? 1 + Carries() : 0, Carries(), Rows() * hidden, bytes, parts};
  }
};

void ParseResults(CallParser& call, int64_t carries, ElementType& dtype, Dimension& h,
                  DynamicLossCall* c) {
  const std::vector<Span> outputs = Spans(call, "outputs", "", kMaxGraphArrays);
  const auto dtypes = DTypeNames(call, "output_dtypes", outputs.size());
  const int64_t rows = c->Rows(), leaves = c->form.leaves;
  Dimension classes("classes");
  ElementType float32 = {ffi::F32};
  c->of_bias = call.Result("bias", float32, {classes});
  c->totals = call.Result("totals", float32, {kLossTotals});
  c->of_logits = call.Result("logits", float32, {leaves + rows, classes});
  c->of_leaves = call.Result("leaves", float32, {leaves, 1, h});
  c->states = call.Result("states", dtype, {rows, 1, h});
  c->of_products = call.Result("products", dtype, {rows, c->products, h});
  c->of_leaf_states = call.Result("reached", float32, {leaves, 1, h});
  for (int64_t i = 0; i < carries; ++i) {
    c->of_leaf_carries.push_back(call.Result("carry", float32, {leaves, h}));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    ElementType type = TypeNamed(call, dtypes[i], dtype);
    const Array array = call.Result("output", type, {rows, outputs[i].parts, h});
    c->outputs.push_back({array, SizeOf(DTypeOf(type))});
  }
  CheckUnits(call, c->products, c->form.slots, h);
  if (call.ok() && (classes.size < 1 || classes.size > kMostClasses)) {
    call.Fail("classes must be 1 to " + std::to_string(kMostClasses) + ", got " +
              std::to_string(classes.size));
  }
  c->hidden = h.size;
  c->classes = classes.size;
}

void ParseOperands(CallParser& call, int64_t carries, ElementType& dtype, Dimension& h,
                   DynamicLossCall* c) {
  // "b": both passes read it.
  const std::vector<Span> inputs = Spans(call, "inputs", "rhb", kMaxGraphArrays);
  const auto dtypes = DTypeNames(call, "input_dtypes", inputs.size());
  const int64_t leaves = c->form.leaves;
  if (!call.ok()) return;
  c->state_bytes = SizeOf(DTypeOf(dtype));
  c->weights = call.Operand("weights", dtype, {1, c->form.slots * h.size, c->products * h.size});
  const int64_t rows = leaves + c->Rows();
  c->labels_offset = call.Integer("labels_offset", -1, kMostIndex);
  c->script = ParseScript(call, std::max(c->form.RootsAt(), c->labels_offset + rows));
  if (c->labels_offset < 0) c->labels = call.Operand("labels", {ffi::S32}, {rows});
  c->head_weights = call.Operand("head weights", dtype, {h, c->classes});
  ElementType bias = TypeNamed(call, DTypeNames(call, "head_bias_dtype", 1)[0], dtype);
  c->head_bias = call.Operand("head bias", bias, {c->classes});
  c->head_bias_bytes = SizeOf(DTypeOf(bias));
  c->leaf_states = call.Operand("state", dtype, {leaves, 1, h});
  for (int64_t i = 0; i < carries; ++i) {
    c->leaf_carries.push_back(call.Operand("carry", {ffi::F32}, {leaves, h}));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    c->inputs.push_back(ParseInput(call, inputs[i], dtypes[i], c->Rows(), h, dtype));
    if (inputs[i].has('b')) c->read.push_back(i);
  }
}

// What the second pass reads, which has to be no more than it can be told of.
void ParseSaved(CallParser& call, const ElementType& dtype, DynamicLossCall* c) {
  const std::vector<Span> saved = Spans(call, "saved", "", kMaxGraphArrays);
  const auto dtypes = DTypeNames(call, "saved_dtypes", saved.size());
  for (size_t i = 0; i < saved.size(); ++i) {
    c->saved.push_back({saved[i].parts, SizeOf(DTypeOf(TypeNamed(call, dtypes[i], dtype)))});
  }
  if (c->saved.size() + c->read.size() + 1 > kMaxGraphArrays) {
    call.Fail("a gradient can't read more than " + std::to_string(kMaxGraphArrays) + " arrays");
  }
}

// Where a batch entry has the arrays of the first pass.
GraphScanProblem GatherOf(const DynamicLossCall& c, int64_t entry) {
  const auto at = [&](const Array& array, int64_t bytes) {
    return EntryOf(c.batch, entry, array, bytes);
  };
  const LossWorkspace workspace = c.Workspace();
  GraphScanProblem p = LaunchedOn(reinterpret_cast<const int32_t*>(at(c.script, sizeof(int32_t))),
                                  c.form, c.launch, c.workspace, workspace.launches);
  p.weights = {at(c.weights, c.state_bytes), 1, c.products * c.hidden};
  p.leaf_states = at(c.leaf_states, c.state_bytes);
  p.states = at(c.states, c.state_bytes);
  for (int64_t i = 0; i < c.Carries(); ++i) {
    p.leaf_carries[i] = reinterpret_cast<float*>(at(c.leaf_carries[i], sizeof(float)));
    p.carries[i] = reinterpret_cast<float*>(c.workspace + workspace.CarriesAt(i));
  }
  for (size_t i = 0; i < c.inputs.size(); ++i) p.inputs[i] = InputOf(c.batch, entry, c.inputs[i]);
  char* saved = c.workspace + workspace.SavedAt();
  for (size_t i = 0; i < c.saved.size(); ++i) {
    p.outputs[i] = saved;
    saved += c.SavedBytes(c.saved[i]);
  }
  return p;
}

// And those of the second pass.
GraphScanProblem EmitOf(const DynamicLossCall& c, int64_t entry, const GraphScanProblem& gather) {
  const auto floats = [&](const Array& array) {
    return reinterpret_cast<float*>(EntryOf(c.batch, entry, array, sizeof(float)));
  };
  const LossWorkspace workspace = c.Workspace();
  const auto workspace_at = [&](int64_t at) { return reinterpret_cast<float*>(c.workspace + at); };
  GraphScanProblem p = gather;
  p.leaf_states = nullptr;
  p.poll_delays = {c.emit_poll_delay, 0, 0};
  p.weights.row_stride = c.products * c.hidden;
  p.weights.column_stride = 1;
  p.states = EntryOf(c.batch, entry, c.of_products, c.state_bytes);
  if (c.HasSums()) p.sums = workspace_at(workspace.SumsAt(0));
  p.leaf_sums = floats(c.of_leaf_states);
  for (int64_t i = 0; i < c.Carries(); ++i) {
    p.carries[i] = c.HasSums() ? workspace_at(workspace.SumsAt(1 + i)) : nullptr;
    p.leaf_carries[i] = floats(c.of_leaf_carries[i]);
  }
  size_t input = 0;
  for (; input < c.saved.size(); ++input) p.inputs[input] = gather.outputs[input];
  for (const size_t read : c.read) p.inputs[input++] = gather.inputs[read];
  p.inputs[input] = workspace_at(workspace.OfStatesAt());
  for (size_t i = 0; i < c.outputs.size(); ++i) {
    p.outputs[i] = EntryOf(c.batch, entry, c.outputs[i].array, c.outputs[i].bytes);
  }
  p.arrivals = reinterpret_cast<uint32_t*>(c.workspace + workspace.launches.ArrivalsAt(c.teams));
  return p;
}

GraphLossProblem ProblemOf(const DynamicLossCall& c, int64_t entry) {
  const auto at = [&](const Array& array, int64_t bytes) {
    return EntryOf(c.batch, entry, array, bytes);
  };
  GraphLossProblem p;
  p.gather = GatherOf(c, entry);
  p.emit = EmitOf(c, entry, p.gather);
  p.head_weights = at(c.head_weights, c.state_bytes);
  p.head_bias = at(c.head_bias, c.head_bias_bytes);
  const Array& labels = c.labels_offset < 0 ? c.labels : c.script;
  p.labels = reinterpret_cast<const int32_t*>(at(labels, sizeof(int32_t))) +
             std::max<int64_t>(c.labels_offset, 0);
  p.of_bias = reinterpret_cast<float*>(at(c.of_bias, sizeof(float)));
  p.totals = reinterpret_cast<float*>(at(c.totals, sizeof(float)));
  p.parts = reinterpret_cast<uint32_t*>(c.workspace + c.Workspace().PartsAt());
  p.of_logits = reinterpret_cast<float*>(at(c.of_logits, sizeof(float)));
  p.of_leaves = reinterpret_cast<float*>(at(c.of_leaves, sizeof(float)));
  p.of_states = reinterpret_cast<float*>(c.workspace + c.Workspace().OfStatesAt());
  return p;
}

// What the kernel finds before it begins: what its blocks tell each other looks unwritten, and sums
// are of nothing.
FillProblem Cleared(const DynamicLossCall& c, const GraphLossProblem& p) {
  constexpr uint32_t kUnwritten = 0xffffffff;
  const LossWorkspace workspace = c.Workspace();
  const int64_t row_bytes = c.hidden * c.state_bytes, float_bytes = sizeof(float);
  const int64_t leaf_bytes = c.form.leaves * c.hidden * float_bytes;
  FillProblem fill;
  AddRegion(p.gather.states, c.Rows() * row_bytes, kUnwritten, &fill);
  AddRegion(p.parts, workspace.PartsBytes(), kUnwritten, &fill);
  AddRegion(p.of_logits + c.form.leaves * c.classes, c.Rows() * c.classes * float_bytes, kUnwritten,
            &fill);
  AddRegion(c.workspace, workspace.launches.ClearedBytes(), kUnwritten, &fill);
  AddRegion(p.emit.leaf_sums, leaf_bytes, 0, &fill);
  for (int64_t i = 0; i < c.Carries(); ++i) {
    AddRegion(p.emit.leaf_carries[i], leaf_bytes, 0, &fill);
  }
  // Kernels clear those of other tiles.
  const int64_t tile_bytes = c.form.width * c.products * row_bytes;
  fill.used_parts = p.emit.group_tiles + p.emit.groups;
  AddRegion(p.emit.states, c.form.tiles * tile_bytes, kUnwritten, &fill, tile_bytes);
  return fill;
}
static_assert(kMaxGraphArrays + 7 <= kMostFilledRegions);

struct DynamicLossOperation {
  using Call = DynamicLossCall;
  static constexpr char kName[] = "dynamic_loss";

  static void Parse(CallParser& call, Call* c) {
    c->form = ParseScriptForm(call);
    c->window = call.Integer("window", 0, kMostIndex);
    c->emit_poll_delay = static_cast<uint32_t>(call.Integer("emit_poll_delay", 0, kMostIndex));
    c->products = call.Integer("products", 1, kMaxGraphArrays);
    const int64_t carries = call.Integer("carries", 0, kMaxGraphArrays);
    ElementType dtype = ElementType::OneOf(kScanDTypes);
    Dimension h("units");
    ParseResults(call, carries, dtype, h, c);
    ParseOperands(call, carries, dtype, h, c);
    if (call.ok()) ParseSaved(call, dtype, c);
    c->batch = call.batch();
    ScanLaunches launches;
    c->launch = ParseLaunch(call, &launches);
    c->teams = launches.scans;
    CheckTeams(call, c->teams, c->launch.shape.blocks);
    c->workspace = call.ResultWorkspace(call.ok() ? c->Workspace().Bytes() : 0).data;
  }

  static std::vector<KernelSource> MoreKernels(const Call&) { return {FillSource()}; }

  static std::string Launch(const Call& c, int64_t entry, const CudaLaunch& launch) {
    GraphLossProblem p = ProblemOf(c, entry);
    return LaunchFilled(Cleared(c, p), launch, &p);
  }
};

}  // namespace

OperationEntry DynamicLossEntry() {
  // Kernels are printed for each plan, as those of scans are.
  OperationEntry entry = ScanEntry<DynamicLossOperation>();
  for (const TeamVariant& variant : kTeamVariants) entry.cuda_variants.push_back(variant.name);
  return entry;
}

}  // namespace jaxsparse
