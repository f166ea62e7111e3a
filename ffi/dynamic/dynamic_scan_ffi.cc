// FFI target of scans over graphs. What to launch was planned when the program was lowered
// (dynamic/team_plan.h): the attributes carry the kernel's source and its launch, the last result
// is its workspace. There is no CPU kernel: elsewhere the scan is a loop of XLA.
#include <cuda_runtime_api.h>

#include <string>
#include <string_view>
#include <vector>

#include "dynamic/problem.h"
#include "dynamic/script.h"
#include "dynamic/team_plan.h"
#include "recurrent/scan_targets.h"
#include "recurrent/variants.h"

namespace jaxsparse {
namespace {

struct DynamicScanCall {
  Batch batch;
  ScanLaunches launches;  // teams are the scans of a launch
  KernelLaunch launch;
  char* workspace = nullptr;
  ScriptForm form;
  int64_t hidden = 0;

  int64_t state_bytes = 0;  // of an element
  int64_t weight_row_stride = 0, weight_column_stride = 0;
  Array weights, script, leaf_states, states;
  std::vector<Array> leaf_carries, carries;  // float32
  ScanArrays arrays;                         // inputs and outputs
};

// The arrays of a scan that reads from sources: states of leaves and their carries are given.
void ParseArrays(CallParser& call, DynamicScanCall* c) {
  const int64_t products = call.Integer("products", 1, kMaxScanArrays);
  const int64_t carries = call.Integer("carries", 0, kMaxGraphArrays);
  const std::vector<Span> inputs = Spans(call, "inputs", "rh", kMaxGraphArrays),
                          outputs = Spans(call, "outputs", "", kMaxGraphArrays);
  const auto input_dtypes = DTypeNames(call, "input_dtypes", inputs.size());
  const auto output_dtypes = DTypeNames(call, "output_dtypes", outputs.size());
  const int64_t rows = c->form.tiles * c->form.width, leaves = c->form.leaves;
  Dimension h("units"), words("words");
  ElementType dtype = ElementType::OneOf(kScanDTypes), float32 = {ffi::F32}, int32 = {ffi::S32};
  c->states = call.Result("states", dtype, {rows, 1, h});
  for (int64_t i = 0; i < carries; ++i) {
    c->carries.push_back(call.Result("carry", float32, {rows, h}));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    ElementType type = TypeNamed(call, output_dtypes[i], dtype);
    const Array array = call.Result("output", type, {rows, outputs[i].parts, h});
    c->arrays.outputs.push_back({array, SizeOf(DTypeOf(type))});
  }
  if (!call.ok()) return;
  if (h.size < 1 || products * h.size > kMaxMatrixRows ||
      c->form.slots * h.size > kMaxMatrixRows) {
    call.Fail("products and slots of all units must be 1 to " + std::to_string(kMaxMatrixRows) +
              ", got " + std::to_string(products) + " and " + std::to_string(c->form.slots) +
              " times " + std::to_string(h.size));
    return;
  }
  c->hidden = h.size;
  c->state_bytes = SizeOf(DTypeOf(dtype));
  c->weights = call.Operand("weights", dtype, {1, c->form.slots * h.size, products * h.size});
  c->weight_row_stride = 1;
  c->weight_column_stride = products * h.size;
  c->script = call.Operand("script", int32, {words});
  if (call.ok() && words.size < c->form.RootsAt()) {
    call.Fail("a script of its sizes has " + std::to_string(c->form.RootsAt()) +
              " words or more, got " + std::to_string(words.size));
  }
  c->leaf_states = call.Operand("state", dtype, {leaves, 1, h});
  for (int64_t i = 0; i < carries; ++i) {
    c->leaf_carries.push_back(call.Operand("carry", float32, {leaves, h}));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Span& span = inputs[i];
    const int64_t units = span.has('h') ? h.size : 1;
    ElementType type = TypeNamed(call, input_dtypes[i], dtype);
    const Array array =
        call.Operand("input", type, {span.has('r') ? rows : 1, span.parts, units});
    ScanInput form;
    form.part_stride = units;
    form.unit_stride = span.has('h') ? 1 : 0;
    form.row_stride = span.has('r') ? span.parts * units : 0;
    c->arrays.inputs.push_back({array, SizeOf(DTypeOf(type)), form});
  }
}

struct DynamicScanOperation {
  using Call = DynamicScanCall;
  static constexpr char kName[] = "dynamic_scan";

