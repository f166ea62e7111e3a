#include "persistent/failures.h"

#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>

#include "nvrtc/kernel.h"

namespace jaxsparse {
namespace {

std::mutex& Mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// By device. The words are never freed: a kernel may write one at any time.
std::map<int, uint32_t*>& Words() {
  static auto* words = new std::map<int, uint32_t*>;
  return *words;
}

bool Take(uint32_t* word) { return std::atomic_ref<uint32_t>(*word).exchange(0) != 0; }

}  // namespace

uint32_t* FailureWord(int device, std::string* error) {
  const std::lock_guard lock(Mutex());
  if (const auto it = Words().find(device); it != Words().end()) return it->second;
  const ScopedDevice scoped(device);
  void* word = nullptr;
  const cudaError_t status =
      cudaHostAlloc(&word, sizeof(uint32_t), cudaHostAllocMapped | cudaHostAllocPortable);
  if (status != cudaSuccess) {
    *error = std::string("allocating a word of host memory: ") + cudaGetErrorString(status);
    return nullptr;
  }
  *static_cast<uint32_t*>(word) = 0;
  return Words()[device] = static_cast<uint32_t*>(word);
}

bool TakeFailure(int device) {
  const std::lock_guard lock(Mutex());
  const auto it = Words().find(device);
  return it != Words().end() && Take(it->second);
}

std::vector<int> WaitForFailures(std::string* error) {
  std::map<int, uint32_t*> words;
  {
    const std::lock_guard lock(Mutex());
    words = Words();
  }
  std::vector<int> failed;
  for (const auto& [device, word] : words) {
    const ScopedDevice scoped(device);
    if (const cudaError_t status = cudaDeviceSynchronize(); status != cudaSuccess) {
      *error = cudaGetErrorString(status);
    }
    if (Take(word)) failed.push_back(device);
  }
  return failed;
}

}  // namespace jaxsparse
