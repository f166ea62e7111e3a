// FFI target of the persistent recurrent scan. What to launch was planned when the program was
// lowered (recurrent/plan.h): the attributes carry the kernel's source and its launch,
// the last result is its workspace: exchange buffers of a launch's scans, flags, dense forms of
// sparse matrices that are kept on chip as such. There is no CPU kernel: elsewhere the scan is a
// loop of XLA.
#include <cuda_runtime_api.h>

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "host/registry.h"
#include "persistent/densify.h"
#include "persistent/failures.h"
#include "recurrent/launches.h"
#include "recurrent/problem.h"
#include "recurrent/variants.h"

namespace jaxsparse {
namespace {

constexpr char kName[] = "recurrent_scan";

// Weights of their own in one call: more than any layer has heads.
constexpr size_t kMostDirections = 4096;

// One call: everything but the place of a batch entry in the arrays.
struct Call {
  Batch batch;
  int64_t steps = 0, rows = 0, hidden = 0, state_parts = 0;
  Array weights, layout, row_offsets, column_indices, state, states;
  int64_t nse = 0, weights_size = 0, layout_size = 0;  // elements of a direction
  int64_t matrix_rows = 0, matrix_columns = 0;
  bool densified = false;
  IndexType index_type = IndexType::kInt32;
  int64_t weight_row_stride = 0, weight_column_stride = 0;
  DType weight_dtype = DType::kFloat32, state_dtype = DType::kFloat32;
  struct Input {
    Array array;
    int64_t bytes = 0;  // of an element
    ScanInput form;
  };
  struct Output {
    Array array;
    int64_t parts = 0;
  };
  std::vector<Array> carries, last_carries;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::vector<bool> reversed;
  char* workspace = nullptr;
  ScanLaunches launches;

