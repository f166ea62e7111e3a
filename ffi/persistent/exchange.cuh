// How blocks of one launch hand each other what a step computes. A word of the exchange buffer is
// written once; until then it holds kUnwritten, so that the data are their own flag: no barrier,
// and one trip through the L2 cache instead of three. Vector accesses count as separate words in
// the memory model, so every 32-bit word is checked.
#pragma once

#include "persistent/watchdog.cuh"

namespace jaxsparse {

constexpr uint32_t kUnwritten = 0xffffffffu;  // a NaN that no conversion or sum makes

__device__ __forceinline__ bool IsWritten(uint32_t x) { return x != kUnwritten; }
__device__ __forceinline__ bool IsWritten(Words4 x) {
  return x.x != kUnwritten && x.y != kUnwritten && x.z != kUnwritten && x.w != kUnwritten;
}

// Words as they are published. Conversions to 16 bits turn every NaN to the usual one already, so
// only a 32-bit value that was passed through can look unwritten.
__device__ __forceinline__ uint32_t ToWord(float x) {
  const uint32_t bits = __float_as_uint(x);
  return bits == kUnwritten ? 0x7fffffffu : bits;
}
template <typename T>
__device__ __forceinline__ uint32_t ToWord(float low, float high) {
  T a, b;
  FromAccumulator(low, &a);
  FromAccumulator(high, &b);
  return static_cast<uint32_t>(a.bits) | static_cast<uint32_t>(b.bits) << 16;
}

// Repeats loads until all of a warp's words are there. `From(j)` says where words x[j] come from;
// words that never come are 0 in x. For all lanes of a warp.
template <int kCount, typename From>
__device__ __forceinline__ void Await(Words4* x, From from, Watchdog* watchdog) {
  watchdog->Begin();
  for (;;) {
    bool missing = false;
#pragma unroll
    for (int j = 0; j < kCount; ++j) missing |= !IsWritten(x[j]);
    if (!__any_sync(kAllLanes, missing)) return;
#pragma unroll
    for (int j = 0; j < kCount; ++j) LoadRelaxedIf(!IsWritten(x[j]), from(j), &x[j]);
    if (__any_sync(kAllLanes, watchdog->TimesOut())) return;
  }
}

// Calls place(i, words) with the 16 bytes at from(i), as soon as they are written, for this
// thread's share of i < kCount. Whole warps call it. Up to kMostInFlight loads of a thread are on
// their way at once, and only those that came too early are repeated; warps stay together, because
// the paths of a split warp wait for each other's loads. False if the warp timed out.
template <int kThreads, int kCount, typename From, typename Place>
__device__ __forceinline__ bool Receive(int thread, Watchdog* watchdog, From from, Place place) {
  constexpr int kMostInFlight = 8;
  constexpr int kLoads = (kCount + kThreads - 1) / kThreads;
  constexpr int kBatch = kLoads < kMostInFlight ? kLoads : kMostInFlight;
#pragma unroll
  for (int first = 0; first < kLoads; first += kBatch) {
    Words4 words[kBatch];
    uint32_t missing = 0;  // the same in all lanes
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = (first + j) * kThreads + thread;
      words[j] = {};
      if (i < kCount) words[j] = LoadRelaxed(from(i));
      if (first + j < kLoads) missing |= 1u << j;
    }
    watchdog->Begin();
    while (missing != 0) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = (first + j) * kThreads + thread;
        if ((missing >> j & 1) == 0) continue;
        const bool is_written = IsWritten(words[j]);
        if (__all_sync(kAllLanes, is_written)) {
          if (i < kCount) place(i, words[j]);
          missing ^= 1u << j;
        } else if (!is_written) {
          words[j] = LoadRelaxed(from(i));
        }
      }
      if (missing != 0 && __any_sync(kAllLanes, watchdog->TimesOut())) return false;
    }
  }
  return true;
}

}  // namespace jaxsparse
