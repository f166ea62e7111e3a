// FFI target of a wave: layers of a stack in one persistent launch (kernels/wave.cu), or in
// several, each for some of the parts that the batch is cut into. As with recurrent_scan, what to
// launch was planned when the program was lowered, and the last result is its workspace: an
// exchange buffer for each layer and part of the batch in a launch, and flags. Operands and results
// come layer by layer, the lowest layer first; that one has no weights from below.
#include <charconv>
#include <string>
#include <string_view>
#include <vector>

#include "recurrent/scan_targets.h"
#include "recurrent/variants.h"

namespace jaxsparse {
namespace {

// Parameters that a kernel can take, from driver 530 and CUDA 12.1 on.
static_assert(sizeof(RecurrentWave<kMaxLayersOfWave>) <= 32764);

struct Layer : ScanArrays {
  int64_t skip_from = -1;  // a lower layer, or none
  Array weights, below_weights;
};

struct WaveCall : ScanCall {
  DType dtype = DType::kBFloat16;
  bool reverse = false;
  float norm_epsilon = 0;
  DenseWeights own_form, below_form;  // without values
  std::vector<Layer> layers;
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

void ParseLaunches(CallParser& call, int64_t layers, WaveCall* c) {
  c->launch = ParseLaunch(call, &c->launches);
  c->launches.layers = layers;
  const int64_t scans = layers * c->launches.scans;
  if (c->rows % c->launches.groups != 0 || c->launches.groups % c->launches.scans != 0 ||
      c->launch.shape.blocks % scans != 0 || c->launch.shape.cluster != 1) {
    call.Fail("attributes groups, scans, blocks and cluster must suit a batch of " +
              std::to_string(c->rows) + " and " + std::to_string(layers) + " layers, got " +
              std::to_string(c->launches.groups) + ", " + std::to_string(c->launches.scans) + ", " +
              std::to_string(c->launch.shape.blocks) + " and " +
              std::to_string(c->launch.shape.cluster));
  }
}

void ParseWave(CallParser& call, WaveCall* c) {
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
  if (!call.ok()) return;
  c->layers.resize(static_cast<size_t>(layers));
  for (Layer& layer : c->layers) {
    layer.states = call.Result("states", dtype, {t, b, s, h});
    for (int64_t i = 0; i < carries; ++i) {
      layer.last_carries.push_back(call.Result("last carry", float32, {b, h}));
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      ElementType type = TypeNamed(call, output_dtypes[i], dtype);
      const Array array = call.Result("output", type, {t, b, outputs[i].parts, h});
      layer.outputs.push_back({array, SizeOf(DTypeOf(type))});
    }
  }
  if (!call.ok()) return;
  constexpr int64_t kMostUnits = 1 << 20;
  if (h.size > kMostUnits) {
    call.Fail("a layer must have at most " + std::to_string(kMostUnits) + " units, got " +
              std::to_string(h.size));
    return;
  }
  c->TakeSizes(call, t, b, h);
  c->dtype = DTypeOf(dtype);

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
        return;
      }
    }
    layer.weights = call.Operand("own weights", dtype, {own.columns, own.rows});
    if (l > 0) {
      layer.below_weights = call.Operand("below weights", dtype, {below.columns, below.rows});
    }
    layer.state = call.Operand("state", dtype, {b, s, h});
    layer.state_bytes = SizeOf(c->dtype);
    for (int64_t i = 0; i < carries; ++i) {
      layer.carries.push_back(call.Operand("carry", float32, {b, h}));
    }
    for (size_t i = 0; i < of_layer; ++i) {
      const Span& span = inputs[l * of_layer + i];
      const InputSizes sizes(span, t.size, b.size, h.size);
      ElementType type = TypeNamed(call, input_dtypes[i], dtype);
      const Array array =
          call.Operand("input", type, {sizes.time, sizes.rows, sizes.parts, sizes.units});
      layer.inputs.push_back({array, SizeOf(DTypeOf(type)), sizes.FormOf(span)});
    }
  }
  ParseLaunches(call, layers, c);
  c->workspace = call.ResultWorkspace(c->launches.WorkspaceBytes()).data;
}

// One layer of a launch for one batch entry of the call.
RecurrentWaveLayer ProblemOf(const WaveCall& c, int64_t entry, int64_t launch, size_t l) {
  const Layer& layer = c.layers[l];
  const int64_t first_scan = static_cast<int64_t>(l) * c.launches.scans;
  const auto weights = [&](const Array& array) {
    return EntryOf(c.batch, entry, array, SizeOf(c.dtype));
  };
  RecurrentWaveLayer p;
  c.Fill(first_scan, &p);
  layer.Fill(c.batch, entry, &p);
  p.first_scan = static_cast<uint32_t>(launch * c.launches.scans);
  p.reverse = c.reverse;
  p.weights = weights(layer.weights);
  p.weight_row_stride = c.own_form.row_stride;
  p.weight_column_stride = c.own_form.column_stride;
  if (l > 0) {
    p.below_weights = c.below_form;
    p.below_weights.values = weights(layer.below_weights);
    p.below_exchange = c.workspace + c.launches.ExchangeAt(first_scan - c.launches.scans);
  }
  if (layer.skip_from >= 0) {
    p.skip_exchange = c.workspace + c.launches.ExchangeAt(layer.skip_from * c.launches.scans);
  }
  p.norm_epsilon = c.norm_epsilon;
  return p;
}

struct RecurrentWaveOperation {
  using Call = WaveCall;
  static constexpr char kName[] = "recurrent_wave";

  static void Parse(CallParser& parser, Call* call) { ParseWave(parser, call); }

  static std::vector<KernelSource> MoreKernels(const Call&) { return {}; }

  static std::string Launch(const Call& call, int64_t entry, const CudaLaunch& launch) {
    RecurrentWave<kMaxLayersOfWave> wave;  // a kernel takes as many as it was planned for
    std::string reason;
    for (int64_t i = 0; i < call.launches.Count() && reason.empty(); ++i) {
      for (size_t l = 0; l < call.layers.size(); ++l) wave.layer[l] = ProblemOf(call, entry, i, l);
      reason = LaunchCleared(call, launch, &wave);
    }
    return reason;
  }
};

}  // namespace

OperationEntry RecurrentWaveEntry() {
  OperationEntry entry = ScanEntry<RecurrentWaveOperation>();
  for (const ScanVariant& variant : kWaveVariants) entry.cuda_variants.push_back(variant.name);
  // Layers that are in no wave run one by one, as scans.
  for (const ScanVariant& variant : kScanVariants) entry.cuda_variants.push_back(variant.name);
  entry.cuda_variants.push_back("wavefront");  // all layers in a loop of XLA
  return entry;
}

}  // namespace jaxsparse
