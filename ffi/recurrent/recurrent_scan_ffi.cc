// FFI target of the persistent recurrent scan. What to launch was planned when the program was
// lowered (jaxsparse/recurrent/plan.py): the attributes carry the kernel's source and its launch,
// the last result is its workspace: exchange buffers of a launch's scans, flags, dense forms of
// sparse matrices that are kept on chip as such. There is no CPU kernel: elsewhere the scan is a
// loop of XLA.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "common/registry.h"
#include "nvrtc/type_names.h"
#include "recurrent/failures.h"
#include "recurrent/problem.h"

namespace jaxsparse {
namespace {

constexpr char kName[] = "recurrent_scan";

// One call: everything but the place of a direction and batch entry in the arrays.
struct Call {
  Batch batch;
  int64_t directions = 0, steps = 0, rows = 0, hidden = 0, state_parts = 0;
  Array weights, layout, row_offsets, column_indices, state, states;
  int64_t weights_size = 0, layout_size = 0;  // elements of a direction
  int64_t matrix_rows = 0, matrix_columns = 0;
  bool densified = false;
  IndexType index_type = IndexType::kInt32;
  int64_t weight_row_stride = 0, weight_column_stride = 0;
  DType weight_dtype = DType::kFloat32, state_dtype = DType::kFloat32;
  struct Input {
    Array array;
    int64_t size = 0;   // elements of a direction
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
  int64_t exchange_bytes = 0;  // of a scan
  int64_t groups = 1;          // parts of the batch, a scan each
  int64_t scans = 1;           // of a launch

