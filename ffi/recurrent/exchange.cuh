// How blocks of one launch hand each other the state. A word of the exchange buffer is written
// once; until then it holds kUnwritten, so that the data are their own flag: no barrier, and one
// trip through the L2 cache instead of three. Vector accesses count as separate words in the memory
// model, so every 32-bit word is checked.
#pragma once

#include "cuda/device.cuh"
#include "recurrent/problem.h"

namespace jaxsparse {

constexpr uint32_t kUnwritten = 0xffffffffu;  // a NaN that no conversion or sum makes

// Blocks work for the scans of a launch in turn, each plan's kBlocks of them for one.
template <typename Plan>
__device__ __forceinline__ const RecurrentScanProblem& ScanOfBlock(
    const RecurrentScans<Plan::kScans>& scans) {
  return scans.scan[Plan::kScans == 1 ? 0 : blockIdx.x / Plan::kBlocks];
}
template <typename Plan>
__device__ __forceinline__ int BlockOfScan() {
  return static_cast<int>(Plan::kScans == 1 ? blockIdx.x : blockIdx.x % Plan::kBlocks);
}

struct alignas(16) Words4 {
  uint32_t x, y, z, w;
};

__device__ __forceinline__ Words4 LoadRelaxed(const Words4* from) {
  Words4 v;
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ __forceinline__ uint32_t LoadRelaxed(const uint32_t* from) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
  return v;
}

__device__ __forceinline__ void StoreRelaxed(uint32_t* to, uint32_t v) {
  asm volatile("st.relaxed.gpu.global.b32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

__device__ __forceinline__ bool IsWritten(uint32_t v) { return v != kUnwritten; }
__device__ __forceinline__ bool IsWritten(Words4 v) {
  return v.x != kUnwritten && v.y != kUnwritten && v.z != kUnwritten && v.w != kUnwritten;
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

// Ends a thread's waits that last too long. Whoever gives up says so in *error, where the waiting
// threads of all blocks look now and then; it doesn't leave the scan but goes on without waiting,
// so that nobody waits for it, and the results are NaN.
class WaitLimit {
 public:
  __device__ explicit WaitLimit(const RecurrentScanProblem& p)
      : error_(p.error), report_(p.report), limit_(static_cast<uint64_t>(p.wait_limit_ns)) {}

  __device__ bool gave_up() const { return gave_up_; }
  __device__ void Begin() { looks_ = 0; }

  // Whether a look was in vain since this was last asked.
  __device__ bool TakeHasWaited() {
    const bool has_waited = has_waited_;
    has_waited_ = false;
    return has_waited;
  }

  // Called after every look in vain.
  __device__ bool GivesUp() {
    has_waited_ = true;
    if (gave_up_) return true;
    if (++looks_ % kLooksPerCheck == 0) Check();
    return gave_up_;
  }

 private:
  static constexpr uint32_t kLooksPerCheck = 256;

  __device__ static uint64_t Now() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }

  __device__ void Check() {
    const uint64_t now = Now();
    if (looks_ == kLooksPerCheck) start_ = now;
    if (now - start_ > limit_) {
      StoreRelaxed(error_, 0u);
      asm volatile("st.relaxed.sys.global.b32 [%0], 1;" ::"l"(report_) : "memory");
    }
    gave_up_ = now - start_ > limit_ || LoadRelaxed(error_) != kUnwritten;
  }

  uint32_t* error_;
  uint32_t* report_;
  uint64_t limit_;
  uint64_t start_ = 0;
  uint32_t looks_ = 0;
  bool gave_up_ = false;
  bool has_waited_ = false;
};

// Calls place(i, words) with the 16 bytes at from(i), as soon as they are written, for this
// thread's share of i < kCount. Whole warps call it. Up to kMostInFlight loads of a thread are on
// their way at once, and only those that came too early are repeated; warps stay together, because
// the paths of a split warp wait for each other's loads. False if the warp gave up.
template <int kThreads, int kCount, typename From, typename Place>
__device__ __forceinline__ bool Receive(int thread, WaitLimit* limit, From from, Place place) {
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
    limit->Begin();
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
      if (missing != 0 && __any_sync(kAllLanes, limit->GivesUp())) return false;
    }
  }
  return true;
}

__device__ __forceinline__ void WaitCycles(uint32_t start, uint32_t cycles) {
  while (static_cast<uint32_t>(clock()) - start < cycles) {
  }
}

// The other way to exchange the state: after each step all blocks of a scan meet. It costs two more
// trips through the L2 cache, and is there to measure and to check the first way by.
//
// Called by one thread, after the block's other threads have published and met it, and before they
// read what the other blocks published.
template <typename Plan>
__device__ __forceinline__ void MeetOtherBlocks(const RecurrentScanProblem& p, int64_t step,
                                                WaitLimit* limit) {
  asm volatile("fence.acq_rel.gpu; red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(p.arrivals)
               : "memory");
  const uint32_t all = kUnwritten + static_cast<uint32_t>(step + 1) * Plan::kBlocks;
  limit->Begin();
  while (static_cast<int32_t>(LoadRelaxed(p.arrivals) - all) < 0 && !limit->GivesUp()) {
  }
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// Holds a warp up now and then, by up to the plan's kMostDelay clock cycles, differently in every
// block, warp and step: tests of the exchange turn it on, since a sanitizer does not see what
// passes between blocks.
template <typename Plan>
__device__ __forceinline__ void Delay(int64_t step) {
  if constexpr (Plan::kMostDelay > 0) {
    uint32_t x = static_cast<uint32_t>(step) * 0x9e3779b9u ^ blockIdx.x * 0x85ebca6bu ^
                 threadIdx.x / kWarp * 0xc2b2ae35u;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    x ^= x >> 15;
    if (x % 4 == 0) WaitCycles(static_cast<uint32_t>(clock()), __umulhi(x, Plan::kMostDelay));
  }
}

// When to look for the next state. A look in vain costs another trip to the L2 cache and holds up
// the stores that it waits for there, so that a late first look is better than an early one: it
// comes `cycles` after Start, which is where `poll_delay` of the problem begins. With steps of
// adaption that are not 0 it moves later with each look in vain, and earlier, much slower, with
// each in time.
class Backoff {
 public:
  __device__ explicit Backoff(const RecurrentScanProblem& p)
      : cycles_(p.poll_delay), later_(p.poll_delay_increase), earlier_(p.poll_delay_decrease) {}

  __device__ __forceinline__ void Start() { start_ = static_cast<uint32_t>(clock()); }
  __device__ __forceinline__ void Wait() const { WaitCycles(start_, cycles_); }
  __device__ __forceinline__ void Adapt(bool was_in_vain) {
    if (was_in_vain) {
      cycles_ = cycles_ + later_ < kMost ? cycles_ + later_ : kMost;
    } else {
      cycles_ -= cycles_ < earlier_ ? cycles_ : earlier_;
    }
  }

 private:
  static constexpr uint32_t kMost = 4096;  // a block that was held up once mustn't slow the rest

  uint32_t start_ = 0;
  uint32_t cycles_, later_, earlier_;
};

}  // namespace jaxsparse
