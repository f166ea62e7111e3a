// A GPU that launches nothing, but fills memory, which is the host's.
#pragma once

#include <algorithm>
#include <string>

#include "host/variant.h"
#include "nvrtc/kernel.h"
#include "nvrtc/tensor_map.h"
#include "persistent/failures.h"
#include "persistent/fill.h"

namespace jaxsparse {

constexpr char kKernel = 0, kFillKernel = 0;

const void* GetKernel(const KernelSource& source, int, std::string*) {
  return source.file == FillSource().file ? &kFillKernel : &kKernel;
}
std::string LaunchKernel(const void* kernel, const LaunchShape&, void* problem, int, void*) {
  if (kernel != &kFillKernel) return "";
  const auto& fill = *static_cast<const FillProblem*>(problem);
  const int32_t used_parts = fill.used_parts == nullptr ? 0 : *fill.used_parts;
  for (int i = 0; i < fill.count; ++i) {
    const FilledRegion& region = fill.regions[i];
    std::fill_n(static_cast<uint32_t*>(region.at), region.Words(used_parts), region.value);
  }
  return "";
}
Gpu GpuOf(int) { return {}; }
ScopedDevice::ScopedDevice(int device) : wanted_(device) {}
ScopedDevice::~ScopedDevice() {}
std::string EncodeTensorMap(const MatricesOfHalves&, TensorMap*, const TileOfHalves&) { return ""; }
std::string EncodeTensorMap(const ArrayOfHalves&, int, TensorMap*) { return ""; }
uint32_t* FailureWord(int, std::string*) {
  static uint32_t word = 0;
  return &word;
}
bool TakeFailure(int) { return false; }

}  // namespace jaxsparse
