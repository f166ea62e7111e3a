// The extension module: FFI targets, the tables of variants, and the device compiler.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "cpu/isa.h"
#include "host/registry.h"
#include "nvrtc/compiler.h"
#include "nvrtc/disk_cache.h"
#include "persistent/failures.h"
#include "recurrent/problem.h"
#include "recurrent/sparse_layout.h"

namespace nb = nanobind;

namespace jaxsparse {
namespace {

nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// {"name": ..., "targets": {platform: {stage: capsule}}, "variants": {...}, "kernels": [...]}
nb::dict Describe(const OperationEntry& entry) {
  nb::dict cuda, targets, variants, operation;
  if (entry.cpu != nullptr) {
    nb::dict cpu;
    cpu["execute"] = Capsule(entry.cpu);
    targets["cpu"] = cpu;
  }
  cuda["initialize"] = Capsule(entry.cuda_initialize);
  cuda["execute"] = Capsule(entry.cuda_execute);
  targets["cuda"] = cuda;
  variants["cpu"] = entry.cpu_variants;
  variants["cuda"] = entry.cuda_variants;
  nb::list kernels;
  for (const KernelSource& kernel : entry.kernels) {
    kernels.append(nb::make_tuple(kernel.file, kernel.expression));
  }
  operation["name"] = entry.name;
  operation["targets"] = targets;
  operation["variants"] = variants;
  operation["kernels"] = kernels;
  return operation;
}

const std::vector<OperationEntry>& Entries() {
  static const auto* entries = new std::vector<OperationEntry>{
      SpmmEntry(), SddmmEntry(), SparseSoftmaxEntry(), CheckTopologyEntry(), RecurrentScanEntry()};
  return *entries;
}

nb::list Operations() {
  nb::list operations;
  for (const OperationEntry& entry : Entries()) operations.append(Describe(entry));
  return operations;
}

using BufferTypes = std::vector<BufferType>;
using Attributes = std::map<std::string, AttributeValue>;

const OperationEntry& EntryWithTable(const std::string& operation) {
  const auto& entries = Entries();
  const auto entry = std::find_if(entries.begin(), entries.end(),
                                  [&](const OperationEntry& e) { return e.name == operation; });
  if (entry == entries.end() || entry->choose_on_cuda == nullptr) {
    throw nb::value_error((operation + " has no table of variants to choose from").c_str());
  }
  return *entry;
}

// (the variant that a call takes, [(name, cost)] of all that fit), or a ValueError that says why
// there is none.
nb::tuple Chosen(const VariantChoice& choice) {
  if (!choice.error.empty()) throw nb::value_error(choice.error.c_str());
  nb::list fitting;
  for (const Candidate& candidate : choice.fitting) {
    fitting.append(nb::make_tuple(candidate.name, candidate.cost));
  }
  return nb::make_tuple(choice.chosen, fitting);
}

nb::tuple ChooseCpuVariant(const std::string& operation, BufferTypes operands, BufferTypes results,
                           Attributes attributes) {
  const OperationEntry& entry = EntryWithTable(operation);
  return Chosen(
      entry.choose_on_cpu({std::move(operands), std::move(results), std::move(attributes)}));
}

nb::tuple ChooseCudaVariant(const std::string& operation, BufferTypes operands, BufferTypes results,
                            Attributes attributes, int compute_capability, int multiprocessors,
                            int64_t shared_bytes) {
  const OperationEntry& entry = EntryWithTable(operation);
  if (multiprocessors < 1) throw nb::value_error("a GPU has at least one multiprocessor");
  return Chosen(
      entry.choose_on_cuda({std::move(operands), std::move(results), std::move(attributes)},
                           {compute_capability, multiprocessors, shared_bytes}));
}

int64_t WorkspaceBytes(const std::string& operation, BufferTypes operands, BufferTypes results,
                       Attributes attributes) {
  const OperationEntry& entry = EntryWithTable(operation);
  std::string error;
  const int64_t bytes = entry.workspace_on_cuda(
      {std::move(operands), std::move(results), std::move(attributes)}, &error);
  if (bytes < 0) throw nb::value_error(error.c_str());
  return bytes;
}

nb::bytes CompileKernel(const std::string& file, const std::string& expression,
                        const std::string& architecture, const std::string& text) {
  std::string error;
  const auto kernel = CompileCached({file, expression, text}, architecture, &error);
  if (!kernel) throw std::runtime_error(error);
  return nb::bytes(kernel->code.data(), kernel->code.size());
}

std::string VersionOfNvrtc() {
  std::string error;
  const std::string version = NvrtcVersion(&error);
  if (version.empty()) throw std::runtime_error(error);
  return version;
}

// [(name, compute capability, multiprocessors, bytes of shared memory that a block can have)], or
// an error that says why the driver shows no GPU.
nb::list DevicesOfCuda() {
  std::string error;
  nb::list devices;
  for (const CudaDevice& device : CudaDevices(&error)) {
    devices.append(nb::make_tuple(device.name, device.gpu.compute_capability,
                                  device.gpu.multiprocessors, device.gpu.shared_bytes));
  }
  if (!error.empty()) throw std::runtime_error(error);
  return devices;
}

// The GPUs on which a recurrent scan has given up since this was last asked; waits for them all.
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
  nb::dict result;
  result["units"] = layout->shape.units;
  result["threads"] = layout->shape.threads;
  result["lanes"] = layout->shape.lanes;
  result["partial_sums"] = layout->partial_sums;
  result["row_sums"] = layout->row_sums;
  result["wavefronts"] = layout->wavefronts;
  result["filling"] = layout->filling;
  result["words"] = nb::bytes(reinterpret_cast<const char*>(layout->words.data()),
                              layout->words.size() * sizeof(uint32_t));
  return result;
}

}  // namespace

