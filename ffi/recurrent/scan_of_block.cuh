// Which scan a block works for, and where that lies in the arrays of a call. Each scan of a launch
// has kBlocks blocks in a row. What the plan knows takes no instruction: a call of one scan has all
// its arrays at their beginnings.
//
// Plan, of any scan:
//   kScans, kBlocks   scans of a launch, and blocks of each
//   kGroups           parts of the batch
//   kLaunches         of a call
#pragma once

#include "cuda/device.cuh"
#include "recurrent/problem.h"

namespace jaxsparse {

// Numbers are unsigned, so that their products with strides of 64 bits take no more than they must.
template <typename Plan>
__device__ __forceinline__ uint32_t ScanOfLaunch() {
  return Plan::kScans == 1 ? 0 : blockIdx.x / Plan::kBlocks;
}
template <typename Plan>
__device__ __forceinline__ int BlockOfScan() {
  return static_cast<int>(Plan::kScans == 1 ? blockIdx.x : blockIdx.x % Plan::kBlocks);
}
template <typename Plan>
__device__ __forceinline__ uint32_t ScanOfCall(const RecurrentScanProblem& p) {
  return (Plan::kLaunches == 1 ? 0 : p.first_scan) + ScanOfLaunch<Plan>();
}

template <typename Plan>
constexpr bool kOneDirection = Plan::kScans * Plan::kLaunches < 2 * Plan::kGroups;

template <typename Plan>
__device__ __forceinline__ uint32_t DirectionOf(const RecurrentScanProblem& p) {
  return kOneDirection<Plan> ? 0 : ScanOfCall<Plan>(p) / Plan::kGroups;
}
// The place in the whole batch of entry `b` of this scan's part.
template <typename Plan>
__device__ __forceinline__ uint32_t EntryOfBatch(const RecurrentScanProblem& p, int64_t b) {
  const uint32_t own = static_cast<uint32_t>(b);
  if constexpr (Plan::kGroups == 1) return own;
  const uint32_t scan = ScanOfCall<Plan>(p);
  return (kOneDirection<Plan> ? scan : scan % Plan::kGroups) * Plan::kSizes.batch + own;
}
// That among the entries of all directions.
template <typename Plan>
__device__ __forceinline__ int64_t RowOf(const RecurrentScanProblem& p, int64_t b) {
  return DirectionOf<Plan>(p) * p.batch + EntryOfBatch<Plan>(p, b);
}

template <typename Plan>
__device__ __forceinline__ bool IsReversed(const RecurrentScanProblem& p) {
  if constexpr (Plan::kScans == 1 || kOneDirection<Plan>) return p.reverse;
  const uint32_t scan = ScanOfLaunch<Plan>();
  return (p.reversed_scans[Plan::kScans <= 32 ? 0 : scan / 32] >> scan % 32 & 1) != 0;
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
