// How a product warp waits for the states of a tile that other blocks of the team publish.
#pragma once

#include "persistent/backoff.cuh"
#include "persistent/exchange.cuh"

namespace jaxsparse {

// Where the states of a load lie, and whether they may not be there yet.
struct StatePlace {
  const Words4* from;
  bool exists, is_polled;
};

// For all lanes of a warp, loads of kLoads places each.
template <int kLoads>
__device__ __forceinline__ void AskForStates(const StatePlace (&places)[kLoads],
                                             Words4 (&x)[kLoads]) {
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    x[j] = {0, 0, 0, 0};
    LoadRelaxedIf(places[j].exists, places[j].from, &x[j]);
  }
}

// Whether any words that a warp asked for look as if they were not there yet.
template <int kLoads>
__device__ __forceinline__ bool HasUnwritten(const Words4 (&x)[kLoads]) {
  bool is_any = false;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) is_any |= !IsWritten(x[j]);
  return __any_sync(kAllLanes, is_any);
}

// Whether words that a warp asked for are not there yet.
template <int kLoads>
__device__ __forceinline__ bool IsMissing(const StatePlace (&places)[kLoads],
                                          const Words4 (&x)[kLoads]) {
  bool missing = false;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) missing |= places[j].is_polled && !IsWritten(x[j]);
  return __any_sync(kAllLanes, missing);
}

// After a look in vain, until all that was asked for is there, or the watchdog times out. The
// second look comes as late as the backoff says, others at once. How many looks were in vain, by
// which a backoff adapts, or 0 if the watchdog timed out.
template <int kLoads>
__device__ __forceinline__ int LookAgain(const StatePlace (&places)[kLoads], Words4 (&x)[kLoads],
                                         const Backoff& backoff, Watchdog* watchdog) {
  watchdog->Begin();
  backoff.Wait();
  for (int looks = 1;; ++looks) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      LoadRelaxedIf(places[j].is_polled && !IsWritten(x[j]), places[j].from, &x[j]);
    }
    if (!IsMissing(places, x)) return looks;
    if (__any_sync(kAllLanes, watchdog->TimesOut())) return 0;
  }
}

// The same from the first look on.
template <int kLoads>
__device__ __forceinline__ int LookForStates(const StatePlace (&places)[kLoads],
                                             Words4 (&x)[kLoads], const Backoff& backoff,
                                             Watchdog* watchdog) {
  return IsMissing(places, x) ? LookAgain(places, x, backoff, watchdog) : 0;
}

}  // namespace jaxsparse