  static void Parse(CallParser& call, Call* c) {
    constexpr int64_t kMostTiles = kMostIndex / kTileRows;
    c->form.leaves = call.Integer("leaves", 0, kMostIndex);
    c->form.tiles = call.Integer("tiles", 1, kMostTiles);
    c->form.width = kTileRows;
    c->form.slots = call.Integer("slots", 1, kMaxScanArrays);
    c->form.groups = call.Integer("script_groups", 1, kMostIndex);
    ParseArrays(call, c);
    c->batch = call.batch();
    c->launch = ParseLaunch(call, &c->launches);
    c->launches.directions = c->launches.scans;
    c->workspace = call.ResultWorkspace(c->launches.WorkspaceBytes()).data;
  }

  static std::vector<KernelSource> MoreKernels(const Call&) { return {}; }

  static std::string Launch(const Call& c, int64_t entry, const CudaLaunch& launch) {
    GraphScanProblem p = ProblemOf(c, entry);
    const ScopedDevice scoped(launch.device);
    auto* stream = static_cast<cudaStream_t>(launch.stream);
    // What an earlier scan has left there would be taken for this one's.
    const int64_t states = c.form.tiles * c.form.width * c.hidden * c.state_bytes;
    cudaError_t status =
        cudaMemsetAsync(p.states, 0xff, static_cast<size_t>(states), stream);
    if (status == cudaSuccess) {
      status = cudaMemsetAsync(c.workspace, 0xff,
                               static_cast<size_t>(c.launches.ClearedBytes()), stream);
    }
    if (status != cudaSuccess) {
      return std::string("clearing states: ") + cudaGetErrorString(status);
    }
    return LaunchKernel(launch.kernel, launch.shape, &p, launch.device, launch.stream);
  }

 private:
  static GraphScanProblem ProblemOf(const Call& c, int64_t entry) {
    const auto at = [&](const Array& array, int64_t bytes) {
      return EntryOf(c.batch, entry, array, bytes);
    };
    const auto floats = [&](const Array& array) {
      return reinterpret_cast<float*>(at(array, sizeof(float)));
    };
    GraphScanProblem p;
    const auto* script = reinterpret_cast<const int32_t*>(at(c.script, sizeof(int32_t)));
    p.group_tiles = script + c.form.GroupTilesAt();
    p.records = script + c.form.RecordsAt();
    p.leaves = static_cast<int32_t>(c.form.leaves);
    p.tiles = static_cast<int32_t>(c.form.tiles);
    p.groups = static_cast<int32_t>(c.form.groups);
    p.weights = {at(c.weights, c.state_bytes), c.weight_row_stride, c.weight_column_stride};
    p.leaf_states = at(c.leaf_states, c.state_bytes);
    p.states = at(c.states, c.state_bytes);
    for (size_t i = 0; i < c.carries.size(); ++i) {
      p.leaf_carries[i] = floats(c.leaf_carries[i]);
      p.carries[i] = floats(c.carries[i]);
    }
    for (size_t i = 0; i < c.arrays.inputs.size(); ++i) {
      const ScanArrays::Input& input = c.arrays.inputs[i];
      p.inputs[i] = {at(input.array, input.bytes), input.form.row_stride, input.form.part_stride,
                     input.form.unit_stride};
    }
    for (size_t i = 0; i < c.arrays.outputs.size(); ++i) {
      p.outputs[i] = at(c.arrays.outputs[i].array, c.arrays.outputs[i].bytes);
    }
    p.poll_delays = c.launch.poll_delays;
    p.wait_limits = c.launch.wait_limits;
    p.wait_limits.error = reinterpret_cast<uint32_t*>(c.workspace + c.launches.ErrorAt());
    p.arrivals = reinterpret_cast<uint32_t*>(c.workspace + c.launches.ArrivalsAt(0));
    return p;
  }
};

}  // namespace

OperationEntry DynamicScanEntry() {
  // Kernels are printed for each plan; tests/test_dynamic_device.py compiles some of every kind.
  OperationEntry entry = ScanEntry<DynamicScanOperation>();
  for (const TeamVariant& variant : kTeamVariants) entry.cuda_variants.push_back(variant.name);
  return entry;
}

}  // namespace jaxsparse
