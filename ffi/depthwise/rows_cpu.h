// Rows of an image as the CPU kernels of depthwise convolutions read them: float, with zeros where
// the image ends, so that no loop over them has an edge.
#pragma once

#include "cpu/simd.h"
#include "depthwise/problem.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

constexpr int kLanes = kMaxLanes<float>;
using Floats = Vector<float, kLanes>;

// Whether each lane is below `count`.
JAXSPARSE_INLINE auto LanesBelow(int64_t count) {
  Vector<int32_t, kLanes> lanes;
#pragma GCC unroll 16
  for (int l = 0; l < kLanes; ++l) lanes[l] = l;
  return lanes < static_cast<int32_t>(count < kLanes ? count : kLanes);
}

// `count` elements of a row as floats, zeros behind them up to whole vectors. The array ends at
// `end`: what a vector reads behind the row is not behind that.
template <typename T>
JAXSPARSE_INLINE void Widened(const T* from, int64_t count, const T* end, float* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats v = {};
    if (from + i + kLanes <= end) {
      v = Load<kLanes>(from + i);
      if (count - i < kLanes) v = LanesBelow(count - i) ? v : Floats{};
    } else {
      for (int l = 0; l < kLanes && i + l < count; ++l) v[l] = ToFloat(from[i + l]);
    }
    Store<kLanes, float>(v, to + i);
  }
}

// The rows of one image that a row of windows reads: at place p of a row stands what lies
// p - left columns from the image's begin. With stride 2 places of either parity stand together.
template <typename T, int kStride>
class PaddedRows {
  // Rows are written some time before they are read: a load that overlaps a store in part waits
  // until that is in the cache.
  static constexpr int64_t kAhead = 4, kRing = 8;
  static_assert(kTaps + kAhead <= kRing);

 public:
  // Places of a row, with room for the last vector of windows; floats of all rows.
  JAXSPARSE_INLINE static int64_t Length(int64_t windows) { return windows + 4 + kLanes; }
  JAXSPARSE_INLINE static int64_t Memory(int64_t windows, int64_t width) {
    return (kRing + 1) * kStride * Length(windows) + width + kLanes;
  }

  JAXSPARSE_INLINE PaddedRows(float* memory, int64_t width, int64_t height, int64_t windows,
                              int64_t left)
      : memory_(memory), length_(Length(windows)), height_(height), width_(width), left_(left) {
    const int64_t places = kStride * (windows - 1) + kTaps - left;
    count_ = places < width ? places : width;
    if (count_ < 0) count_ = 0;
    for (int64_t i = 0; i < (kRing + 1) * kStride * length_; ++i) memory[i] = 0;
  }

  // From now on rows of the image that begins here.
  JAXSPARSE_INLINE void Begin(const T* image) {
    image_ = image;
    next_ = INT64_MIN;
  }

  // The three rows from `first` on; calls for one image have rising rows.
  JAXSPARSE_INLINE void Take(int64_t first) {
    const int64_t end = first + kTaps + kAhead;
    for (int64_t row = first > next_ ? first : next_; row < end; ++row) {
      if (row >= 0 && row < height_) Copy(row);
    }
    next_ = end;
    for (int i = 0; i < kTaps; ++i) {
      const int64_t row = first + i;
      rows_[i] = memory_ + (row >= 0 && row < height_ ? row % kRing : kRing) * kStride * length_;
    }
  }

  // What tap (i, j) of windows from `window` on reads.
  JAXSPARSE_INLINE Floats At(int i, int j, int64_t window) const {
    return LoadRaw<kLanes>(rows_[i] + (j % kStride) * length_ + window + j / kStride);
  }

 private:
  JAXSPARSE_INLINE void Copy(int64_t row) {
    float* to = memory_ + row % kRing * kStride * length_;
    const T *from = image_ + row * width_, *end = image_ + height_ * width_;
    if constexpr (kStride == 1) {
      Widened(from, count_, end, to + left_);
    } else {
      float* flat = memory_ + (kRing + 1) * kStride * length_;
      Widened(from, count_, end, flat);
      for (int parity = 0; parity < 2; ++parity) {
        const int64_t first = (parity + left_) % 2;  // of the image's columns
        float* half = to + parity * length_ + (first + left_) / 2;
        const int64_t half_count = (count_ - first + 1) / 2;
        for (int64_t i = 0; i < half_count; ++i) half[i] = flat[first + 2 * i];
      }
    }
  }

  float* memory_;
  int64_t length_, height_, width_, left_, count_, next_ = 0;
  const T* image_ = nullptr;
  const float* rows_[kTaps] = {};
};

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
