#include "persistent/fill.h"

#include <algorithm>

namespace jaxsparse {
namespace {

// As many as run at once, so that the next kernel may begin: threads stride over what lies beyond.
// And no more than have so many turns: the next kernel begins on the other multiprocessors.
constexpr int64_t kMostBlocks = 256;
constexpr int64_t kLeastTurns = 2;

std::string Fill(FillProblem problem, int64_t words, int device, void* stream) {
  std::string reason;
  const void* kernel = GetKernel(FillSource(), device, &reason);
  if (kernel == nullptr) return reason;
  const int64_t blocks = CeilDivide(words, kFillThreads * kWordsOfFill * kLeastTurns);
  return LaunchKernel(kernel, {std::min(blocks, kMostBlocks), kFillThreads}, &problem, device,
                      stream);
}

}  // namespace

KernelSource FillSource() { return {"persistent/fill.cu", "jaxsparse::FillRegions"}; }

void AddRegion(void* at, int64_t bytes, uint32_t value, FillProblem* problem, int64_t part_bytes) {
  constexpr auto kWordBytes = int64_t{sizeof(uint32_t)};
  if (bytes == 0) return;
  problem->regions[problem->count++] = {at, bytes / kWordBytes, value, part_bytes / kWordBytes};
}

std::string LaunchFilled(const FillProblem& fill, const CudaLaunch& launch, void* problem) {
  int64_t words = 0;
  for (int i = 0; i < fill.count; ++i) words = std::max(words, fill.regions[i].words);
  LaunchShape shape = launch.shape;
  if (words > 0) {
    const std::string reason = Fill(fill, words, launch.device, launch.stream);
    if (!reason.empty()) return reason;
    shape.overlaps = true;
  }
  return LaunchKernel(launch.kernel, shape, problem, launch.device, launch.stream);
}

}  // namespace jaxsparse
