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

// Whether words that a warp asked for are not there yet.
template <int kLoads>
__device__ __forceinline__ bool IsMissing(const StatePlace (&places)[kLoads],
                                          const Words4 (&x)[kLoads]) {
  bool missing = false;
#pragma unroll
  for (int j = 0; j < kLoads; ++j) missing |= places[j].is_polled && !IsWritten(x[j]);
  return __any_sync(kAllLanes, missing);
}

// Until all that was asked for is there, or the watchdog times out. The second look comes as late
// as the backoff says, others at once.
template <int kLoads>
__device__ __forceinline__ void AwaitStates(const StatePlace (&places)[kLoads], Words4 (&x)[kLoads],
                                            Backoff* backoff, Watchdog* watchdog) {
  if (!IsMissing(places, x)) return;
  watchdog->Begin();
  backoff->Wait();
  for (bool is_again = false;; is_again = true) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      LoadRelaxedIf(places[j].is_polled && !IsWritten(x[j]), places[j].from, &x[j]);
    }
    if (!IsMissing(places, x)) {
      backoff->Adapt(is_again);
      return;
    }
    if (__any_sync(kAllLanes, watchdog->TimesOut())) return;
  }
}

}  // namespace jaxsparse
