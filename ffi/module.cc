// The extension module: FFI targets, the tables of variants, and the device compiler.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "common/isa.h"
#include "common/registry.h"
#include "nvrtc/compiler.h"
#include "nvrtc/disk_cache.h"
#include "recurrent/failures.h"

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

nb::list Operations() {
  nb::list operations;
  for (const auto entry :
       {SpmmEntry, SddmmEntry, SparseSoftmaxEntry, CheckTopologyEntry, RecurrentScanEntry}) {
    operations.append(Describe(entry()));
  }
  return operations;
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
    devices.append(nb::make_tuple(device.name, device.compute_capability, device.multiprocessors,
                                  device.shared_bytes));
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

}  // namespace

NB_MODULE(_ffi, m) {
  m.def("operations", Operations);
  m.def("cpu_isa", [] { return std::string(IsaName(CurrentIsa())); });
  m.def("configure_compiler", ConfigureCompiler, nb::arg("source_folder"), nb::arg("libraries"));
  m.def("compile_kernel", CompileKernel, nb::arg("file"), nb::arg("expression"),
        nb::arg("architecture"), nb::arg("text") = "");
  m.def("nvrtc_version", VersionOfNvrtc);
  m.def("cuda_devices", DevicesOfCuda);
  m.def("take_scan_failures", TakeScanFailures);
  m.def("architecture_name", ArchitectureName, nb::arg("compute_capability"));
  m.def("cache_folder", CacheFolder);
}

}  // namespace jaxsparse
