// The extension module: FFI targets, the tables of variants, and the device compiler.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <stdexcept>

#include "cpu/isa.h"
#include "cuda/row_cuts.h"
#include "dynamic/bindings.h"
#include "dynamic/team_bindings.h"
#include "host/preparation.h"
#include "host/registry.h"
#include "nvrtc/compiler.h"
#include "nvrtc/disk_cache.h"
#include "nvrtc/kernel.h"
#include "packed/bindings.h"
#include "recurrent/bindings.h"

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
  if (entry.cuda_execute != nullptr) {
    cuda["initialize"] = Capsule(entry.cuda_initialize);
    cuda["execute"] = Capsule(entry.cuda_execute);
    targets["cuda"] = cuda;
  }
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
  static const auto* entries = new std::vector<OperationEntry>{SpmmEntry(),
                                                               SddmmEntry(),
                                                               SparseSoftmaxEntry(),
                                                               ReduceRowsEntry(),
                                                               AttentionEntry(),
                                                               PagedAttentionEntry(),
                                                               AttentionTangentEntry(),
                                                               AttentionCotangentEntry(),
                                                               CheckTopologyEntry(),
                                                               DepthwiseEntry(),
                                                               DepthwiseInputEntry(),
                                                               DepthwiseKernelEntry(),
                                                               PackedProductEntry(),
                                                               PackedUnpackEntry(),
                                                               RecurrentScanEntry(),
                                                               RecurrentWaveEntry(),
                                                               DynamicScanEntry(),
                                                               DynamicLossEntry()};
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
  if (entry.choose_on_cpu == nullptr) {
    throw nb::value_error((operation + " has no variants for CPUs").c_str());
  }
  return Chosen(
      entry.choose_on_cpu({std::move(operands), std::move(results), std::move(attributes)}));
}

Gpu GpuWith(int compute_capability, int multiprocessors, int64_t shared_bytes) {
  if (multiprocessors < 1) throw nb::value_error("a GPU has at least one multiprocessor");
  return {compute_capability, multiprocessors, shared_bytes};
}

nb::tuple ChooseCudaVariant(const std::string& operation, BufferTypes operands, BufferTypes results,
                            Attributes attributes, int compute_capability, int multiprocessors,
                            int64_t shared_bytes) {
  const OperationEntry& entry = EntryWithTable(operation);
  return Chosen(
      entry.choose_on_cuda({std::move(operands), std::move(results), std::move(attributes)},
                           GpuWith(compute_capability, multiprocessors, shared_bytes)));
}

// [(file, expression, text)] of the kernels that the chosen variant has compiled, as CompileKernel
// takes them.
nb::list KernelsOnCuda(const std::string& operation, BufferTypes operands, BufferTypes results,
                       Attributes attributes, int compute_capability, int multiprocessors,
                       int64_t shared_bytes) {
  const OperationEntry& entry = EntryWithTable(operation);
  std::string error;
  const std::vector<KernelSource> chosen =
      entry.kernels_on_cuda({std::move(operands), std::move(results), std::move(attributes)},
                            GpuWith(compute_capability, multiprocessors, shared_bytes), &error);
  if (!error.empty()) throw nb::value_error(error.c_str());
  nb::list kernels;
  for (const KernelSource& kernel : chosen) {
    kernels.append(nb::make_tuple(kernel.file, kernel.expression, kernel.text));
  }
  return kernels;
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

// (tiles down, tiles across + 1, rows of a tile), or (NO_TILE_STARTS,) where none come with such a
// pattern.
nb::tuple ShapeOfTileStarts(int64_t rows, int64_t columns, int64_t nse) {
  if (!ComesWithTileStarts(rows, columns, nse)) return nb::make_tuple(kNoTileStarts);
  const TileStarts starts(rows, columns);
  return nb::make_tuple(starts.down, starts.across + 1, kTileSize);
}

// Into how many units the rows of such a pattern are cut; 0 if no cuts come with it.
int64_t UnitsOfRows(int64_t rows, int64_t columns, int64_t nse) {
  return ComesWithRowCuts(rows, columns, nse) ? RowUnits(rows, nse) : 0;
}

nb::bytes CompileKernel(const std::string& file, const std::string& expression,
                        const std::string& architecture, const std::string& text) {
  std::string error;
  const auto kernel = CompileCached({file, expression, text}, architecture, &error);
  if (!kernel) throw std::runtime_error(error);
  return nb::bytes(kernel->code.data(), kernel->code.size());
}

void LoadKernelAnew(const std::string& file, const std::string& expression, const std::string& text,
                    int device) {
  std::string error;
  if (LoadKernel({file, expression, text}, device, &error) == nullptr) {
    throw std::runtime_error(error);
  }
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

}  // namespace

NB_MODULE(_ffi, m) {
  m.def("operations", Operations);
  m.def("choose_cpu_variant", ChooseCpuVariant, nb::arg("operation"), nb::arg("operands"),
        nb::arg("results"), nb::arg("attributes"));
  m.def("choose_cuda_variant", ChooseCudaVariant, nb::arg("operation"), nb::arg("operands"),
        nb::arg("results"), nb::arg("attributes"), nb::kw_only(), nb::arg("compute_capability"),
        nb::arg("multiprocessors"), nb::arg("shared_bytes"));
  m.def("kernels_on_cuda", KernelsOnCuda, nb::arg("operation"), nb::arg("operands"),
        nb::arg("results"), nb::arg("attributes"), nb::kw_only(), nb::arg("compute_capability"),
        nb::arg("multiprocessors"), nb::arg("shared_bytes"));
  m.def("workspace_bytes", WorkspaceBytes, nb::arg("operation"), nb::arg("operands"),
        nb::arg("results"), nb::arg("attributes"));
  m.def("tile_starts_shape", ShapeOfTileStarts, nb::arg("rows"), nb::arg("columns"),
        nb::arg("nse"));
  m.attr("NO_TILE_STARTS") = kNoTileStarts;
  m.def("row_units", UnitsOfRows, nb::arg("rows"), nb::arg("columns"), nb::arg("nse"));
  m.attr("PLACES_OF_UNIT") = kPlacesOfUnit;
  m.attr("PLACES_OF_ROW") = kPlacesOfRow;
  m.attr("MOST_OF_WHOLE_ROW") = kMostOfWholeRow;
  m.def("cpu_isa", [] { return std::string(IsaName(CurrentIsa())); });
  m.def("configure_compiler", ConfigureCompiler, nb::arg("source_folder"), nb::arg("libraries"));
  m.def("compile_kernel", CompileKernel, nb::arg("file"), nb::arg("expression"),
        nb::arg("architecture"), nb::arg("text") = "");
  m.def("load_kernel", LoadKernelAnew, nb::arg("file"), nb::arg("expression"), nb::arg("text"),
        nb::arg("device") = 0, nb::call_guard<nb::gil_scoped_release>());
  m.def("nvrtc_version", VersionOfNvrtc);
  m.def("cuda_devices", DevicesOfCuda);
  m.def("architecture_name", ArchitectureName, nb::arg("compute_capability"));
  m.def("cache_folder", CacheFolder);
  m.def("cache_limit", CacheLimit);
  BindRecurrentScan(m);
  BindDynamic(m);
  BindTeams(m);
  BindPacked(m);
}

}  // namespace jaxsparse
