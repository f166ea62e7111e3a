// Which scan of a launch a block works for. Each scan of a plan has kBlocks blocks in a row.
#pragma once

#include "cuda/device.cuh"
#include "recurrent/problem.h"

namespace jaxsparse {

template <typename Plan>
__device__ __forceinline__ const RecurrentScanProblem& ScanOfBlock(
    const RecurrentScans<Plan::kScans>& scans) {
  return scans.scan[Plan::kScans == 1 ? 0 : blockIdx.x / Plan::kBlocks];
}
template <typename Plan>
__device__ __forceinline__ int BlockOfScan() {
  return static_cast<int>(Plan::kScans == 1 ? blockIdx.x : blockIdx.x % Plan::kBlocks);
}

}  // namespace jaxsparse
