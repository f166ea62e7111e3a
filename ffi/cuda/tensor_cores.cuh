// Numbers as tensor cores take them, so that products of float32 are as exact as in float32.
//
// A float32 is the sum of three bfloat16 numbers of 8 bits each. Of the nine products of two such
// sums the six largest are taken; what is left out is below 2^-23 of the product. Tensor cores cut
// off what does not fit when they add, always towards zero, so only few products are summed there
// before they are added to the result as float32 numbers are.
#pragma once

#include "cuda/vector_access.cuh"

namespace jaxsparse {

// Matrices of 16 bits that stand for one of T: as ComponentsOf.
template <typename T>
constexpr int kComponents = 1;
template <>
constexpr int kComponents<float> = 3;

// Two neighbours in each component, the first one in the lower half of a word. Of NaN, of infinite
// numbers and in float32 of those next to infinite, some component has one of these.
__device__ __forceinline__ void Split(float x, float y, uint32_t (&words)[3]) {
#pragma unroll
  for (int component = 0; component < 3; ++component) {
    words[component] = BfloatsOfFloats(x, y);
    x -= __uint_as_float(words[component] << 16);
    y -= __uint_as_float(words[component] & 0xffff0000u);
  }
}
template <typename T>
__device__ __forceinline__ void Split(T x, T y, uint32_t (&words)[1]) {
  words[0] = x.bits | static_cast<uint32_t>(y.bits) << 16;
}

// One component of a tile: rows of kWidth numbers of 16 bits, in chunks of 16 bytes whose order
// changes from row to row, so that eight rows' chunks of one column lie in different banks.
template <int kRowCount, int kWidth>
struct SwizzledTile {
  static constexpr int kRows = kRowCount;
  static constexpr int kChunks = kWidth / 8;
  static constexpr int kBytes = kRows * kWidth * 2;
  static_assert(kWidth % 8 == 0 && (kChunks & (kChunks - 1)) == 0);

  __device__ __forceinline__ static int At(int row, int column) {
    constexpr int kTurn = kChunks < 8 ? 8 / kChunks : 1;  // rows that share 128 bytes
    constexpr int kMask = kChunks < 8 ? kChunks - 1 : 7;
    const int chunk = (column / 8) ^ (row / kTurn & kMask);
    return row * kWidth * 2 + chunk * 16 + column % 8 * 2;
  }
};

// A tile of a row-major matrix on its way through the registers of kThreads threads to its
// components: kHeight rows of kWidth numbers.
template <typename T, int kHeight, int kWidth, int kThreads,
          typename To = SwizzledTile<kHeight, kWidth>>
class TileInRegisters {
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kOfRow = kWidth / kVector;
  static constexpr int kRowsAtOnce = kThreads / kOfRow;
  static constexpr int kCount = kHeight / kRowsAtOnce;
  static_assert(kThreads % kOfRow == 0 && kHeight % kRowsAtOnce == 0);
  Vector<T, kVector> vectors_[kCount];

 public:
  // Whether tiles of this matrix can be loaded by vectors.
  __device__ __forceinline__ static bool IsWide(const T* matrix, int64_t width) {
    return width % kVector == 0 && IsAligned<Vector<T, kVector>>(matrix);
  }

  // From row `top` and column `side` on. Places beyond the matrix are 0.
  __device__ __forceinline__ void Load(const T* matrix, int64_t height, int64_t width, int64_t top,
                                       int64_t side, bool wide, unsigned thread) {
    const int row = thread / kOfRow, column = thread % kOfRow * kVector;
    const int rows = static_cast<int>(height - top < kHeight ? height - top : kHeight);
    const int columns = static_cast<int>(width - side < kWidth ? width - side : kWidth);
    const T* from = matrix + (top + row) * width + side + column;
    if (wide) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        vectors_[i] = {};
        if (row + i * kRowsAtOnce < rows && column < columns) {
          vectors_[i] = LoadVector<kVector>(from, true);
        }
        from += kRowsAtOnce * width;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      vectors_[i] = {};
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if (row + i * kRowsAtOnce < rows && column + e < columns) vectors_[i].elements[e] = from[e];
      }
      from += kRowsAtOnce * width;
    }
  }

  __device__ __forceinline__ void Store(unsigned char* components, unsigned thread) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Vector<uint32_t, kVector / 2> words[kComponents<T>];
#pragma unroll
      for (int e = 0; e < kVector; e += 2) {
        uint32_t pair[kComponents<T>];
        Split(vectors_[i].elements[e], vectors_[i].elements[e + 1], pair);
#pragma unroll
        for (int component = 0; component < kComponents<T>; ++component)
          words[component].elements[e / 2] = pair[component];
      }
      unsigned char* to =
          components + To::At(thread / kOfRow + i * kRowsAtOnce, thread % kOfRow * kVector);
#pragma unroll
      for (int component = 0; component < kComponents<T>; ++component) {
        *reinterpret_cast<Vector<uint32_t, kVector / 2>*>(to + component * To::kBytes) =
            words[component];
      }
    }
  }
};

}  // namespace jaxsparse
