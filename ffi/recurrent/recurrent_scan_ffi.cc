// FFI target of the persistent recurrent scan. What to launch was planned when the program was
// lowered (recurrent/plan.h): the attributes carry the kernel's source and its launch,
// the last result is its workspace: exchange buffers of a launch's scans, flags, dense forms of
// sparse matrices that are kept on chip as such. There is no CPU kernel: elsewhere the scan is a
// loop of XLA.
#include <string>
#include <string_view>
#include <vector>

#include "persistent/densify.h"
#include "recurrent/scan_targets.h"
#include "recurrent/variants.h"

namespace jaxsparse {
namespace {

struct RecurrentScanCall : ScanCall {
  ScanArrays arrays;
  Array weights, layout, row_offsets, column_indices;
  int64_t nse = 0, weights_size = 0;  // elements of a direction
  int64_t matrix_rows = 0, matrix_columns = 0;
  bool densified = false;
  IndexType index_type = IndexType::kInt32;
  int64_t weight_row_stride = 0, weight_column_stride = 0;
  DType weight_dtype = DType::kFloat32;
  std::vector<bool> reversed;
};

// The weights of `products` times h rows and `s` times h columns.
void ParseWeights(CallParser& call, int64_t products, Dimension& d, Dimension& s, Dimension& h,
                  RecurrentScanCall* c) {
  const ScanWeights weights = call.Choice("weights", kScanWeights);
  const bool transposed = call.Attribute<bool>("transposed");
  const int64_t layout_words = call.Integer("layout_words", 0, kMostIndex);
  const int64_t products_h = products * h.size, states_h = s.size * h.size;
  if (products_h > kMaxMatrixRows || states_h > kMaxMatrixRows) {
    call.Fail("products and states of all units must be at most " + std::to_string(kMaxMatrixRows) +
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

void ParseLaunches(CallParser& call, RecurrentScanCall* c) {
  ScanLaunches& launches = c->launches;
  c->launch = ParseLaunch(call, &launches);
  const LaunchShape& shape = c->launch.shape;
  if (c->rows % launches.groups != 0 || launches.scans > launches.All() ||
      shape.blocks % (launches.scans * shape.cluster) != 0) {
    call.Fail("attributes groups, scans, blocks and cluster must suit a batch of " +
              std::to_string(c->rows) + " and " + std::to_string(launches.directions) +
              " directions, got " + std::to_string(launches.groups) + ", " +
              std::to_string(launches.scans) + ", " + std::to_string(shape.blocks) + " and " +
              std::to_string(shape.cluster));
  }
  // Blocks that each make a whole scan wait for no other.
  c->launch.shape.cooperative = shape.blocks > launches.scans;
}

void ParseScan(CallParser& call, RecurrentScanCall* c) {
  const int64_t products = call.Integer("products", 1, kMaxScanArrays);
  const int64_t carries = call.Integer("carries", 0, kMaxScanArrays);
  const std::vector<Span> inputs = Spans(call, "inputs", "tbh"),
                          outputs = Spans(call, "outputs", "");
  const auto input_dtypes = DTypeNames(call, "input_dtypes", inputs.size());
  const auto output_dtypes = DTypeNames(call, "output_dtypes", outputs.size());
  const auto reversed = call.Attribute<std::string_view>("reversed");  // such as "01"
  if (reversed.size() > size_t{kMaxDirections} ||
      reversed.find_first_not_of("01") != reversed.npos) {
    call.Fail("attribute reversed must have a 0 or 1 for each of at most " +
              std::to_string(kMaxDirections) + " directions, got '" + std::string(reversed) + "'");
  }

  Dimension d("directions"), t("steps"), b("batch"), s("states"), h("units");
  d.size = static_cast<int64_t>(reversed.size());
  d.said_by = "attribute reversed";
  ElementType dtype = ElementType::OneOf(kScanDTypes);
  ElementType float32 = {ffi::F32};
  ScanArrays& arrays = c->arrays;
  arrays.states = call.Result("states", dtype, {d, t, b, s, h});
  for (int64_t i = 0; i < carries; ++i) {
    arrays.last_carries.push_back(call.Result("last carry", float32, {d, b, h}));
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    ElementType type = TypeNamed(call, output_dtypes[i], dtype);
    const Array array = call.Result("output", type, {d, t, b, outputs[i].parts, h});
    arrays.outputs.push_back({array, SizeOf(DTypeOf(type))});
  }
  if (!call.ok()) return;
  c->TakeSizes(call, t, b, h);
  c->launches.directions = d.size;
  arrays.state_bytes = SizeOf(DTypeOf(dtype));
  for (const char direction : reversed) c->reversed.push_back(direction == '1');

  ParseWeights(call, products, d, s, h, c);
  arrays.state = call.Operand("state", dtype, {d, b, s, h});
  for (int64_t i = 0; i < carries; ++i) {
    arrays.carries.push_back(call.Operand("carry", float32, {d, b, h}));
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Span& span = inputs[i];
    const InputSizes sizes(span, t.size, b.size, h.size);
    ElementType type = TypeNamed(call, input_dtypes[i], dtype);
    const Array array =
        call.Operand("input", type, {d, sizes.time, sizes.rows, sizes.parts, sizes.units});
    arrays.inputs.push_back({array, SizeOf(DTypeOf(type)), sizes.FormOf(span)});
  }
  ParseLaunches(call, c);
  c->workspace = call.ResultWorkspace(c->launches.WorkspaceBytes()).data;
}

// The problem of one launch for one batch entry of the call.
RecurrentScanProblem ProblemOf(const RecurrentScanCall& c, int64_t entry, int64_t launch) {
  const int64_t first_scan = launch * c.launches.scans;
  RecurrentScanProblem p;
  c.Fill(0, &p);
  c.arrays.Fill(c.batch, entry, &p);
  p.first_scan = static_cast<uint32_t>(first_scan);
  for (int64_t scan = 0; scan < c.launches.ScansOf(launch); ++scan) {
    const int64_t direction = (first_scan + scan) / c.launches.groups;
    const uint32_t bit = c.reversed[static_cast<size_t>(direction)] ? 1 : 0;
    p.reversed_scans[scan / 32] |= bit << scan % 32;
  }
  p.reverse = (p.reversed_scans[0] & 1) != 0;
  p.weights = c.densified ? c.workspace + c.launches.DenseAt(0)
                          : EntryOf(c.batch, entry, c.weights, SizeOf(c.weight_dtype));
  p.weights_size = c.weights_size;
  p.weight_row_stride = c.weight_row_stride;
  p.weight_column_stride = c.weight_column_stride;
  if (c.layout.data != nullptr) {
    p.layout =
        reinterpret_cast<const uint32_t*>(EntryOf(c.batch, entry, c.layout, sizeof(uint32_t)));
  }
  return p;
}

std::string DensifyAll(const RecurrentScanCall& c, int64_t entry, int device, void* stream) {
  std::string reason;
  const int64_t value_bytes = SizeOf(c.weight_dtype);
  const int64_t index_bytes = c.index_type == IndexType::kInt32 ? 4 : 2;
  for (int64_t direction = 0; direction < c.launches.directions && reason.empty(); ++direction) {
    const auto at = [&](const Array& array, int64_t size, int64_t bytes) {
      return EntryOf(c.batch, entry, array, bytes) + direction * size * bytes;
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

struct RecurrentScanOperation {
  using Call = RecurrentScanCall;
  static constexpr char kName[] = "recurrent_scan";

  static void Parse(CallParser& parser, Call* call) { ParseScan(parser, call); }

  static std::vector<KernelSource> MoreKernels(const Call& call) {
    if (!call.densified) return {};
    return {DensifySource(call.weight_dtype, call.index_type)};
  }

  static std::string Launch(const Call& call, int64_t entry, const CudaLaunch& launch) {
    std::string reason;
    if (call.densified) reason = DensifyAll(call, entry, launch.device, launch.stream);
    const ScanLaunches& launches = call.launches;
    for (int64_t i = 0; i < launches.Count() && reason.empty(); ++i) {
      RecurrentScanProblem p = ProblemOf(call, entry, i);
      CudaLaunch part = launch;
      part.shape.blocks = launch.shape.blocks / launches.scans * launches.ScansOf(i);
      reason = LaunchCleared(call, part, &p);
    }
    return reason;
  }
};

}  // namespace

OperationEntry RecurrentScanEntry() {
  // Kernels of scans are printed for each plan; tests/test_recurrent_compilation.py compiles some
  // of every kind.
  OperationEntry entry = ScanEntry<RecurrentScanOperation>();
  for (const ScanVariant& variant : kScanVariants) entry.cuda_variants.push_back(variant.name);
  for (const NamedScanDType& named : kScanDTypes) {
    for (const IndexType index_type : {IndexType::kInt32, IndexType::kUint16}) {
      entry.kernels.push_back(DensifySource(named.value, index_type));
    }
  }
  return entry;
}

}  // namespace jaxsparse
