// FFI target of a wave: layers of a stack in one persistent launch (kernels/wave.cu). As with
// recurrent_scan, what to launch was planned when the program was lowered, and the last result is
// its workspace: an exchange buffer for each layer and part of its batch, and flags. Operands and
// results come layer by layer, the lowest layer first; that one has no weights from below.
#include <cuda_runtime_api.h>

#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "host/registry.h"
#include "persistent/failures.h"
#include "recurrent/scan_call.h"
#include "recurrent/variants.h"

namespace jaxsparse {
namespace {

constexpr char kName[] = "recurrent_wave";

// Parameters that a kernel can take, from driver 530 and CUDA 12.1 on.
static_assert(sizeof(RecurrentWave<kMaxLayersOfWave>) <= 32764);

struct Layer {
  int64_t skip_from = -1;  // a lower layer, or none
  Array weights, below_weights, state, states;
  std::vector<Array> carries, last_carries, outputs, inputs;
  std::vector<ScanInput> input_forms;
};

struct Call {
  Batch batch;
  int64_t steps = 0, rows = 0, hidden = 0;
  DType dtype = DType::kBFloat16;
  bool reverse = false;
  float norm_epsilon = 0;
  DenseWeights own_form, below_form;               // without values
  std::vector<int64_t> input_bytes, output_bytes;  // of an element
  std::vector<Layer> layers;
  char* workspace = nullptr;
  ScanLaunches launches;
  KernelLaunch launch;
};

// Of one of a layer's matrices: columns and rows as it is stored, and where the kernel's are.
struct MatrixSizes {
  int64_t columns, rows;
  DenseWeights form;

