// Entries of rows in registers of a group of lanes: runs of neighbouring ones, each by one load
// that all lanes of the group make.
#pragma once

#include "spmm/matrices.cuh"

namespace jaxsparse {

constexpr int kRun = 4;  // entries that one load brings

// A row's first run begins in front of the row, where a load is aligned; what does not belong to
// the row is not used.
__device__ __forceinline__ int FirstRun(int begin) { return begin / kRun * kRun; }

// A run of elements of 4 or 8 bytes, or of 2: these stay in the words in which they come, since to
// take them apart is to wait for them.
template <typename T, bool kHalves = sizeof(T) == 2>
struct Run {
  Vector<T, kRun> elements;

  __device__ __forceinline__ void Set(int e, const T* from) { elements.elements[e] = *from; }
  __device__ __forceinline__ T Get(int e) const { return elements.elements[e]; }
  // Makes indices at most `last`, as BoundOf gives it for all that a word holds.
  __device__ __forceinline__ static uint32_t BoundOf(uint32_t last) { return last; }
  __device__ __forceinline__ void Bound(uint32_t last) {
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      const auto index = static_cast<uint32_t>(elements.elements[e]);
      elements.elements[e] = static_cast<T>(index < last ? index : last);
    }
  }
};
template <typename T>
struct Run<T, true> {
  Vector<uint32_t, kRun / 2> words;

  __device__ __forceinline__ void Set(int e, const T* from) {
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(from);
    words.elements[e / 2] = e % 2 == 0 ? bits : words.elements[e / 2] | bits << 16;
  }
  __device__ __forceinline__ T Get(int e) const {
    return {static_cast<uint16_t>(words.elements[e / 2] >> e % 2 * 16)};
  }
  __device__ __forceinline__ static uint32_t BoundOf(uint32_t last) {
    return (last < 0xffff ? last : 0xffff) * 0x10001;
  }
  __device__ __forceinline__ void Bound(uint32_t bound) {
#pragma unroll
    for (int w = 0; w < kRun / 2; ++w) words.elements[w] = MinOfHalves(words.elements[w], bound);
  }
};

// The runs from place `first` on that begin in front of `end`; one by one where `wide` is false, or
// where not all of a run is there.
template <int kRuns, typename E>
__device__ __forceinline__ void LoadRuns(const E* from, int first, int end, int count, bool wide,
                                         Run<E> (&to)[kRuns]) {
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const int at = first + r * kRun;
    if (at >= end) continue;
    if (wide && at + kRun <= count) {
      to[r] = *reinterpret_cast<const Run<E>*>(from + at);
    } else {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        if (at + e < count) to[r].Set(e, from + at + e);
      }
    }
  }
}

}  // namespace jaxsparse
