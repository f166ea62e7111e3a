#include "recurrent/bindings.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "nvrtc/expression.h"
#include "persistent/failures.h"
#include "recurrent/plan.h"
#include "recurrent/problem.h"
#include "recurrent/sparse_layout.h"

namespace nb = nanobind;

namespace jaxsparse {
namespace {

// The GPUs on which a recurrent scan has timed out since this was last asked; waits for them all.
std::vector<int> TakeScanFailures() {
  std::string error;
  const std::vector<int> failed = WaitForFailures(&error);
  if (!error.empty()) throw std::runtime_error(error);
  return failed;
}

using Indices = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

bool IsPatternOf(const Indices& row_offsets, const Indices& column_indices, int64_t rows,
                 int64_t columns) {
  if (static_cast<int64_t>(row_offsets.size()) != rows + 1) return false;
  const int32_t* offsets = row_offsets.data();
  const int64_t entries = offsets[rows];
  return offsets[0] == 0 && std::is_sorted(offsets, offsets + rows + 1) &&
         entries <= static_cast<int64_t>(column_indices.size()) &&
         std::all_of(column_indices.data(), column_indices.data() + entries,
                     [&](int32_t column) { return column >= 0 && column < columns; });
}

// What is to be asked of lay_out_sparse, by the names of its arguments.
nb::dict PlanDescribedLayout(int products, int state_parts, int64_t hidden, int64_t nnz, int batch,
                             int state_bytes, int multiprocessors) {
  if (std::min({products, state_parts, state_bytes}) < 1 || hidden < 1 ||
      std::min(batch, multiprocessors) < 0) {
    throw nb::value_error("the sizes of a scan are out of range");
  }
  const SparseLayoutPlan plan =
      PlanSparseLayout(products, state_parts, hidden, nnz, batch, state_bytes, multiprocessors);
  nb::dict result;
  result["products"] = plan.shape.products;
  result["state_parts"] = plan.shape.state_parts;
  result["blocks"] = plan.shape.blocks;
  result["cluster"] = plan.shape.cluster;
  result["most_threads"] = plan.shape.threads;
  result["fewest_threads"] = plan.fewest_threads;
  result["entries"] = plan.shape.entries;
  result["group"] = plan.shape.group;
  return result;
}

// The sizes of a form, by the names of its fields.
auto FieldsOf(SparseForm& form) {
  struct Field {
    const char* name;
    int* value;
  };
  SparseShape& shape = form.shape;
  return std::to_array<Field>({{"products", &shape.products},
                               {"state_parts", &shape.state_parts},
                               {"blocks", &shape.blocks},
                               {"cluster", &shape.cluster},
                               {"units", &shape.units},
                               {"threads", &shape.threads},
                               {"lanes", &shape.lanes},
                               {"entries", &shape.entries},
                               {"group", &shape.group},
                               {"partial_sums", &form.partial_sums},
                               {"row_sums", &form.row_sums},
                               {"piece_bytes", &form.piece_bytes}});
}

// How a scan's sparse matrix lies on chip (recurrent/sparse_layout.h), or a ValueError that says
// why it does not fit. `permutation`, which may be empty, says where each entry's value lies.
nb::dict LayOutSparse(Indices row_offsets, Indices column_indices, Indices permutation,
                      int64_t hidden, int products, int state_parts, int blocks, int cluster,
                      int most_threads, int fewest_threads, int entries, int group, int piece_bytes,
                      bool bank_aware) {
  if (!IsPatternOf(row_offsets, column_indices, products * hidden, state_parts * hidden) ||
      (permutation.size() != 0 && permutation.size() < column_indices.size())) {
    throw nb::value_error("the pattern is not one of a recurrent matrix of this size");
  }
  SparsePatternView pattern;
  pattern.hidden = hidden;
  pattern.row_offsets = row_offsets.data();
  pattern.column_indices = column_indices.data();
  pattern.permutation = permutation.size() == 0 ? nullptr : permutation.data();
  SparseShape shape;
  shape.products = products;
  shape.state_parts = state_parts;
  shape.blocks = blocks;
  shape.cluster = cluster;
  shape.units = UnitsPerBlock(hidden, blocks, cluster, state_parts, piece_bytes);
  shape.threads = most_threads;
  shape.entries = entries;
  shape.group = group;
  std::string error;
  std::optional<SparseLayout> layout;
  {
    const nb::gil_scoped_release released;
    layout = MakeSparseLayout(pattern, shape, fewest_threads, piece_bytes, bank_aware, &error);
  }
  if (!layout) throw nb::value_error(error.c_str());
  nb::dict result, form;
  for (const auto& field : FieldsOf(layout->form)) form[field.name] = *field.value;
  result["form"] = form;
  result["wavefronts"] = layout->wavefronts;
  result["filling"] = layout->filling;
  result["words"] = nb::bytes(reinterpret_cast<const char*>(layout->words.data()),
                              layout->words.size() * sizeof(uint32_t));
  return result;
}

using NamedSizes = std::map<std::string, int>;

// Forms come with exported programs, too, so that their sizes may be anything.
SparseForm FormOf(const NamedSizes& sizes) {
  SparseForm form;
  const SparseShape& shape = form.shape;
  constexpr int kMost = 1 << 24;  // of units, and more than there are of anything else
  for (const auto& field : FieldsOf(form)) {
    const auto size = sizes.find(field.name);
    if (size == sizes.end() || size->second < 1 || size->second > kMost) {
      throw nb::value_error(
          (std::string(field.name) + " of a layout is missing or out of range").c_str());
    }
    *field.value = size->second;
  }
  // Then all sizes that follow are those of an int.
  const double columns = static_cast<double>(shape.blocks) * shape.units * shape.state_parts;
  const double rows = static_cast<double>(shape.units) * shape.products;
  const double slots = static_cast<double>(shape.lanes) * shape.threads * shape.entries;
  const bool is_piece = form.piece_bytes == 4 || form.piece_bytes == 8 || form.piece_bytes == 16;
  if (columns > 1 << 25 || rows > 1 << 28 || slots > 1 << 28 || form.partial_sums > 0xffff ||
      !is_piece) {
    throw nb::value_error("the sizes of a layout are out of range");
  }
  return form;
}

// Where the parts of a block's record begin, how long it is (sparse_record.h), and how many columns
// there are: of the state, and in a block's shared memory.
nb::dict SizesOfLayout(const NamedSizes& sizes) {
  const SparseForm form = FormOf(sizes);
  nb::dict result;
  result["rows_at"] = form.shape.rows_at();
  result["groups_at"] = form.shape.groups_at();
  result["columns_at"] = form.shape.columns_at();
  result["values_at"] = form.shape.values_at();
  result["words"] = form.shape.words();
  result["columns"] = form.shape.columns();
  result["shared_columns"] = form.shared_columns();
  return result;
}

// [(name, weights, whether on tensor cores, whether with a barrier)]
nb::list ScanVariants() {
  nb::list variants;
  for (const ScanVariant& variant : kScanVariants) {
    const auto* weights =
        std::find_if(std::begin(kScanWeights), std::end(kScanWeights),
                     [&](const NamedScanWeights& named) { return named.value == variant.weights; });
    variants.append(
        nb::make_tuple(variant.name, weights->name, variant.tensor_cores, variant.barrier));
  }
  return variants;
}

// {name: which passes it is for}
nb::dict WaveVariants() {
  nb::dict variants;
  for (const ScanVariant& variant : kWaveVariants) variants[variant.name] = variant.passes();
  return variants;
}

// {name: type in device code} of the dtypes of states and weights.
nb::dict ScanDTypes() {
  nb::dict types;
  for (const NamedScanDType& named : kScanDTypes) types[named.name] = TypeName(named.value);
  return types;
}

DType ScanDTypeOf(const std::string& name) {
  for (const NamedScanDType& named : kScanDTypes) {
    if (name == named.name) return named.value;
  }
  throw nb::value_error(("scans have no states or weights of " + name).c_str());
}

// By the names of recurrent/plan.py; None if there is no plan.
nb::object Described(const std::optional<ScanPlan>& best) {
  if (!best) return nb::none();
  const ScanPlan& plan = *best;
  nb::dict result;
  result["variant"] = plan.variant->name;
  result["file"] = plan.file;
  result["constants"] = plan.constants;
  result["blocks"] = plan.blocks;
  result["threads"] = plan.threads;
  result["shared_bytes"] = plan.shared_bytes;
  result["exchange_bytes"] = plan.launches.exchange_bytes;
  result["poll_delay"] = plan.poll_delay;
  result["poll_delay_increase"] = plan.poll_delay_increase;
  result["poll_delay_decrease"] = plan.poll_delay_decrease;
  result["microseconds"] = plan.microseconds;
  result["total_microseconds"] = plan.total_microseconds;
  result["in_registers"] = plan.in_registers;
  result["cluster"] = plan.cluster;
  result["groups"] = plan.launches.groups;
  result["scans"] = plan.launches.scans;
  result["layers"] = plan.launches.layers;
  result["launches"] = plan.launches.Count();
  result["resident"] = plan.resident;
  result["dense_bytes"] = plan.launches.dense_bytes;
  result["workspace_bytes"] = plan.launches.WorkspaceBytes();
  return result;
}

// (the best plan or None, why there is none, the most batch that any kernel takes in parts, the
// predicted microseconds of XLA's loop).
nb::tuple PlanDescribedScan(const std::string& variant, int64_t products, int64_t states,
                            int64_t inputs, int64_t outputs, int64_t hidden, int64_t batch,
                            int64_t length, const std::string& state_dtype,
                            const std::string& weight_dtype, bool sparse,
                            const std::optional<NamedSizes>& layout_form,
                            const std::string& not_laid_out, int64_t directions, int64_t loops,
                            int multiprocessors, int64_t shared_bytes) {
  if (std::min({products, states, hidden, directions, loops}) < 1 || loops > directions ||
      std::min({inputs, outputs, batch, length}) < 0) {
    throw nb::value_error("the sizes of a scan are out of range");
  }
  ScanForm scan{products,
                states,
                inputs,
                outputs,
                hidden,
                batch,
                length,
                ScanDTypeOf(state_dtype),
                ScanDTypeOf(weight_dtype),
                sparse,
                std::nullopt,
                not_laid_out,
                directions,
                loops};
  if (layout_form) scan.layout_form = FormOf(*layout_form);
  const Gpu gpu{.multiprocessors = multiprocessors, .shared_bytes = shared_bytes};
  const ScanChoice choice = PlanScan(scan, gpu, variant);
  return nb::make_tuple(Described(choice.best), choice.reason, choice.most_batch,
                        choice.loop_microseconds);
}

using SkipOfWave = std::tuple<int, int>;        // (state of a lower layer, product)
using MeanOfWave = std::tuple<int, bool, int>;  // (state of the layer below, is squared, product)

// (the best plan or None, why there is none), of layers in one launch. The matrices' products and
// states are sets of bits.
nb::tuple PlanDescribedWave(const std::string& variant, int64_t layers, int64_t products,
                            int64_t states, int own_products, int own_states, int below_products,
                            int below_states, const std::optional<SkipOfWave>& skip,
                            const std::vector<MeanOfWave>& means, bool scales, int64_t inputs,
                            int64_t outputs, int64_t hidden, int64_t batch, int64_t length,
                            const std::string& state_dtype, const std::string& weight_dtype,
                            int compute_capability, int multiprocessors, int64_t shared_bytes) {
  const auto is_set = [](int bits, int64_t of) { return bits > 0 && bits < int64_t{1} << of; };
  if (std::min({layers, products, states, hidden}) < 1 ||
      std::min({inputs, outputs, batch, length}) < 0 ||
      std::max(products, states) > kMaxScanArrays || !is_set(own_products, products) ||
      !is_set(below_products, products) || !is_set(own_states, states) ||
      !is_set(below_states, states) || means.size() > kMaxWaveMeans || (scales && means.empty())) {
    throw nb::value_error("the sizes of a wave are out of range");
  }
  const auto joins = [&](int state, int product) {
    if (state < 0 || state >= states || product < 0 || product >= products) {
      throw nb::value_error("a skip or a mean of a wave is out of range");
    }
  };
  WaveForm wave;
  if (skip) {
    const auto [state, product] = *skip;
    joins(state, product);
    wave.skip = {product, state};
  }
  for (size_t i = 0; i < means.size(); ++i) {
    const auto [state, squared, product] = means[i];
    joins(state, product);
    wave.means[i] = {product, state, squared};
  }
  wave.scales = scales;
  wave.products = products;
  wave.state_parts = states;
  wave.inputs = inputs;
  wave.outputs = outputs;
  wave.hidden = hidden;
  wave.batch = batch;
  wave.length = length;
  wave.state_dtype = ScanDTypeOf(state_dtype);
  wave.weight_dtype = ScanDTypeOf(weight_dtype);
  wave.layers = layers;
  wave.own_products = own_products;
  wave.own_states = own_states;
  wave.below_products = below_products;
  wave.below_states = below_states;
  const Gpu gpu{compute_capability, multiprocessors, shared_bytes};
  const ScanChoice choice = PlanWave(wave, gpu, variant);
  return nb::make_tuple(Described(choice.best), choice.reason);
}

}  // namespace

void BindRecurrentScan(nb::module_& m) {
  m.def("take_scan_failures", TakeScanFailures, nb::call_guard<nb::gil_scoped_release>());
  m.def("plan_sparse_layout", PlanDescribedLayout, nb::kw_only(), nb::arg("products"),
        nb::arg("state_parts"), nb::arg("hidden"), nb::arg("nnz"), nb::arg("batch"),
        nb::arg("state_bytes"), nb::arg("multiprocessors"));
  m.def("lay_out_sparse", LayOutSparse, nb::arg("row_offsets"), nb::arg("column_indices"),
        nb::arg("permutation"), nb::kw_only(), nb::arg("hidden"), nb::arg("products"),
        nb::arg("state_parts"), nb::arg("blocks"), nb::arg("cluster"), nb::arg("most_threads"),
        nb::arg("fewest_threads"), nb::arg("entries"), nb::arg("group"), nb::arg("piece_bytes"),
        nb::arg("bank_aware"));
  m.def("sizes_of_layout", SizesOfLayout, nb::arg("form"));
  m.def("widest_piece", WidestPiece, nb::arg("batch"), nb::arg("state_bytes"));
  m.def("most_pairs_batch", MostPairsBatch, nb::arg("state_bytes"));
  m.def("scan_variants", ScanVariants);
  m.def("plan_scan", PlanDescribedScan, nb::arg("variant"), nb::kw_only(), nb::arg("products"),
        nb::arg("states"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("hidden"),
        nb::arg("batch"), nb::arg("length"), nb::arg("state_dtype"), nb::arg("weight_dtype"),
        nb::arg("sparse"), nb::arg("layout_form").none(), nb::arg("not_laid_out"),
        nb::arg("directions"), nb::arg("loops"), nb::arg("multiprocessors"),
        nb::arg("shared_bytes"));
  m.def("plan_wave", PlanDescribedWave, nb::arg("variant"), nb::kw_only(), nb::arg("layers"),
        nb::arg("products"), nb::arg("states"), nb::arg("own_products"), nb::arg("own_states"),
        nb::arg("below_products"), nb::arg("below_states"), nb::arg("skip").none(),
        nb::arg("means"), nb::arg("scales"), nb::arg("inputs"), nb::arg("outputs"),
        nb::arg("hidden"), nb::arg("batch"), nb::arg("length"), nb::arg("state_dtype"),
        nb::arg("weight_dtype"), nb::arg("compute_capability"), nb::arg("multiprocessors"),
        nb::arg("shared_bytes"));
  m.attr("WAVE_VARIANTS") = WaveVariants();
  m.attr("WAVE_MOST_MEANS") = kMaxWaveMeans;
  m.attr("WAVE_MMA_MOST_ROWS") = kMostRowsOfMma;
  m.attr("SCAN_DTYPES") = ScanDTypes();
  m.attr("SCAN_MOST_ARRAYS") = kMaxScanArrays;
}

}  // namespace jaxsparse
