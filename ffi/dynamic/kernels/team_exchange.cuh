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

// Until all that was asked for is there, or the watchdog times out. The second look comes as late
// as the backoff says, others at once. How many looks were in vain, by which a backoff adapts.
template <int kLoads>
__device__ __forceinline__ int LookForStates(const StatePlace (&places)[kLoads],
                                             Words4 (&x)[kLoads], const Backoff& backoff,
                                             Watchdog* watchdog) {
  watchdog->Begin();
  for (int looks = 0;; ++looks) {
    bool missing = false;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) missing |= places[j].is_polled && !IsWritten(x[j]);
    if (!__any_sync(kAllLanes, missing)) return looks;
    if (looks == 0) backoff.Wait();
    if (looks > 0 && __any_sync(kAllLanes, watchdog->TimesOut())) return 0;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      LoadRelaxedIf(places[j].is_polled && !IsWritten(x[j]), places[j].from, &x[j]);
    }
  }
}

template <int kLoads>
__device__ __forceinline__ void AwaitStates(const StatePlace (&places)[kLoads], Words4 (&x)[kLoads],
                                            Backoff* backoff, Watchdog* watchdog) {
  const int looks = LookForStates(places, x, *backoff, watchdog);
  if (looks > 0) backoff->Adapt(looks > 1);
}

}  // namespace jaxsparse
