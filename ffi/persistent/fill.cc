#include "persistent/fill.h"

#include <algorithm>

namespace jaxsparse {
namespace {

// More would not store faster: threads stride over what lies beyond.
constexpr int64_t kMostBlocks = 1024;

}  // namespace

KernelSource FillSource() { return {"persistent/fill.cu", "jaxsparse::FillRegions"}; }

void AddRegion(void* at, int64_t bytes, uint32_t value, FillProblem* problem, int64_t part_bytes) {
  constexpr auto kWordBytes = int64_t{sizeof(uint32_t)};
  if (bytes == 0) return;
  problem->regions[problem->count++] = {at, bytes / kWordBytes, value, part_bytes / kWordBytes};
}

std::string Fill(const FillProblem& problem, int device, void* stream) {
  int64_t words = 0;
  for (int i = 0; i < problem.count; ++i) words = std::max(words, problem.regions[i].words);
  if (words == 0) return "";
  std::string reason;
  const void* kernel = GetKernel(FillSource(), device, &reason);
  if (kernel == nullptr) return reason;
  const int64_t blocks = CeilDivide(words, kFillThreads * kWordsOfFill);
  FillProblem p = problem;
  return LaunchKernel(kernel, {std::min(blocks, kMostBlocks), kFillThreads}, &p, device, stream);
}

}  // namespace jaxsparse
