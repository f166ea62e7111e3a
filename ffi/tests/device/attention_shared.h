// Shared memory of attention's kernels on an emulated GPU, by the name that they know it by.
#pragma once

#include <cstring>

#include "emulated/gpu.h"

namespace jaxsparse {

constexpr int kMostShared = 232448;  // of a block
alignas(1024) unsigned char attention_shared[kMostShared];

// Runs a kernel whose blocks have so much of it, in which they find NaN, the first one last if
// `backwards`.
template <typename Kernel>
void LaunchShared(int shared_bytes, int64_t blocks, int threads, const Kernel& kernel,
                  bool backwards = false) {
  if (shared_bytes > kMostShared) emulated::Block::Fail("too much shared memory");
  std::memset(attention_shared, 0xff, sizeof(attention_shared));
  __asan_poison_memory_region(attention_shared + shared_bytes, kMostShared - shared_bytes);
  emulated::Launch(static_cast<int>(blocks), threads, kernel, backwards);
  __asan_unpoison_memory_region(attention_shared, kMostShared);
}

}  // namespace jaxsparse