  KernelSource kernel;
  LaunchShape shape;
  uint32_t first_look = 0, look_later = 0, look_earlier = 0;
  int64_t wait_limit_ns = 0;
};

int64_t WorkspaceBytes(const Call& c) {
  const int64_t dense = c.densified ? c.matrix_rows * c.matrix_columns * SizeOf(c.weight_dtype) : 0;
  return c.scans * c.exchange_bytes + kScanFlagBytes + c.directions * dense;
}

std::vector<std::string_view> Words(std::string_view text) {
  std::vector<std::string_view> words;
  while (!text.empty()) {
    const size_t end = text.find(' ');
    if (end != 0) words.push_back(text.substr(0, end));
    text = end == std::string_view::npos ? "" : text.substr(end + 1);
  }
  return words;
}

ffi::Error Parse(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes, Call* c) {
  // States are (directions, T, B, state parts, h) behind the batch dimensions.
  constexpr size_t kStatesRank = 5;
  CallParser call(kName, operands, results, attributes, kStatesRank);
  auto states = results.get<ffi::AnyBuffer>(0);
  if (!states.has_value() || !call.ok()) return call.ok() ? states.error() : call.error();
  const auto shape = (*states)->dimensions().last(kStatesRank);
  c->batch = call.batch();
  c->directions = shape[0], c->steps = shape[1], c->rows = shape[2];
  c->state_parts = shape[3], c->hidden = shape[4];
  const int64_t d = c->directions, t = c->steps, b = c->rows, h = c->hidden;

  const auto carries = static_cast<size_t>(call.Attribute<int64_t>("carries"));
  const bool transposed = call.Attribute<bool>("transposed");
  const auto inputs = Words(call.Attribute<std::string_view>("inputs"));    // such as "4tbh 4h 1tb"
  const auto outputs = Words(call.Attribute<std::string_view>("outputs"));  // such as "1 4"
  const auto reversed = call.Attribute<std::string_view>("reversed");       // such as "01"
  size_t index = 0;
  c->weight_dtype = call.OperandDType(0, "recurrent");
  const auto weights = call.Attribute<std::string_view>("weights");
  if (weights == "pairs") {
    c->weights_size = call.Size(0, 0);
    c->weights = call.Operand(index++, "recurrent", {d, c->weights_size});
    c->layout_size = call.Size(1, 0);
    c->layout = call.Operand(index++, "layout", {d, c->layout_size});
  } else if (weights == "masked") {
    c->densified = true;
    c->matrix_rows = call.Size(1, 0) - 1;
    c->matrix_columns = h;
    c->weights_size = call.Size(0, 0);
    c->weight_row_stride = transposed ? 1 : c->matrix_columns;
    c->weight_column_stride = transposed ? c->matrix_columns : 1;
    c->weights = call.Operand(index++, "recurrent", {d, c->weights_size});
    c->row_offsets = call.Operand(index++, "row_offsets", {d, c->matrix_rows + 1});
    c->index_type = call.OperandIndexType(index);
    c->column_indices = call.Operand(index++, "column_indices", {d, c->weights_size});
  } else {
    const int64_t rows = call.Size(0, 1), columns = call.Size(0, 0);
    c->weights_size = rows * columns;
    c->weight_row_stride = transposed ? columns : 1;
    c->weight_column_stride = transposed ? 1 : columns;
    c->weights = call.Operand(index++, "recurrent", {d, rows, columns});
  }
  c->state_dtype = call.OperandDType(index, "state");
  c->state = call.Operand(index++, "state", {d, b, c->state_parts, h});
  for (size_t i = 0; i < carries; ++i) {
    if (call.OperandDType(index, "carry") != DType::kFloat32) call.Fail("carries must be float32");
    c->carries.push_back(call.Operand(index++, "carry", {d, b, h}));
    c->last_carries.push_back(call.Result(1 + i, "carry", {d, b, h}));
  }
  for (const std::string_view form : inputs) {
    const auto has = [&](char dimension) { return form.find(dimension) != std::string_view::npos; };
    const int64_t parts = std::atoll(std::string(form).c_str());
    const int64_t time = has('t') ? t : 1, rows = has('b') ? b : 1, units = has('h') ? h : 1;
    Call::Input input;
    const DType dtype = call.OperandDType(index, "input");
    input.bytes = SizeOf(dtype);
    if (dtype != c->state_dtype && dtype != DType::kFloat32) {
      call.Fail("an input has neither the state's dtype nor float32");
    }
    input.array = call.Operand(index++, "input", {d, time, rows, parts, units});
    input.size = time * rows * parts * units;
    input.form.part_stride = units;
    input.form.unit_stride = has('h') ? 1 : 0;
    input.form.row_stride = has('b') ? parts * units : 0;
    input.form.step_stride = has('t') ? rows * parts * units : 0;
    c->inputs.push_back(input);
  }
  c->states = call.Result(0, "states", {d, t, b, c->state_parts, h});
  for (size_t i = 0; i < outputs.size(); ++i) {
    const int64_t parts = std::atoll(std::string(outputs[i]).c_str());
    c->outputs.push_back({call.Result(1 + carries + i, "output", {d, t, b, parts, h}), parts});
  }
  for (const char direction : reversed) c->reversed.push_back(direction == '1');

  c->kernel = {std::string(call.Attribute<std::string_view>("name")),
               std::string(call.Attribute<std::string_view>("expression")),
               std::string(call.Attribute<std::string_view>("source"))};
  c->shape = {call.Attribute<int64_t>("blocks"),
              static_cast<int>(call.Attribute<int64_t>("threads")),
              call.Attribute<int64_t>("shared_bytes"),
              static_cast<int>(call.Attribute<int64_t>("cluster")), true};
  c->first_look = static_cast<uint32_t>(call.Attribute<int64_t>("first_look"));
  c->look_later = static_cast<uint32_t>(call.Attribute<int64_t>("look_later"));
  c->look_earlier = static_cast<uint32_t>(call.Attribute<int64_t>("look_earlier"));
  c->wait_limit_ns = call.Attribute<int64_t>("wait_limit_ns");
  c->exchange_bytes = call.Attribute<int64_t>("exchange_bytes");
  c->groups = call.Attribute<int64_t>("groups");
  c->scans = call.Attribute<int64_t>("scans");
  auto workspace = results.get<ffi::AnyBuffer>(1 + carries + outputs.size());
  if (call.ok() && !workspace.has_value()) return workspace.error();
  if (call.ok()) {
    c->workspace = static_cast<char*>((*workspace)->untyped_data());
    if (c->scans < 1 || c->scans > kMaxScansOfLaunch || c->groups < 1 || b % c->groups != 0 ||
        d * c->groups % c->scans != 0) {
      call.Fail("its scans can't be dealt to launches as its plan says");
    } else if (static_cast<int64_t>((*workspace)->size_bytes()) < WorkspaceBytes(*c)) {
      call.Fail("the workspace is smaller than its plan says");
    }
    if (c->inputs.size() > kMaxScanArrays || c->outputs.size() > kMaxScanArrays ||
        carries > kMaxScanArrays || static_cast<int64_t>(c->reversed.size()) != d) {
      call.Fail("more carries, inputs or outputs than a launch takes, or a direction too many");
    }
  }
  return call.ok() ? ffi::Error::Success() : call.error();
}

// Where a direction of a batch entry lies in the arrays.
struct Place {
  const Batch& batch;
  int64_t entry;
  int64_t direction;

