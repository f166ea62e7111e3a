// What a thread reads: a channel's kernel, and of one row of an image what neighbouring windows do;
// what it writes, and which thread makes what.
#pragma once

#include "cuda/device.cuh"
#include "cuda/vector_access.cuh"
#include "depthwise/problem.h"

namespace jaxsparse {

// The channel of a plane. In 32 bits, as everything that is divided: hosts see to it that numbers
// are that small, and a division of 64 bits takes a hundred instructions.
__device__ __forceinline__ uint32_t ChannelOf(const DepthwiseProblem& p, uint32_t plane) {
  return p.channels_first ? plane / static_cast<uint32_t>(p.images)
                          : plane % static_cast<uint32_t>(p.channels);
}

// The numbers of a channel's kernel.
template <typename T>
__device__ __forceinline__ void LoadTaps(const T* kernel, bool flipped,
                                         float (&taps)[kTaps][kTaps]) {
#pragma unroll
  for (int i = 0; i < kTaps * kTaps; ++i) {
    taps[i / kTaps][i % kTaps] = ToAccumulator(kernel[flipped ? kTaps * kTaps - 1 - i : i]);
  }
}

// from[i] where `from` is place `begin` of a row of `width`, or 0 where there is no such place.
template <typename T>
__device__ __forceinline__ T At(const T* from, int i, int begin, int width) {
  return static_cast<unsigned>(begin + i) < static_cast<unsigned>(width) ? from[i] : T{};
}

// Neighbouring numbers as they are loaded, by words: one instruction turns one into a float.
template <typename T, int kCount>
struct Packed {
  static constexpr int kOfWord = 4 / sizeof(T);
  uint32_t words[kCount / kOfWord];

  __device__ __forceinline__ float operator[](int i) const {
    return ElementOf(T{}, words[i / kOfWord], i % kOfWord);
  }

  __device__ __forceinline__ static float ElementOf(float, uint32_t word, int) {
    return __uint_as_float(word);
  }
  __device__ __forceinline__ static float ElementOf(bfloat16, uint32_t word, int i) {
    return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000U);
  }
  __device__ __forceinline__ static float ElementOf(float16, uint32_t word, int i) {
    return FloatOfHalf(static_cast<uint16_t>(i == 0 ? word : word >> 16));
  }

  __device__ __forceinline__ static uint32_t WordOf(const T* elements) {
    if constexpr (kOfWord == 1) {
      return __float_as_uint(elements[0]);
    } else {
      return elements[0].bits | static_cast<uint32_t>(elements[1].bits) << 16;
    }
  }
};

// What so many neighbouring windows read of a row: x[i] is place
// kStride * kWindows * group - kLeft + i.
template <typename T, int kStride, int kWindows, int kLeft>
struct Segment {
  static constexpr int kSpan = kStride * (kWindows - 1) + kTaps, kMiddle = kStride * kWindows;
  Packed<T, kMiddle> middle;
  T others[kSpan];  // beside those

  __device__ __forceinline__ static constexpr bool IsInMiddle(int i) {
    return kLeft <= i && i < kLeft + kMiddle;
  }
  __device__ __forceinline__ float operator[](int i) const {
    return IsInMiddle(i) ? middle[i - kLeft] : ToAccumulator(others[i]);
  }

  // kWide: so many places from a multiple of that on may be loaded at once.
  template <int kWide>
  __device__ __forceinline__ void Load(const T* row, int group, int width) {
    using M = Packed<T, kMiddle>;
    constexpr int kWords = kWide / M::kOfWord;
    const int begin = kMiddle * group;
    const T* from = row + begin;  // one address, from which all others are a constant away
#pragma unroll
    for (int w = 0; w < kMiddle / M::kOfWord; w += kWords > 0 ? kWords : 1) {
      const int at = w * M::kOfWord;
      if constexpr (kWords > 0) {
        Vector<uint32_t, kWords> loaded = {};
        if (begin + at < width) {
          loaded = *reinterpret_cast<const Vector<uint32_t, kWords>*>(from + at);
        }
#pragma unroll
        for (int i = 0; i < kWords; ++i) middle.words[w + i] = loaded.elements[i];
      } else {
        T elements[M::kOfWord];
#pragma unroll
        for (int i = 0; i < M::kOfWord; ++i) elements[i] = At(from, at + i, begin, width);
        middle.words[w] = M::WordOf(elements);
      }
    }
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      if (!IsInMiddle(i)) others[i] = At(from, i - kLeft, begin, width);
    }
  }
};

// Segments of kRows rows of an image from `first` on, all asked for before one of them is used.
template <int kWide, typename Row, int kRows, typename T>
__device__ __forceinline__ void LoadRows(const T* plane, int first, int height, int width,
                                         int group, Row (&x)[kRows]) {
  const T* row = plane + static_cast<int64_t>(first) * width;
#pragma unroll
  for (int s = 0; s < kRows; ++s, row += width) {
    const bool exists = static_cast<unsigned>(first + s) < static_cast<unsigned>(height);
    x[s].template Load<kWide>(row, group, exists ? width : 0);
  }
}
template <typename Row, int kRows, typename T>
__device__ __forceinline__ void LoadRows(const T* plane, int first, int height, int width,
                                         int group, Row (&x)[kRows]) {
  constexpr int kFew = Row::kMiddle < 4 ? Row::kMiddle : 4;
  constexpr int kMany = Row::kMiddle % 8 == 0 && sizeof(T) == 2 ? 8 : kFew;
  if (width % kMany == 0 && IsAligned<Vector<T, kMany>>(plane)) {
    LoadRows<kMany>(plane, first, height, width, group, x);
  } else if (kMany != kFew && width % kFew == 0 && IsAligned<Vector<T, kFew>>(plane)) {
    LoadRows<kFew>(plane, first, height, width, group, x);
  } else {
    LoadRows<1>(plane, first, height, width, group, x);
  }
}

// Neighbouring places of a result, those that there are.
template <int kCount, typename T>
__device__ __forceinline__ void StoreRow(const float (&values)[kCount], T* to, int left) {
  constexpr int kFew = 4, kMany = sizeof(T) == 2 ? kCount : kFew;
  Vector<T, kCount> made;
#pragma unroll
  for (int i = 0; i < kCount; ++i) FromAccumulator(values[i], &made.elements[i]);
  if (kMany != kFew && left >= kMany && IsAligned<Vector<T, kMany>>(to)) {
    *reinterpret_cast<Vector<T, kCount>*>(to) = made;
    return;
  }
#pragma unroll
  for (int v = 0; v < kCount; v += kFew) {
    Vector<T, kFew> four;
#pragma unroll
    for (int i = 0; i < kFew; ++i) four.elements[i] = made.elements[v + i];
    if (left >= v + kFew) {
      StoreVector(to + v, four);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kFew; ++i) {
      if (v + i < left) to[v + i] = four.elements[i];
    }
  }
}

// Which plane, rows and columns a thread's unit is: neighbouring threads have neighbouring columns.
struct PlaneUnit {
  uint32_t entry, plane, strip, group;

  __device__ __forceinline__ PlaneUnit(uint32_t unit, int64_t planes, int64_t strips,
                                       int64_t groups) {
    group = unit % static_cast<uint32_t>(groups);
    unit /= static_cast<uint32_t>(groups);
    strip = unit % static_cast<uint32_t>(strips);
    unit /= static_cast<uint32_t>(strips);
    plane = unit % static_cast<uint32_t>(planes);
    entry = unit / static_cast<uint32_t>(planes);
  }
};

}  // namespace jaxsparse