  MatrixSizes(int64_t products, int64_t states, int64_t hidden, bool transposed)
      : columns((transposed ? products : states) * hidden),
        rows((transposed ? states : products) * hidden),
        form{nullptr, transposed ? rows : 1, transposed ? 1 : rows} {}
};

void ParseLaunches(CallParser& call, int64_t layers, Call* c) {
  c->launch = ParseLaunch(call, &c->launches);
  c->launches.layers = layers;
  const int64_t scans = layers * c->launches.scans;
  if (c->rows % c->launches.groups != 0 || c->launches.scans != c->launches.groups ||
      c->launch.shape.blocks % scans != 0 || c->launch.shape.cluster != 1) {
    call.Fail("attributes groups, scans, blocks and cluster must suit a batch of " +
              std::to_string(c->rows) + " and " + std::to_string(layers) + " layers, got " +
              std::to_string(c->launches.groups) + ", " + std::to_string(c->launches.scans) + ", " +
              std::to_string(c->launch.shape.blocks) + " and " +
              std::to_string(c->launch.shape.cluster));
  }
}

ffi::Error Parse(ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes, Call* c) {
  CallParser call(kName, operands, results, attributes);
  const int64_t layers = call.Integer("layers", 1, kMaxLayersOfWave);
  const auto count = [&](const char* name) { return call.Integer(name, 1, kMaxScanArrays); };
  const int64_t own_products = count("own_products"), own_states = count("own_states");
  const int64_t below_products = count("below_products"), below_states = count("below_states");
  const bool transposed = call.Attribute<bool>("transposed");
  c->norm_epsilon = static_cast<float>(call.Attribute<double>("norm_epsilon"));
  const int64_t carries = call.Integer("carries", 0, kMaxScanArrays);
  const std::vector<Span> outputs = Spans(call, "outputs", "");
  const auto input_dtypes = Words(call.Attribute<std::string_view>("input_dtypes"));
  const auto output_dtypes = DTypeNames(call, "output_dtypes", outputs.size());
  const std::vector<Span> inputs =  // of each layer
      Spans(call, "inputs", "tbh", kMaxLayersOfWave * kMaxScanArrays);
  const size_t of_layer = input_dtypes.size();
  c->reverse = call.Attribute<bool>("reverse");
  if (of_layer > kMaxScanArrays || inputs.size() != of_layer * static_cast<size_t>(layers)) {
    call.Fail("attributes inputs and input_dtypes must have words for " + std::to_string(layers) +
              " layers and for one, got " + std::to_string(inputs.size()) + " and " +
              std::to_string(of_layer));
  }

  const auto skips = Words(call.Attribute<std::string_view>("skips"));  // layers, or "-"
  if (skips.size() != static_cast<size_t>(layers)) {
    call.Fail("attribute skips must have a word for each of " + std::to_string(layers) +
              " layers, got " + std::to_string(skips.size()));
  }

  Dimension t("steps"), b("batch"), s("states"), h("units");
  ElementType dtype = ElementType::OneOf(kScanDTypes);
  ElementType float32 = {ffi::F32};
  if (!call.ok()) return call.error();
  c->layers.resize(static_cast<size_t>(layers));
  for (Layer& layer : c->layers) {
    layer.states = call.Result("states", dtype, {t, b, s, h});
    for (int64_t i = 0; i < carries; ++i) {
      layer.last_carries.push_back(call.Result("last carry", float32, {b, h}));
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      ElementType type = TypeNamed(call, output_dtypes[i], dtype);
      layer.outputs.push_back(call.Result("output", type, {t, b, outputs[i].parts, h}));
    }
  }
  if (!call.ok()) return call.error();
  constexpr int64_t kMostUnits = 1 << 20;
  if (h.size > kMostUnits) {
    call.Fail("a layer must have at most " + std::to_string(kMostUnits) + " units, got " +
              std::to_string(h.size));
    return call.error();
  }
  c->batch = call.batch();
  c->steps = t.size, c->rows = b.size, c->hidden = h.size;
  c->dtype = DTypeOf(dtype);
  for (const std::string_view name : output_dtypes) {
    c->output_bytes.push_back(SizeOf(DTypeOf(TypeNamed(call, name, dtype))));
  }

  const MatrixSizes own(own_products, own_states, h.size, transposed),
      below(below_products, below_states, h.size, transposed);
  c->own_form = own.form, c->below_form = below.form;
  for (size_t l = 0; l < c->layers.size(); ++l) {
    Layer& layer = c->layers[l];
    if (skips[l] != "-") {
      const std::string_view word = skips[l];
      const auto [end, error] =
          std::from_chars(word.data(), word.data() + word.size(), layer.skip_from);
      const bool is_number = error == std::errc() && end == word.data() + word.size();
      if (!is_number || layer.skip_from < 0 || layer.skip_from >= static_cast<int64_t>(l)) {
        call.Fail("attribute skips must have lower layers, got " + std::string(word) +
                  " for layer " + std::to_string(l));
        return call.error();
      }
    }
    layer.weights = call.Operand("own weights", dtype, {own.columns, own.rows});
    if (l > 0) {
      layer.below_weights = call.Operand("below weights", dtype, {below.columns, below.rows});
    }
    layer.state = call.Operand("state", dtype, {b, s, h});
    for (int64_t i = 0; i < carries; ++i) {
      layer.carries.push_back(call.Operand("carry", float32, {b, h}));
    }
    for (size_t i = 0; i < of_layer; ++i) {
      const Span& span = inputs[l * of_layer + i];
      const InputSizes sizes(span, t.size, b.size, h.size);
      ElementType type = TypeNamed(call, input_dtypes[i], dtype);
      layer.inputs.push_back(
          call.Operand("input", type, {sizes.time, sizes.rows, sizes.parts, sizes.units}));
      layer.input_forms.push_back(sizes.FormOf(span));
      if (l == 0) c->input_bytes.push_back(SizeOf(DTypeOf(type)));
    }
  }
  ParseLaunches(call, layers, c);
  c->workspace = call.ResultWorkspace(c->launches.WorkspaceBytes()).data;
  call.Finish();
  return call.ok() ? ffi::Error::Success() : call.error();
}

// One layer of the launch for one batch entry of the call.
RecurrentWaveLayer ProblemOf(const Call& c, int64_t entry, size_t l) {
  const Layer& layer = c.layers[l];
  const auto at = [&](const Array& array, int64_t bytes) {
    auto* data = static_cast<char*>(array.data);
    return data + (array.At<char>(c.batch, entry) - data) * bytes;
  };
  const auto floats = [&](const Array& array) {
    return reinterpret_cast<float*>(at(array, sizeof(float)));
  };
  const int64_t item = SizeOf(c.dtype);
  RecurrentWaveLayer p;
  p.steps = c.steps;
  p.batch = c.rows;
  p.hidden = c.hidden;
  p.reverse = c.reverse;
  p.weights = at(layer.weights, item);
  p.weight_row_stride = c.own_form.row_stride;
  p.weight_column_stride = c.own_form.column_stride;
  p.initial_state = at(layer.state, item);
  p.states = at(layer.states, item);
  for (size_t i = 0; i < layer.carries.size(); ++i) {
    p.initial_carry[i] = floats(layer.carries[i]);
    p.final_carry[i] = floats(layer.last_carries[i]);
  }
  for (size_t i = 0; i < layer.inputs.size(); ++i) {
    p.inputs[i] = layer.input_forms[i];
    p.inputs[i].data = at(layer.inputs[i], c.input_bytes[i]);
  }
  for (size_t i = 0; i < layer.outputs.size(); ++i) {
    p.outputs[i] = at(layer.outputs[i], c.output_bytes[i]);
  }
  const auto first = static_cast<int64_t>(l) * c.launches.scans;
  p.exchange = c.workspace + c.launches.ExchangeAt(first);
  p.exchange_bytes = c.launches.exchange_bytes;
  p.arrivals = reinterpret_cast<uint32_t*>(c.workspace + c.launches.ArrivalsAt(first));
  if (l > 0) {
    p.below_weights = c.below_form;
    p.below_weights.values = at(layer.below_weights, item);
    p.below_exchange = c.workspace + c.launches.ExchangeAt(first - c.launches.scans);
  }
  if (layer.skip_from >= 0) {
    p.skip_exchange = c.workspace + c.launches.ExchangeAt(layer.skip_from * c.launches.scans);
  }
  p.norm_epsilon = c.norm_epsilon;
  p.poll_delays = c.launch.poll_delays;
  p.wait_limits = c.launch.wait_limits;
  p.wait_limits.error = reinterpret_cast<uint32_t*>(c.workspace + c.launches.ErrorAt());
  return p;
}

ffi::Error PrepareOnCuda(int32_t device, ffi::RemainingArgs operands, ffi::RemainingRets results,
                         ffi::Dictionary attributes) {
  Call call;
  if (ffi::Error error = Parse(operands, results, attributes, &call); error.failure()) return error;
  std::string reason;
  if (FailureWord(device, &reason) == nullptr ||
      GetKernel(call.launch.kernel, device, &reason) == nullptr) {
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
  const void* kernel = reason.empty() ? GetKernel(call.launch.kernel, device, &reason) : nullptr;
  for (int64_t entry = 0; entry < call.batch.count && reason.empty(); ++entry) {
    RecurrentWave<kMaxLayersOfWave> wave;  // a kernel takes as many as it was planned for
    for (size_t l = 0; l < call.layers.size(); ++l) {
      wave.layer[l] = ProblemOf(call, entry, l);
      // Unified addressing: the device sees it there, too.
      wave.layer[l].wait_limits.report = failure;
    }
    reason = ClearWorkspace(call.launches, call.workspace, device, stream);
    if (reason.empty()) reason = LaunchKernel(kernel, call.launch.shape, &wave, device, stream);
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

OperationEntry RecurrentWaveEntry() {
  OperationEntry entry{kName, nullptr, CudaInitialize, CudaExecute, {}, {}, {}};
  for (const ScanVariant& variant : kWaveVariants) entry.cuda_variants.push_back(variant.name);
  // Layers that are in no wave run one by one, as scans.
  for (const ScanVariant& variant : kScanVariants) entry.cuda_variants.push_back(variant.name);
  return entry;
}

}  // namespace jaxsparse