  // `size`: elements of a direction; `bytes`: of an element.
  char* In(const Array& array, int64_t size, int64_t bytes) const {
    auto* data = static_cast<char*>(array.data);
    return data + (array.At<char>(batch, entry) - data + direction * size) * bytes;
  }
};

// The dense form of a direction's matrix.
char* DenseOf(const Call& c, int64_t direction) {
  return c.workspace + c.scans * c.exchange_bytes + kScanFlagBytes +
         direction * c.matrix_rows * c.matrix_columns * SizeOf(c.weight_dtype);
}

// The problem of one direction and part of the batch, of one batch entry of the call; the scan'th
// of its launch.
RecurrentScanProblem ProblemOf(const Call& c, int64_t entry, int64_t direction, int64_t group,
                               int64_t scan) {
  const Place place{c.batch, entry, direction};
  const auto at = [&](const Array& array, int64_t size, int64_t bytes) {
    return place.In(array, size, bytes);
  };
  const int64_t state = SizeOf(c.state_dtype), units = c.rows * c.hidden;
  const int64_t first = c.rows / c.groups * group;  // batch entry
  const int64_t first_unit = first * c.hidden;
  RecurrentScanProblem p;
  p.steps = c.steps;
  p.batch = c.rows;
  p.hidden = c.hidden;
  p.reverse = c.reversed[static_cast<size_t>(direction)];
  p.weights =
      c.densified ? DenseOf(c, direction) : at(c.weights, c.weights_size, SizeOf(c.weight_dtype));
  if (c.layout.data != nullptr) {
    p.layout = reinterpret_cast<const uint32_t*>(at(c.layout, c.layout_size, sizeof(uint32_t)));
  }
  p.weight_row_stride = c.weight_row_stride;
  p.weight_column_stride = c.weight_column_stride;
  p.initial_state = at(c.state, units * c.state_parts, state) + first_unit * c.state_parts * state;
  p.states =
      at(c.states, units * c.state_parts * c.steps, state) + first_unit * c.state_parts * state;
  for (size_t i = 0; i < c.carries.size(); ++i) {
    const auto* initial = reinterpret_cast<const float*>(at(c.carries[i], units, sizeof(float)));
    p.initial_carry[i] = initial + first_unit;
    auto* last = reinterpret_cast<float*>(at(c.last_carries[i], units, sizeof(float)));
    p.final_carry[i] = last + first_unit;
  }
  for (size_t i = 0; i < c.inputs.size(); ++i) {
    const Call::Input& input = c.inputs[i];
    p.inputs[i] = input.form;
    p.inputs[i].data =
        at(input.array, input.size, input.bytes) + first * input.form.row_stride * input.bytes;
  }
  for (size_t i = 0; i < c.outputs.size(); ++i) {
    const int64_t parts = c.outputs[i].parts;
    p.outputs[i] =
        at(c.outputs[i].array, units * parts * c.steps, state) + first_unit * parts * state;
  }
  char* flags = c.workspace + c.scans * c.exchange_bytes;
  p.exchange = c.workspace + scan * c.exchange_bytes;
  p.error = reinterpret_cast<uint32_t*>(flags);
  p.arrivals =
      reinterpret_cast<uint32_t*>(flags + kScanFlagBytes / (1 + kMaxScansOfLaunch) * (1 + scan));
  p.first_look = c.first_look;
  p.look_later = c.look_later;
  p.look_earlier = c.look_earlier;
  p.wait_limit_ns = c.wait_limit_ns;
  return p;
}

// A kernel that found an earlier scan's states in the exchange buffer would take them for its own.
std::string Clear(const Call& call, int device, cudaStream_t stream) {
  const ScopedDevice scoped(device);
  const auto bytes = static_cast<size_t>(call.scans * call.exchange_bytes + kScanFlagBytes);
  const cudaError_t status = cudaMemsetAsync(call.workspace, 0xff, bytes, stream);
  return status == cudaSuccess
             ? ""
             : std::string("clearing the workspace: ") + cudaGetErrorString(status);
}

KernelSource DensifySource(DType dtype, IndexType index_type) {
  return {"recurrent/densify.cu",
          "jaxsparse::Densify<" + TypeName(dtype) + ", " + TypeName(index_type) + ">"};
}

std::string DensifyAll(const Call& c, int64_t entry, int device, cudaStream_t stream) {
  std::string reason;
  const void* kernel = GetKernel(DensifySource(c.weight_dtype, c.index_type), device, &reason);
  const int64_t value_bytes = SizeOf(c.weight_dtype);
  const int64_t index_bytes = c.index_type == IndexType::kInt32 ? 4 : 2;
  for (int64_t direction = 0; direction < c.directions && reason.empty(); ++direction) {
    const Place place{c.batch, entry, direction};
    DensifyProblem p;
    p.values = place.In(c.weights, c.weights_size, value_bytes);
    p.row_offsets = reinterpret_cast<const int32_t*>(
        place.In(c.row_offsets, c.matrix_rows + 1, sizeof(int32_t)));
    p.column_indices = place.In(c.column_indices, c.weights_size, index_bytes);
    p.dense = DenseOf(c, direction);
    p.rows = c.matrix_rows;
    p.columns = c.matrix_columns;
    p.nse = c.weights_size;
    reason = LaunchKernel(kernel, {p.rows, kDensifyThreads}, &p, device, stream);
  }
  return reason;
}

std::string FailedBefore(int device) {
  return "an earlier scan on GPU " + std::to_string(device) +
         " gave up: its blocks waited for one another longer than JAXSPARSE_SCAN_WAIT_LIMIT "
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
    const int64_t scans = call.directions * call.groups;
    for (int64_t first = 0; first < scans && reason.empty(); first += call.scans) {
      RecurrentScans<kMaxScansOfLaunch> launch;  // a kernel takes as many as it was planned for
      for (int64_t i = 0; i < call.scans; ++i) {
        const int64_t scan = first + i;
        launch.scan[i] = ProblemOf(call, entry, scan / call.groups, scan % call.groups, i);
        launch.scan[i].report = failure;  // unified addressing: the device sees it there, too
      }
      reason = Clear(call, device, stream);
      if (reason.empty()) reason = LaunchKernel(kernel, call.shape, &launch, device, stream);
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
  for (const char* weights :
       {"dense_tensor_cores", "dense_fma", "masked_tensor_cores", "masked_fma", "sparse_pairs"}) {
    entry.cuda_variants.push_back(weights);
    entry.cuda_variants.push_back(std::string(weights) + "_barrier");
  }
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const IndexType index_type : {IndexType::kInt32, IndexType::kUint16}) {
      entry.kernels.push_back(DensifySource(dtype, index_type));
    }
  }
  return entry;
}

}  // namespace jaxsparse