NB_MODULE(_ffi, m) {
  m.def("operations", Operations);
  m.def("choose_cpu_variant", ChooseCpuVariant, nb::arg("operation"), nb::arg("operands"),
        nb::arg("results"), nb::arg("attributes"));
  m.def("choose_cuda_variant", ChooseCudaVariant, nb::arg("operation"), nb::arg("operands"),
        nb::arg("results"), nb::arg("attributes"), nb::kw_only(), nb::arg("compute_capability"),
        nb::arg("multiprocessors"), nb::arg("shared_bytes"));
  m.def("workspace_bytes", WorkspaceBytes, nb::arg("operation"), nb::arg("operands"),
        nb::arg("results"), nb::arg("attributes"));
  m.def("cpu_isa", [] { return std::string(IsaName(CurrentIsa())); });
  m.def("configure_compiler", ConfigureCompiler, nb::arg("source_folder"), nb::arg("libraries"));
  m.def("compile_kernel", CompileKernel, nb::arg("file"), nb::arg("expression"),
        nb::arg("architecture"), nb::arg("text") = "");
  m.def("nvrtc_version", VersionOfNvrtc);
  m.def("cuda_devices", DevicesOfCuda);
  m.def("take_scan_failures", TakeScanFailures, nb::call_guard<nb::gil_scoped_release>());
  m.def("lay_out_sparse", LayOutSparse, nb::arg("row_offsets"), nb::arg("column_indices"),
        nb::arg("permutation"), nb::kw_only(), nb::arg("hidden"), nb::arg("products"),
        nb::arg("state_parts"), nb::arg("blocks"), nb::arg("cluster"), nb::arg("most_threads"),
        nb::arg("fewest_threads"), nb::arg("entries"), nb::arg("group"), nb::arg("piece_bytes"),
        nb::arg("bank_aware"));
  m.def("architecture_name", ArchitectureName, nb::arg("compute_capability"));
  m.def("cache_folder", CacheFolder);
  m.def("cache_limit", CacheLimit);
  m.attr("SCAN_MOST_ARRAYS") = kMaxScanArrays;
  m.attr("SCANS_OF_LAUNCH") = kMaxScansOfLaunch;
  m.attr("SCAN_FLAG_BYTES") = kScanFlagBytes;
}

}  // namespace jaxsparse