  KernelSource kernel;
  LaunchShape shape;
  PollDelays poll_delays;
  WaitLimits wait_limits;
};

std::vector<std::string_view> Words(std::string_view text) {
  std::vector<std::string_view> words;
  while (!text.empty()) {
    const size_t end = text.find(' ');
    if (end != 0) words.push_back(text.substr(0, end));
    text = end == std::string_view::npos ? "" : text.substr(end + 1);
  }
  return words;
}

// Of an input or output: how many parts it has, and along which of the dimensions t, b and h it
// does not repeat, such as "4tbh".
struct Span {
  int64_t parts = 0;
  std::string_view dimensions;
  bool has(char dimension) const { return dimensions.find(dimension) != std::string_view::npos; }
};

std::vector<Span> Spans(CallParser& call, const char* name, std::string_view allowed) {
  constexpr int64_t kMostParts = 1024;
  std::vector<Span> spans;
  for (const std::string_view word : Words(call.Attribute<std::string_view>(name))) {
    Span span;
    size_t digits = 0;
    for (; digits < word.size() && word[digits] >= '0' && word[digits] <= '9'; ++digits) {
      if (span.parts <= kMostParts) span.parts = span.parts * 10 + (word[digits] - '0');
    }
    span.dimensions = word.substr(digits);
    if (span.parts < 1 || span.parts > kMostParts ||
        span.dimensions.find_first_not_of(allowed) != std::string_view::npos) {
      call.Fail(std::string("attribute ") + name + " must have words such as '4" +
                std::string(allowed) + "', got '" + std::string(word) + "'");
    }
    spans.push_back(span);
  }
  if (spans.size() > kMaxScanArrays) {
    call.Fail(std::string("attribute ") + name + " must have at most " +
              std::to_string(kMaxScanArrays) + " words, got " + std::to_string(spans.size()));
  }
  return spans;
}

// The weights of `products` times h rows and `s` times h columns.
void ParseWeights(CallParser& call, int64_t products, Dimension& d, Dimension& s, Dimension& h,
                  Call* c) {
  constexpr int64_t kMostRows = 1 << 24;
  const ScanWeights weights = call.Choice("weights", kScanWeights);
  const bool transposed = call.Attribute<bool>("transposed");
  const int64_t layout_words = call.Integer("layout_words", 0, kMostIndex);
  const int64_t products_h = products * h.size, states_h = s.size * h.size;
  if (products_h > kMostRows || states_h > kMostRows) {
    call.Fail("products and states of all units must be at most " + std::to_string(kMostRows) +
              ", got " + std::to_string(products_h) + " and " + std::to_string(states_h));
    return;
  }
  c->weight_dtype = call.Choice("weight_dtype", kScanDTypes);  // the kernel is written for it
  ElementType dtype = {DataTypeOf(c->weight_dtype)};
  const int64_t rows = transposed ? states_h : products_h;  // of the matrix as it is stored
  const int64_t columns = transposed ? products_h : states_h;
  Dimension nse("nse");
  switch (weights) {
    case ScanWeights::kPairs:
      c->weights = call.Operand("recurrent", dtype, {d, nse});
      c->layout = call.Operand("layout", {ffi::U32}, {d, layout_words});
      c->weights_size = c->nse = nse.size;
      c->layout_size = layout_words;
      break;
    case ScanWeights::kMasked: {
      ElementType index(kIndices);
      c->densified = true;
      c->matrix_rows = rows;
      c->matrix_columns = columns;
      c->weight_row_stride = transposed ? 1 : columns;
      c->weight_column_stride = transposed ? columns : 1;
      c->weights = call.Operand("recurrent", dtype, {d, nse});
      c->row_offsets = call.Operand("row_offsets", {ffi::S32}, {d, rows + 1});
      c->column_indices = call.Operand("column_indices", index, {d, nse});
      c->index_type = IndexTypeOf(index);
      c->nse = nse.size;
      c->weights_size = rows * columns;
      break;
    }
    case ScanWeights::kDense:  // (columns, rows)
      c->weights_size = rows * columns;
      c->weight_row_stride = transposed ? rows : 1;
      c->weight_column_stride = transposed ? 1 : rows;
      c->weights = call.Operand("recurrent", dtype, {d, columns, rows});
      break;
  }
  if (c->densified) c->launches.dense_bytes = rows * columns * SizeOf(c->weight_dtype);
}

void ParseLaunch(CallParser& call, Call* c) {
  constexpr int64_t kMostBlocks = 1 << 16, kMostThreads = 1024, kMostShared = 1 << 20;
  constexpr int64_t kMostCluster = 16, kMostClocks = (int64_t{1} << 32) - 1;
  c->kernel = {std::string(call.Attribute<std::string_view>("name")),
               std::string(call.Attribute<std::string_view>("expression")),
               std::string(call.Attribute<std::string_view>("source"))};
  c->shape = {call.Integer("blocks", 1, kMostBlocks),
              static_cast<int>(call.Integer("threads", 1, kMostThreads)),
              call.Integer("shared_bytes", 0, kMostShared),
              static_cast<int>(call.Integer("cluster", 1, kMostCluster)), true};
  const auto clocks = [&](const char* name) {
    return static_cast<uint32_t>(call.Integer(name, 0, kMostClocks));
  };
  c->poll_delays = {clocks("poll_delay"), clocks("poll_delay_increase"),
                    clocks("poll_delay_decrease")};
  c->wait_limits.limit_ns = call.Integer("wait_limit_ns", 1, std::numeric_limits<int64_t>::max());
  ScanLaunches& launches = c->launches;
  launches.exchange_bytes = call.Integer("exchange_bytes", 0, kMostBytes);
  launches.groups = call.Integer("groups", 1, kMostIndex);
  launches.scans = call.Integer("scans", 1, kMaxScansOfLaunch);
  if (c->rows % launches.groups != 0 || launches.scans > launches.All() ||
      c->shape.blocks % (launches.scans * c->shape.cluster) != 0) {
    call.Fail("attributes groups, scans, blocks and cluster must suit a batch of " +
              std::to_string(c->rows) + " and " + std::to_string(launches.directions) +
              " directions, got " + std::to_string(launches.groups) + ", " +
              std::to_string(launches.scans) + ", " + std::to_string(c->shape.blocks) + " and " +
              std::to_string(c->shape.cluster));
  }
}

ffi::Error Parse(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes, Call* c) {
  CallParser call(kName, operands, results, attributes);
  const int64_t products = call.Integer("products", 1, kMaxScanArrays);
  const int64_t carries = call.Integer("carries", 0, kMaxScanArrays);
  const std::vector<Span> inputs = Spans(call, "inputs", "tbh"),
                          outputs = Spans(call, "outputs", "");
  const auto input_dtypes = Words(call.Attribute<std::string_view>("input_dtypes"));
  const auto reversed = call.Attribute<std::string_view>("reversed");  // such as "01"
  if (reversed.size() > kMostDirections || reversed.find_first_not_of("01") != reversed.npos) {
    call.Fail("attribute reversed must have a 0 or 1 for each of at most " +
              std::to_string(kMostDirections) + " directions, got '" + std::string(reversed) + "'");
  }
  if (input_dtypes.size() != inputs.size()) {
    call.Fail("attribute input_dtypes must have " + std::to_string(inputs.size()) +
              " words, as inputs has, got " + std::to_string(input_dtypes.size()));
  }

  Dimension d("directions"), t("steps"), b("batch"), s("states"), h("units");
  d.size = static_cast<int64_t>(reversed.size());
  d.said_by = "attribute reversed";
  ElementType dtype = ElementType::OneOf(kScanDTypes);
  ElementType float32 = {ffi::F32};
  c->states = call.Result("states", dtype, {d, t, b, s, h});
  for (int64_t i = 0; i < carries; ++i) {
    c->last_carries.push_back(call.Result("last carry", float32, {d, b, h}));
  }
  for (const Span& span : outputs) {
    c->outputs.push_back({call.Result("output", dtype, {d, t, b, span.parts, h}), span.parts});
  }
  if (!call.ok()) return call.error();
  c->batch = call.batch();
  c->launches.directions = d.size, c->steps = t.size, c->rows = b.size;
  c->state_parts = s.size, c->hidden = h.size;
  c->state_dtype = DTypeOf(dtype);
  for (const char direction : reversed) c->reversed.push_back(direction == '1');

  ParseWeights(call, products, d, s, h, c);
  c->state = call.Operand("state", dtype, {d, b, s, h});
  for (int64_t i = 0; i < carries; ++i) {
    c->carries.push_back(call.Operand("carry", float32, {d, b, h}));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Span& span = inputs[i];
    const int64_t time = span.has('t') ? t.size : 1, rows = span.has('b') ? b.size : 1;
    const int64_t units = span.has('h') ? h.size : 1;
    ElementType type = {DataTypeOf(input_dtypes[i])};
    if (!dtype.Allows(DataTypeOf(input_dtypes[i])) && !type.is(ffi::F32)) {
      call.Fail("attribute input_dtypes must name the dtype of states or float32, got '" +
                std::string(input_dtypes[i]) + "'");
    }
    Call::Input input;
    input.array = call.Operand("input", type, {d, time, rows, span.parts, units});
    input.bytes = SizeOf(DTypeOf(type));
    input.form.part_stride = units;
    input.form.unit_stride = span.has('h') ? 1 : 0;
    input.form.row_stride = span.has('b') ? span.parts * units : 0;
    input.form.direction_stride = time * rows * span.parts * units;
    input.form.step_stride = span.has('t') ? rows * span.parts * units : 0;
    c->inputs.push_back(input);
  }
  ParseLaunch(call, c);
  c->workspace = call.ResultWorkspace(c->launches.WorkspaceBytes()).data;
  call.Finish();
  return call.ok() ? ffi::Error::Success() : call.error();
}

// Where a batch entry of a call lies in an array with elements of so many bytes.
char* EntryOf(const Call& c, int64_t entry, const Array& array, int64_t bytes) {
  auto* data = static_cast<char*>(array.data);
  return data + (array.At<char>(c.batch, entry) - data) * bytes;
}

// The problem of one launch for one batch entry of the call.
RecurrentScanProblem ProblemOf(const Call& c, int64_t entry, int64_t launch) {
  const auto at = [&](const Array& array, int64_t bytes) {
    return EntryOf(c, entry, array, bytes);
  };
  const int64_t state = SizeOf(c.state_dtype);
  const int64_t first_scan = launch * c.launches.scans;
  RecurrentScanProblem p;
  p.steps = c.steps;
  p.batch = c.rows;
  p.hidden = c.hidden;
  p.first_scan = static_cast<uint32_t>(first_scan);
  for (int64_t scan = 0; scan < c.launches.ScansOf(launch); ++scan) {
    const int64_t direction = (first_scan + scan) / c.launches.groups;
    const uint32_t bit = c.reversed[static_cast<size_t>(direction)] ? 1 : 0;
    p.reversed_scans[scan / 32] |= bit << scan % 32;
  }
  p.reverse = (p.reversed_scans[0] & 1) != 0;
  p.weights =
      c.densified ? c.workspace + c.launches.DenseAt(0) : at(c.weights, SizeOf(c.weight_dtype));
  p.weights_size = c.weights_size;
  p.weight_row_stride = c.weight_row_stride;
  p.weight_column_stride = c.weight_column_stride;
  if (c.layout.data != nullptr) {
    p.layout = reinterpret_cast<const uint32_t*>(at(c.layout, sizeof(uint32_t)));
  }
  p.initial_state = at(c.state, state);
  p.states = at(c.states, state);
  for (size_t i = 0; i < c.carries.size(); ++i) {
    p.initial_carry[i] = reinterpret_cast<const float*>(at(c.carries[i], sizeof(float)));
    p.final_carry[i] = reinterpret_cast<float*>(at(c.last_carries[i], sizeof(float)));
  }
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    p.inputs[i] = c.inputs[i].form;
    p.inputs[i].data = at(c.inputs[i].array, c.inputs[i].bytes);
  }
  for (size_t i = 0; i < c.outputs.size(); ++i) p.outputs[i] = at(c.outputs[i].array, state);
  p.exchange = c.workspace + c.launches.ExchangeAt(0);
  p.exchange_bytes = c.launches.exchange_bytes;
  p.arrivals = reinterpret_cast<uint32_t*>(c.workspace + c.launches.ArrivalsAt(0));
  p.poll_delays = c.poll_delays;
  p.wait_limits = c.wait_limits;
  p.wait_limits.error = reinterpret_cast<uint32_t*>(c.workspace + c.launches.ErrorAt());
  return p;
}

// A kernel that found an earlier scan's states in the exchange buffer would take them for its own.
std::string Clear(const Call& call, int device, cudaStream_t stream) {
  const ScopedDevice scoped(device);
  const auto bytes = static_cast<size_t>(call.launches.ClearedBytes());
  const cudaError_t status = cudaMemsetAsync(call.workspace, 0xff, bytes, stream);
  return status == cudaSuccess
             ? ""
             : std::string("clearing the workspace: ") + cudaGetErrorString(status);
}

std::string DensifyAll(const Call& c, int64_t entry, int device, cudaStream_t stream) {
  std::string reason;
  const int64_t value_bytes = SizeOf(c.weight_dtype);
  const int64_t index_bytes = c.index_type == IndexType::kInt32 ? 4 : 2;
  for (int64_t direction = 0; direction < c.launches.directions && reason.empty(); ++direction) {
    const auto at = [&](const Array& array, int64_t size, int64_t bytes) {
      return EntryOf(c, entry, array, bytes) + direction * size * bytes;
    };
    DensifyProblem p;
    p.values = at(c.weights, c.nse, value_bytes);
    p.row_offsets =
        reinterpret_cast<const int32_t*>(at(c.row_offsets, c.matrix_rows + 1, sizeof(int32_t)));
    p.column_indices = at(c.column_indices, c.nse, index_bytes);
    p.dense = c.workspace + c.launches.DenseAt(direction);
    p.rows = c.matrix_rows;
    p.columns = c.matrix_columns;
    p.nse = c.nse;
    reason = Densify(p, c.weight_dtype, c.index_type, device, stream);
  }
  return reason;
}

std::string FailedBefore(int device) {
  return "an earlier scan on GPU " + std::to_string(device) +
         " timed out: its blocks waited for one another longer than JAXSPARSE_SCAN_WAIT_LIMIT "
         "seconds; its results are NaN";
}

ffi::Error PrepareOnCuda(int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes) {
  Call call;
  if (ffi::Error error = Parse(operands, results, attributes, &call); error.failure()) return error;
  std::string reason;
  if (FailureWord(device, &reason) == nullptr ||
      GetKernel(call.kernel, device, &reason) == nullptr ||
      (call.densified &&
       GetKernel(DensifySource(call.weight_dtype, call.index_type), device, &reason) == nullptr)) {
    return ffi::Error::Internal(std::string(kName) + ": " + reason);
  }
  return ffi::Error::Success();
}

ffi::Error RunOnCuda(int32_t device, cudaStream_t stream, ffi::RemainingArgs operands,
                     ffi::RemainingRets results, ffi::Dictionary attributes) {
  Call call;
  if (ffi::Error error = Parse(operands, results, attributes, &call); error.failure()) return error;
  std::string reason;
  uint32_t* failure = FailureWord(device, &reason);
  if (TakeFailure(device)) reason = FailedBefore(device);
  const void* kernel = reason.empty() ? GetKernel(call.kernel, device, &reason) : nullptr;
  for (int64_t entry = 0; entry < call.batch.count && reason.empty(); ++entry) {
    if (call.densified) reason = DensifyAll(call, entry, device, stream);
    const ScanLaunches& launches = call.launches;
    for (int64_t i = 0; i < launches.Count() && reason.empty(); ++i) {
      RecurrentScanProblem p = ProblemOf(call, entry, i);
      // Unified addressing: the device sees it there, too.
      p.wait_limits.report = failure;
      LaunchShape shape = call.shape;
      shape.blocks = shape.blocks / launches.scans * launches.ScansOf(i);
      reason = Clear(call, device, stream);
      if (reason.empty()) reason = LaunchKernel(kernel, shape, &p, device, stream);
    }
  }
  return reason.empty() ? ffi::Error::Success()
                        : ffi::Error::Internal(std::string(kName) + ": " + reason);
}

template <typename Binding>
auto WithCall(Binding binding) {
  return std::move(binding).RemainingArgs().RemainingRets().Attrs();
}

XLA_FFI_Error* CudaInitialize(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      WithCall(ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>().Ctx<ffi::DeviceOrdinal>())
          .To(PrepareOnCuda)
          .release();
  return handler->Call(frame);
}

XLA_FFI_Error* CudaExecute(XLA_FFI_CallFrame* frame) {
  static auto* handler =
      WithCall(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<cudaStream_t>>())
          .To(RunOnCuda, {ffi::Traits::kCmdBufferCompatible})
          .release();
  return handler->Call(frame);
}

}  // namespace

OperationEntry RecurrentScanEntry() {
  // Kernels of scans are printed for each plan; tests/test_recurrent_plan.py compiles some of every
  // kind.
  OperationEntry entry{kName, nullptr, CudaInitialize, CudaExecute, {}, {}, {}};
  for (const ScanVariant& variant : kScanVariants) entry.cuda_variants.push_back(variant.name);
  for (const NamedScanDType& named : kScanDTypes) {
    for (const IndexType index_type : {IndexType::kInt32, IndexType::kUint16}) {
      entry.kernels.push_back(DensifySource(named.value, index_type));
    }
  }
  return entry;
}

}  // namespace jaxsparse
