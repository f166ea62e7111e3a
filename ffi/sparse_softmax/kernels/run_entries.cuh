// The entries of a run, neighbouring ones in each lane of a warp: how they come from memory, and
// how they get there.
#pragma once

#include "cuda/vector_access.cuh"

namespace jaxsparse {

constexpr int kRun = 4;  // entries that one load brings, where their place is a multiple of that

// Brings what lies between two places of an array nearer, but for what is no whole 16 bytes at its
// ends.
template <typename T>
__device__ __forceinline__ void PrefetchBetween(const T* begin, const T* end) {
  const uint64_t from = (reinterpret_cast<uint64_t>(begin) + 15) & ~uint64_t{15};
  const uint64_t to = reinterpret_cast<uint64_t>(end) & ~uint64_t{15};
  if (from < to) {
    PrefetchToL2(reinterpret_cast<const void*>(from), static_cast<uint32_t>(to - from));
  }
}

// Neighbouring entries of a lane, as they stand in memory.
template <typename T, int kCount>
struct EntriesOfLane {
  static constexpr int kRuns = kCount / kRun;
  Vector<T, kRun> runs[kRuns];

  // Those from a place on. What stands behind the last one is another entry: nobody asks for it.
  __device__ __forceinline__ void Load(const T* from, int place, int last, bool wide) {
    if (wide) {
      const int last_run = last & -kRun;
#pragma unroll
      for (int r = 0; r < kRuns; ++r) {
        const int at = place + r * kRun;
        runs[r] = *reinterpret_cast<const Vector<T, kRun>*>(from + (at < last_run ? at : last_run));
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      runs[k / kRun].elements[k % kRun] = from[place + k < last ? place + k : last];
    }
  }
  __device__ __forceinline__ Accumulator<T> Get(int k) const {
    return ToAccumulator(runs[k / kRun].elements[k % kRun]);
  }
};

// Those of a lane's entries, a bit for each, that stand from `begin` to `end`.
template <int kCount>
__device__ __forceinline__ uint32_t EntriesWithin(int place, int begin, int end) {
  const int first = Clamp(begin - place, 0, kCount), behind = Clamp(end - place, 0, kCount);
  return ((1u << behind) - 1) & ~((1u << first) - 1);
}

// Where a warp's entries stand in shared memory on their way out. Lanes write neighbouring vectors
// and read those that all of them bring to memory together. A gap behind each eight vectors keeps
// lanes from each other's banks where they have an even number of vectors.
template <typename T, int kMost>
struct StageOfRun {
  static constexpr int kVectors = kMost / kRun * kWarp;
  Vector<T, kRun> vectors[kVectors + kVectors / 8];

  // Writes the entries from `first` to `last` of those that lanes have from `place` on.
  template <int kCount>
  __device__ __forceinline__ void Store(T* to, int place, int first, int last, bool wide,
                                        const Accumulator<T> (&from)[kCount]) {
    constexpr int kRuns = kCount / kRun;
    const auto slot_of = [](int vector) { return kRuns % 2 == 0 ? vector + vector / 8 : vector; };
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      Vector<T, kRun> vector;
#pragma unroll
      for (int e = 0; e < kRun; ++e) FromAccumulator(from[r * kRun + e], &vector.elements[e]);
      vectors[slot_of(lane * kRuns + r)] = vector;
    }
    __syncwarp();
    const auto write = [&](int at) {
      const auto of_run = static_cast<uint32_t>(at - place);
      to[at] = vectors[slot_of(of_run / kRun)].elements[of_run % kRun];
    };
    if (!wide) {
#pragma unroll 1
      for (int at = first + lane; at < last; at += kWarp) write(at);
      return;
    }
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const int at = place + (r * kWarp + lane) * kRun;
      if (at < first || at + kRun > last) continue;
      *reinterpret_cast<Vector<T, kRun>*>(to + at) = vectors[slot_of(r * kWarp + lane)];
    }
    // Of vectors that are not whole, at both ends.
    const int begin = (first + kRun - 1) & -kRun, end = last & -kRun;
    const bool in_front = lane < kRun;
    const int at = in_front ? first + lane : end + lane - kRun;
    const bool is_written = in_front ? at < begin : at >= begin && lane < 2 * kRun;
    if (is_written && at < last) write(at);
  }
};

// Whether all of a lane's entries are at most as large, and numbers.
template <typename T, int kCount>
__device__ __forceinline__ bool AreAtMost(const EntriesOfLane<T, kCount>& entries, float most) {
  bool are = true;
#pragma unroll
  for (int k = 0; k < kCount; ++k) are &= fabsf(entries.Get(k)) <= most;
  return are;
}

}  // namespace jaxsparse
