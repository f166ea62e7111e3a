// What a thread reads: a channel's kernel, and of one row of an image what four neighbouring
// windows do; and which thread makes what.
#pragma once

#include "cuda/device.cuh"
#include "cuda/vector_access.cuh"
#include "depthwise/problem.h"

namespace jaxsparse {

constexpr int kWindows = 4;  // of a thread, side by side

// Places that the windows read.
template <int kStride>
constexpr int kSpan = kStride * (kWindows - 1) + kTaps;

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

// One place, or 0 where there is none.
template <typename T>
__device__ __forceinline__ float At(const T* row, int column, int width) {
  if (static_cast<unsigned>(column) >= static_cast<unsigned>(width)) return 0;
  return ToAccumulator(row[column]);
}

// x[i] is place kStride * kWindows * group - kLeft + i of a row of `width`. kWide: four places from
// a multiple of four on may be loaded at once.
template <int kStride, int kLeft, bool kWide, typename T>
__device__ __forceinline__ void LoadSegment(const T* row, int group, int width,
                                            float (&x)[kSpan<kStride>]) {
  constexpr int kMiddle = kStride * kWindows;
  const int begin = kMiddle * group;
  float middle[kMiddle];
#pragma unroll
  for (int v = 0; v < kMiddle; v += 4) {
    if constexpr (kWide) {
      Vector<T, 4> four = {};
      if (begin + v < width) four = LoadVector<4>(row + begin + v, true);
#pragma unroll
      for (int i = 0; i < 4; ++i) middle[v + i] = ToAccumulator(four.elements[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) middle[v + i] = At(row, begin + v + i, width);
    }
  }
#pragma unroll
  for (int i = 0; i < kSpan<kStride>; ++i) {
    const int place = i - kLeft;
    const bool inside = 0 <= place && place < kMiddle;
    x[i] = inside ? middle[inside ? place : 0] : At(row, begin + place, width);
  }
}

// Segments of kRows rows of an image from `first` on, all asked for before one of them is used.
template <int kStride, int kLeft, bool kWide, int kRows, typename T>
__device__ __forceinline__ void LoadRows(const T* plane, int64_t first, int64_t height,
                                         int64_t width, int group,
                                         float (&x)[kRows][kSpan<kStride>]) {
#pragma unroll
  for (int s = 0; s < kRows; ++s) {
    const int64_t row = first + s;
    const bool exists = 0 <= row && row < height;
    LoadSegment<kStride, kLeft, kWide>(plane + row * width, group,
                                       exists ? static_cast<int>(width) : 0, x[s]);
  }
}
template <int kStride, int kLeft, int kRows, typename T>
__device__ __forceinline__ void LoadRows(const T* plane, int64_t first, int64_t height,
                                         int64_t width, int group,
                                         float (&x)[kRows][kSpan<kStride>]) {
  if (width % 4 == 0 && IsAligned<Vector<T, 4>>(plane)) {
    LoadRows<kStride, kLeft, true>(plane, first, height, width, group, x);
  } else {
    LoadRows<kStride, kLeft, false>(plane, first, height, width, group, x);
  }
}

// Four neighbouring places of a result, those that there are.
template <typename T>
__device__ __forceinline__ void StoreFour(const float (&values)[4], T* to, int64_t left) {
  Vector<T, 4> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) FromAccumulator(values[i], &four.elements[i]);
  if (left >= 4) return StoreVector(to, four);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < left) to[i] = four.elements[i];
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
