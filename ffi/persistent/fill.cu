// Fills regions of memory with a value each (fill_problem.h). All threads share every region, by
// stores of 16 bytes at multiples of 16, and of single words where a region begins or ends between.
// The next kernel may begin meanwhile.
#include "cuda/device.cuh"
#include "persistent/fill_problem.h"

namespace jaxsparse {

__global__ void __launch_bounds__(kFillThreads) FillRegions(const __grid_constant__ FillProblem p) {
  LetNextKernelBegin();
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int32_t used_parts = p.used_parts == nullptr ? 0 : *p.used_parts;
  for (int i = 0; i < p.count; ++i) {
    const FilledRegion& region = p.regions[i];
    const int64_t end = region.Words(used_parts);
    auto* words = static_cast<uint32_t*>(region.at);
    // Words from the last multiple of 16 bytes to the region.
    const auto before =
        static_cast<int64_t>(reinterpret_cast<uint64_t>(words) / sizeof(uint32_t) % kWordsOfFill);
    const uint32_t x = region.value;
    for (int64_t first = thread * kWordsOfFill - before; first < end;
         first += threads * kWordsOfFill) {
      if (first >= 0 && first + kWordsOfFill <= end) {
        *reinterpret_cast<Words4*>(words + first) = {x, x, x, x};
      } else {
        for (int64_t word = first; word < first + kWordsOfFill; ++word) {
          if (word >= 0 && word < end) words[word] = x;
        }
      }
    }
  }
}

}  // namespace jaxsparse
