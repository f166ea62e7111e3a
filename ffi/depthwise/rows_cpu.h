// Rows of an image as the CPU kernels of depthwise convolutions read them: float, with zeros where
// the image ends, so that no loop over them has an edge.
#pragma once

#include <new>
#include <utility>

#include "cpu/pattern.h"
#include "cpu/simd.h"
#include "depthwise/problem.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

constexpr int kLanes = kMaxLanes<float>;
using Floats = Vector<float, kLanes>;

// Which lanes of the last vector of so many numbers there are. Made once and kept: compilers make
// it lane by lane.
class LastLanes {
 public:
  JAXSPARSE_INLINE explicit LastLanes(int64_t count) {
    const int64_t last = count % kLanes == 0 ? kLanes : count % kLanes;
    for (int l = 0; l < kLanes; ++l) mask_[l] = l < last ? ~0u : 0u;
  }
  // Zeros, even for NaN, in lanes that are not there.
  JAXSPARSE_INLINE Floats Of(Floats v) const {
    return BitCast<Floats>(BitCast<Vector<uint32_t, kLanes>>(v) & mask_);
  }

 private:
  Vector<uint32_t, kLanes> mask_;
};

// Keeps what was loaded in a register. GCC makes the load part of every instruction that uses it,
// and so loads as often, which takes twice as long where a vector lies across lines of the cache.
JAXSPARSE_INLINE void KeepInRegister([[maybe_unused]] Floats& v) {
#ifdef __x86_64__
  asm("" : "+v"(v));
#endif
}

// Lanes 0, 2, 4... of two vectors, or 1, 3, 5...
template <int kFirst>
JAXSPARSE_INLINE Floats EverySecond(Floats first, Floats second) {
  return [&]<int... kLane>(std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(first, second, (2 * kLane + kFirst)...);
  }(std::make_integer_sequence<int, kLanes>());
}

// `count` elements of a row as floats, zeros behind them up to whole vectors. The array ends at
// `end`: what a vector reads behind the row is not behind that. `lanes`: of so many elements.
template <typename T>
JAXSPARSE_INLINE void Widened(const T* from, int64_t count, const T* end, const LastLanes& lanes,
                              float* to) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Floats v = {};
    if (from + i + kLanes <= end) {
      v = Load<kLanes>(from + i);
      if (count - i < kLanes) v = lanes.Of(v);
    } else {
      for (int l = 0; l < kLanes && i + l < count; ++l) v[l] = ToFloat(from[i + l]);
    }
    Store<kLanes, float>(v, to + i);
  }
}

// Memory for `count` floats that begins where a vector does.
class AlignedFloats {
 public:
  JAXSPARSE_INLINE explicit AlignedFloats(int64_t count)
      : data_(static_cast<float*>(::operator new(sizeof(float) * count, kAlignment))) {}
  JAXSPARSE_INLINE ~AlignedFloats() { ::operator delete(data_, kAlignment); }
  AlignedFloats(const AlignedFloats&) = delete;
  AlignedFloats& operator=(const AlignedFloats&) = delete;
  JAXSPARSE_INLINE operator float*() const { return data_; }

 private:
  static constexpr auto kAlignment = std::align_val_t(kVectorBytes);
  float* data_;
};

// The rows of one image that kBand rows of windows read: at place p of a row stands what lies
// p - left columns from the image's begin. With stride 2 places of either parity stand together.
template <typename T, int kStride, int kBand = 1>
class PaddedRows {
 public:
  static constexpr int kRows = kStride * (kBand - 1) + kTaps;

  // Floats of all rows.
  JAXSPARSE_INLINE static int64_t Memory(int64_t windows, int64_t width) {
    return (kRing + 1) * kStride * Length(windows) + FlatLength(width);
  }

  // `memory` begins where a vector does.
  JAXSPARSE_INLINE PaddedRows(float* memory, int64_t width, int64_t height, int64_t windows,
                              int64_t left)
      : memory_(memory),
        length_(Length(windows)),
        height_(height),
        width_(width),
        left_(left),
        count_(Between(0, kStride * (windows - 1) + kTaps - left, width)),
        last_lanes_(count_) {
    for (int64_t i = 0; i < Memory(windows, width); ++i) memory[i] = 0;
  }

  // From now on rows of the image that begins here, in an array that ends at `end`.
  JAXSPARSE_INLINE void Begin(const T* image, const T* end) {
    image_ = image;
    end_ = end;
    next_ = INT64_MIN;
  }

  // Some of the rows, as windows read them.
  struct Taken {
    const float* rows[kRows];
    int64_t length;

    // What windows from `window` on read of a row, by column j of their kernel.
    JAXSPARSE_INLINE Floats At(int row, int j, int64_t window) const {
      return LoadRaw<kLanes>(rows[row] + (j % kStride) * length + window + j / kStride);
    }
  };

  // The kRows rows from `first` on; calls for one image have rising rows.
  JAXSPARSE_INLINE Taken Take(int64_t first) {
    const int64_t end = first + kRing < height_ ? first + kRing : height_;
    int64_t row = first > next_ ? first : next_;
    for (row = row > 0 ? row : 0; row < end; ++row) Copy(row);
    next_ = end;
    Taken taken;
    taken.length = length_;
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first + i;
      const int64_t place = row >= 0 && row < height_ ? row % kRing : kRing;
      taken.rows[i] = memory_ + place * kStride * length_ + kBefore - (kStride == 1 ? left_ : 0);
    }
    return taken;
  }

 private:
  // Rows are written some time before they are read, as many as there is room for: a load that
  // overlaps a store in part waits until that is in the cache.
  static constexpr int64_t kRing = kBand == 1 ? 8 : 16;
  static_assert(kRows + 4 <= kRing);
  // With stride 1 a row's padding lies behind this many floats, so that its first column is where
  // a vector begins.
  static constexpr int64_t kBefore = kStride == 1 ? kLanes : 0;

  // Places of a row, with room for the last vector of windows.
  JAXSPARSE_INLINE static int64_t Length(int64_t windows) {
    return kBefore + CeilDivide(windows + 4, kLanes) * kLanes + kLanes;
  }
  // A row before its parities are parted, as pairs of vectors.
  JAXSPARSE_INLINE static int64_t FlatLength(int64_t width) {
    return kStride == 1 ? 0 : CeilDivide(width, 2 * kLanes) * 2 * kLanes;
  }

  JAXSPARSE_INLINE void Copy(int64_t row) {
    float* to = memory_ + row % kRing * kStride * length_;
    const T* from = image_ + row * width_;
    if constexpr (kStride == 1) {
      Widened(from, count_, end_, last_lanes_, to + kBefore);
    } else {
      float* flat = memory_ + (kRing + 1) * kStride * length_;
      Widened(from, count_, end_, last_lanes_, flat);
      // Column c is at place c + left.
      float* even = to + left_ % 2 * length_ + left_ / 2;
      float* odd = to + (left_ + 1) % 2 * length_ + (left_ + 1) / 2;
      for (int64_t i = 0; i < count_; i += 2 * kLanes) {
        const Floats first = LoadRaw<kLanes>(flat + i), second = LoadRaw<kLanes>(flat + i + kLanes);
        Store<kLanes, float>(EverySecond<0>(first, second), even + i / 2);
        Store<kLanes, float>(EverySecond<1>(first, second), odd + i / 2);
      }
    }
  }

  float* memory_;
  int64_t length_, height_, width_, left_, count_, next_ = 0;
  LastLanes last_lanes_;
  const T *image_ = nullptr, *end_ = nullptr;
};

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
