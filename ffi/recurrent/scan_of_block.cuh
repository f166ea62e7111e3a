// Which scan a block works for, and where that lies in the arrays of a call. Each scan of a launch
// has kBlocks blocks in a row. What the plan knows takes no instruction: a call of one scan has all
// its arrays at their beginnings.
//
// Plan, of any scan:
//   kScans, kBlocks   scans of a launch, and blocks of each
//   kLayers           of a wave, which have as many scans, and problems of their own; or 1
//   kGroups           parts of the batch
//   kLaunches         of a call
#pragma once

#include "cuda/device.cuh"
#include "recurrent/problem.h"

namespace jaxsparse {

template <typename Plan>
__device__ __forceinline__ int ScanOfLaunch() {
  if constexpr (Plan::kScans == 1) return 0;
  const int scan = static_cast<int>(blockIdx.x / Plan::kBlocks);
  return Plan::kLayers == 1 ? scan : scan % Plan::kScans;
}
template <typename Plan>
__device__ __forceinline__ int BlockOfScan() {
  constexpr bool kAlone = Plan::kScans == 1 && Plan::kLayers == 1;
  return static_cast<int>(kAlone ? blockIdx.x : blockIdx.x % Plan::kBlocks);
}
template <typename Plan>
__device__ __forceinline__ int LayerOfBlock() {
  return static_cast<int>(Plan::kLayers == 1 ? 0 : blockIdx.x / (Plan::kScans * Plan::kBlocks));
}
template <typename Plan>
__device__ __forceinline__ int ScanOfCall(const RecurrentScanProblem& p) {
  return (Plan::kLaunches == 1 ? 0 : p.first_scan) + ScanOfLaunch<Plan>();
}

template <typename Plan>
__device__ __forceinline__ int64_t DirectionOf(const RecurrentScanProblem& p) {
  return ScanOfCall<Plan>(p) / Plan::kGroups;
}
// The batch entry that is the first of this scan's part.
template <typename Plan>
__device__ __forceinline__ int64_t FirstRowOf(const RecurrentScanProblem& p) {
  return Plan::kGroups == 1 ? 0 : ScanOfCall<Plan>(p) % Plan::kGroups * (p.batch / Plan::kGroups);
}
// Among the batch entries of all directions, that with number `b` of this scan.
template <typename Plan>
__device__ __forceinline__ int64_t RowOf(const RecurrentScanProblem& p, int64_t b) {
  return DirectionOf<Plan>(p) * p.batch + FirstRowOf<Plan>(p) + b;
}

template <typename Plan>
__device__ __forceinline__ bool IsReversed(const RecurrentScanProblem& p) {
  const int scan = ScanOfLaunch<Plan>();
  return (p.reversed[scan / 32] >> scan % 32 & 1) != 0;
}

template <typename Plan>
__device__ __forceinline__ void* ExchangeOf(const RecurrentScanProblem& p) {
  return static_cast<char*>(p.exchange) + ScanOfLaunch<Plan>() * p.exchange_bytes;
}
template <typename Plan>
__device__ __forceinline__ uint32_t* ArrivalsOf(const RecurrentScanProblem& p) {
  constexpr int kWords = kScanFlagBytes / sizeof(uint32_t);
  return p.arrivals + ScanOfLaunch<Plan>() * kWords;
}

}  // namespace jaxsparse
