// What a thread reads of one row of an image for four neighbouring windows, and which thread makes
// what.
#pragma once

#include "cuda/device.cuh"
#include "cuda/vector_access.cuh"
#include "depthwise/problem.h"

namespace jaxsparse {

constexpr int kWindows = 4;  // of a thread, side by side

// Places that the windows read.
template <int kStride>
constexpr int kSpan = kStride * (kWindows - 1) + kTaps;

// Division where most numbers are small: that of 64 bits takes a hundred instructions.
__device__ __forceinline__ int64_t Quotient(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
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
  int64_t entry, plane;
  int strip, group;

  __device__ __forceinline__ PlaneUnit(int64_t unit, int64_t planes, int64_t strips,
                                       int64_t groups) {
    const int64_t strip_index = Quotient(unit, groups);
    group = static_cast<int>(unit - strip_index * groups);
    const int64_t plane_index = Quotient(strip_index, strips);
    strip = static_cast<int>(strip_index - plane_index * strips);
    entry = Quotient(plane_index, planes);
    plane = plane_index - entry * planes;
  }
};

}  // namespace jaxsparse
