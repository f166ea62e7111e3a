#include "nvrtc/kernel.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>
#include <tuple>

#include "nvrtc/disk_cache.h"

namespace jaxsparse {
namespace {

std::string Describe(const char* what, cudaError_t status) {
  return std::string(what) + ": " + cudaGetErrorString(status);
}

// A kernel on a device. Its own lock is held while it is made, so that other kernels launch
// meanwhile.
struct Entry {
  std::mutex mutex;
  const void* kernel = nullptr;
};

Entry& EntryOf(const KernelSource& source, int device) {
  static std::mutex mutex;
  static auto* entries =
      new std::map<std::tuple<std::string, std::string, std::string, int>, Entry>;
  const std::lock_guard lock(mutex);
  return (*entries)[std::make_tuple(source.file, source.expression, source.text, device)];
}

// Whether the driver says all; what it does not say stays as it is in `gpu`.
bool AskForGpu(int device, Gpu* gpu) {
  const auto ask = [&](cudaDeviceAttr attribute, int* value) {
    return cudaDeviceGetAttribute(value, attribute, device) == cudaSuccess;
  };
  int major = 0, minor = 0, multiprocessors = 0, shared_bytes = 0;
  const bool capability_known = ask(cudaDevAttrComputeCapabilityMajor, &major) &&
                                ask(cudaDevAttrComputeCapabilityMinor, &minor);
  const bool multiprocessors_known = ask(cudaDevAttrMultiProcessorCount, &multiprocessors);
  const bool shared_known = ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, &shared_bytes);
  if (capability_known) gpu->compute_capability = major * 10 + minor;
  if (multiprocessors_known) gpu->multiprocessors = multiprocessors;
  if (shared_known) gpu->shared_bytes = shared_bytes;
  return capability_known && multiprocessors_known && shared_known;
}

}  // namespace

ScopedDevice::ScopedDevice(int device) : wanted_(device) {
  cudaGetDevice(&previous_);
  if (previous_ != wanted_) cudaSetDevice(wanted_);
}

ScopedDevice::~ScopedDevice() {
  if (previous_ != wanted_) cudaSetDevice(previous_);
}

const void* LoadKernel(const KernelSource& source, int device, std::string* error) {
  const std::string architecture = ArchitectureName(GpuOf(device).compute_capability);
  const std::optional<CompiledKernel> compiled = CompileCached(source, architecture, error);
  if (!compiled) return nullptr;
  const ScopedDevice scoped(device);
  cudaLibrary_t library = nullptr;
  cudaError_t status = cudaLibraryLoadData(&library, compiled->code.data(), nullptr, nullptr, 0,
                                           nullptr, nullptr, 0);
  cudaKernel_t kernel = nullptr;
  if (status == cudaSuccess) {
    status = cudaLibraryGetKernel(&kernel, library, compiled->lowered_name.c_str());
  }
  if (status != cudaSuccess) {
    *error = Describe(("loading " + source.expression).c_str(), status);
    return nullptr;
  }
  // Asking for attributes loads the code now: the first launch, which may be captured in a graph or
  // run beside a kernel that waits for another, must not.
  cudaFuncAttributes attributes;
  status = cudaFuncGetAttributes(&attributes, kernel);
  if (status != cudaSuccess) {
    *error = Describe(("loading " + source.expression).c_str(), status);
    return nullptr;
  }
  return kernel;  // the library stays loaded for as long as the process lives
}

const void* GetKernel(const KernelSource& source, int device, std::string* error) {
  Entry& entry = EntryOf(source, device);
  const std::lock_guard lock(entry.mutex);
  if (entry.kernel == nullptr) entry.kernel = LoadKernel(source, device, error);
  return entry.kernel;
}

std::string LaunchKernel(const void* kernel, const LaunchShape& shape, void* problem, int device,
                         void* stream) {
  const ScopedDevice scoped(device);
  constexpr int64_t kMaxBlocks = (int64_t{1} << 31) - 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(shape.blocks < kMaxBlocks ? shape.blocks : kMaxBlocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.stream = static_cast<cudaStream_t>(stream);
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  cudaLaunchAttribute attributes[3] = {};
  config.attrs = attributes;
  if (shape.cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
  }
  constexpr int kOverlapsSince = 90;  // the compute capability
  static std::atomic<bool> refused_with_cooperative = false;
  const bool overlaps = shape.overlaps && GpuOf(device).compute_capability >= kOverlapsSince &&
                        !(shape.cooperative && refused_with_cooperative);
  if (overlaps) {  // the last one, so that it may be left out
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  // Dynamic and static shared memory have 48 KiB together; no kernel has as much as 16 of the
  // latter.
  constexpr int64_t kSharedWithoutAsking = 32 << 10;
  cudaError_t status = cudaSuccess;
  if (shape.shared_bytes > kSharedWithoutAsking) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shape.shared_bytes));
  }
  void* arguments[] = {problem};
  if (status == cudaSuccess) status = cudaLaunchKernelExC(&config, kernel, arguments);
  // The documentation does not say whether a kernel may be both.
  if (status != cudaSuccess && overlaps && shape.cooperative) {
    --config.numAttrs;
    if (cudaLaunchKernelExC(&config, kernel, arguments) == cudaSuccess) {
      cudaGetLastError();  // leave no error behind for the next caller on this thread
      refused_with_cooperative = true;
      status = cudaSuccess;
    }
  }
  return status == cudaSuccess ? "" : Describe("launch", status);
}

Gpu GpuOf(int device) {
  static std::mutex mutex;
  static auto* gpus = new std::map<int, Gpu>;
  const std::lock_guard lock(mutex);
  if (const auto found = gpus->find(device); found != gpus->end()) return found->second;
  Gpu gpu;
  if (AskForGpu(device, &gpu)) gpus->emplace(device, gpu);
  return gpu;
}

std::vector<CudaDevice> CudaDevices(std::string* error) {
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess) {
    *error = cudaGetErrorString(status);
    cudaGetLastError();  // leave no error behind for the next caller on this thread
    return {};
  }
  std::vector<CudaDevice> devices;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    devices.push_back({properties.name, GpuOf(device)});
  }
  return devices;
}

std::string ArchitectureName(int compute_capability) {
  std::string name = "sm_" + std::to_string(compute_capability);
  if (compute_capability >= 90) name += 'a';
  return name;
}

}  // namespace jaxsparse
