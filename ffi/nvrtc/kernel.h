// Device code compiled at first use for the GPU that runs it, kept in memory and on disk.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "types.h"

namespace jaxsparse {

// One instance of a kernel template: a file below the folder of device sources, and a C++
// expression that names the instance. Where `text` is not empty it stands in for the file's: source
// that was written for one problem, which includes files of that folder.
struct KernelSource {
  std::string file;
  std::string expression;
  std::string text = "";
};

struct LaunchShape {
  int64_t blocks =
      0;  // along x only, whose limit is 2^31 - 1; kernels stride over what lies beyond
  int threads = 0;
  int64_t shared_bytes = 0;  // dynamic, for each block
  int cluster = 1;           // blocks
  // All blocks run at once, or the launch fails: for kernels whose blocks wait for one another.
  bool cooperative = false;
  // May begin before the kernel in front of it is done, for which it waits itself; from compute
  // capability 9.0 on, and unless a driver refuses it.
  bool overlaps = false;
};

// The clock rate of an H200, for which costs are predicted.
constexpr double kClocksOfMicrosecond = 1755;

// Loads a kernel for a device (a cudaKernel_t) as its first use does: from the cache on disk, or
// compiled. Null with the reason in `error`.
const void* LoadKernel(const KernelSource& source, int device, std::string* error);

// The same, loaded once.
const void* GetKernel(const KernelSource& source, int device, std::string* error);

// More a kernel can take since driver 530 and CUDA 12.1 only.
constexpr size_t kMostArgumentBytes = 4096;

// Launches on `stream`; returns the reason of a failure, or an empty string.
std::string LaunchKernel(const void* kernel, const LaunchShape& shape, void* problem, int device,
                         void* stream);

// XLA's thread may have another device current; it gets it back.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device);
  ~ScopedDevice();
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int wanted_;
  int previous_ = 0;
};

// Of a device; what the driver does not say is as on the default one. Once it has said all it is
// not asked again: every execution wants to know.
Gpu GpuOf(int device);

struct CudaDevice {
  std::string name;
  Gpu gpu;
};

// The GPUs the driver shows; `error` says why there are none.
std::vector<CudaDevice> CudaDevices(std::string* error);

// "sm_90a" for compute capability 9.0: kernels may use what only that generation has.
std::string ArchitectureName(int compute_capability);

}  // namespace jaxsparse
