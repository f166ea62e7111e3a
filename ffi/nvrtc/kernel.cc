#include "nvrtc/kernel.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <tuple>

#include "nvrtc/disk_cache.h"

namespace jaxsparse {
namespace {

std::string Describe(const char* what, cudaError_t status) {
  return std::string(what) + ": " + cudaGetErrorString(status);
}

// XLA's thread may have another device current; it gets it back.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device) : wanted_(device) {
    cudaGetDevice(&previous_);
    if (previous_ != wanted_) cudaSetDevice(wanted_);
  }
  ~ScopedDevice() {
    if (previous_ != wanted_) cudaSetDevice(previous_);
  }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int wanted_;
  int previous_ = 0;
};

int ComputeCapability(int device) {
  int major = 0, minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return major * 10 + minor;
}

const void* Load(const KernelSource& source, int device, std::string* error) {
  const std::string architecture = ArchitectureName(ComputeCapability(device));
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
  return kernel;  // the library stays loaded for as long as the process lives
}

}  // namespace

const void* GetKernel(const KernelSource& source, int device, std::string* error) {
  static std::mutex mutex;
  static auto* kernels = new std::map<std::tuple<std::string, std::string, int>, const void*>;
  const std::lock_guard lock(mutex);
  const auto key = std::make_tuple(source.file, source.expression, device);
  if (const auto found = kernels->find(key); found != kernels->end()) return found->second;
  const void* kernel = Load(source, device, error);
  if (kernel != nullptr) (*kernels)[key] = kernel;
  return kernel;
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
  void* arguments[] = {problem};
  const cudaError_t status = cudaLaunchKernelExC(&config, kernel, arguments);
  return status == cudaSuccess ? "" : Describe("launch", status);
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
    devices.push_back({properties.name, ComputeCapability(device)});
  }
  return devices;
}

std::string ArchitectureName(int compute_capability) {
  std::string name = "sm_" + std::to_string(compute_capability);
  if (compute_capability >= 90) name += 'a';
  return name;
}

}  // namespace jaxsparse
