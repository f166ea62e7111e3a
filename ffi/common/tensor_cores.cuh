// Products on tensor cores of tiles in shared memory; those of float32 as exact as in float32.
//
// A float32 is the sum of three bfloat16 numbers of 8 bits each. Of the nine products of two such
// sums the six largest are taken; what is left out is below 2^-23 of the product. Tensor cores cut
// off what does not fit when they add, always towards zero, so only few products are summed there
// before they are added to the result as float32 numbers are.
#pragma once

#include "common/packet.cuh"

namespace jaxsparse {

// Matrices of 16 bits that stand for one of T, and what is in them.
template <typename T>
constexpr int kPlanes = 1;
template <>
constexpr int kPlanes<float> = 3;
template <typename T>
struct InPlanes {
  using type = T;
};
template <>
struct InPlanes<float> {
  using type = bfloat16;
};

__device__ __forceinline__ bool IsFinite(bfloat16 x) { return (x.bits & 0x7f80) != 0x7f80; }
__device__ __forceinline__ bool IsFinite(float16 x) { return (x.bits & 0x7c00) != 0x7c00; }

// Two neighbours in each plane, the first one in the lower half of a word. `finite` becomes false
// for NaN and infinite numbers, which would spoil what they meet in a tile, and in float32 for
// those next to infinite, too.
__device__ __forceinline__ void Split(float x, float y, uint32_t (&words)[3], bool* finite) {
#pragma unroll
  for (int plane = 0; plane < 3; ++plane) {
    words[plane] = BfloatsOfFloats(x, y);
    if (plane == 2) break;
    x -= __uint_as_float(words[plane] << 16);
    y -= __uint_as_float(words[plane] & 0xffff0000u);
  }
  *finite = *finite && x == x && y == y;  // infinity less infinity is NaN
}
template <typename T>
__device__ __forceinline__ void Split(T x, T y, uint32_t (&words)[1], bool* finite) {
  words[0] = x.bits | static_cast<uint32_t>(y.bits) << 16;
  *finite = *finite && IsFinite(x) && IsFinite(y);
}

// One number.
__device__ __forceinline__ void SplitOne(float x, uint32_t (&words)[3]) {
#pragma unroll
  for (int plane = 0; plane < 3; ++plane) {
    words[plane] = BfloatOfFloat(x);
    x -= __uint_as_float(words[plane] << 16);
  }
}
template <typename T>
__device__ __forceinline__ void SplitOne(T x, uint32_t (&words)[1]) {
  words[0] = x.bits;
}

// One plane of a tile: rows of kWidth numbers of 16 bits, in chunks of 16 bytes whose order changes
// from row to row, so that eight rows' chunks of one column lie in different banks.
template <int kRowCount, int kWidth>
struct Plane {
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

// A tile of a row-major matrix on its way through the registers of kThreads threads to its planes:
// kHeight rows of kWidth numbers.
template <typename T, int kHeight, int kWidth, int kThreads, typename To = Plane<kHeight, kWidth>>
class TileInRegisters {
  static constexpr int kPacket = 16 / sizeof(T);
  static constexpr int kOfRow = kWidth / kPacket;
  static constexpr int kRowsAtOnce = kThreads / kOfRow;
  static constexpr int kCount = kHeight / kRowsAtOnce;
  static_assert(kThreads % kOfRow == 0 && kHeight % kRowsAtOnce == 0);
  Packet<T, kPacket> packets_[kCount];

 public:
  // Whether tiles of this matrix can be loaded by packets.
  __device__ __forceinline__ static bool IsWide(const T* matrix, int64_t width) {
    return width % kPacket == 0 && IsAligned<Packet<T, kPacket>>(matrix);
  }

  // From row `top` and column `side` on. Places beyond the matrix are 0.
  __device__ __forceinline__ void Load(const T* matrix, int64_t height, int64_t width, int64_t top,
                                       int64_t side, bool wide, unsigned thread) {
    const int row = thread / kOfRow, column = thread % kOfRow * kPacket;
    const int rows = static_cast<int>(height - top < kHeight ? height - top : kHeight);
    const int columns = static_cast<int>(width - side < kWidth ? width - side : kWidth);
    const T* from = matrix + (top + row) * width + side + column;
    if (wide) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        packets_[i] = {};
        if (row + i * kRowsAtOnce < rows && column < columns) {
          packets_[i] = LoadPacket<kPacket>(from, true);
        }
        from += kRowsAtOnce * width;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      packets_[i] = {};
#pragma unroll
      for (int e = 0; e < kPacket; ++e) {
        if (row + i * kRowsAtOnce < rows && column + e < columns) packets_[i].elements[e] = from[e];
      }
      from += kRowsAtOnce * width;
    }
  }

  __device__ __forceinline__ void Store(unsigned char* planes, unsigned thread,
                                        bool* finite) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      Packet<uint32_t, kPacket / 2> words[kPlanes<T>];
#pragma unroll
      for (int e = 0; e < kPacket; e += 2) {
        uint32_t pair[kPlanes<T>];
        Split(packets_[i].elements[e], packets_[i].elements[e + 1], pair, finite);
#pragma unroll
        for (int plane = 0; plane < kPlanes<T>; ++plane) words[plane].elements[e / 2] = pair[plane];
      }
      unsigned char* to =
          planes + To::At(thread / kOfRow + i * kRowsAtOnce, thread % kOfRow * kPacket);
#pragma unroll
      for (int plane = 0; plane < kPlanes<T>; ++plane) {
        *reinterpret_cast<Packet<uint32_t, kPacket / 2>*>(to + plane * To::kBytes) = words[plane];
      }
    }
  }
};

// One warp's part of a product: 16 * kRowTiles rows of a by 8 * kColumnTiles columns of b.
template <typename T, int kRowTiles, int kColumnTiles>
struct WarpProduct {
  static_assert(kColumnTiles % 2 == 0);
  float sums[kRowTiles][kColumnTiles][4] = {};

  // Calls with (row, column, two neighbouring sums) for each pair that this lane has.
  template <typename Function>
  __device__ __forceinline__ void ForEachPair(Function function) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          function(r * 16 + half * 8 + lane / 4, c * 8 + lane % 4 * 2, sums[r][c][2 * half],
                   sums[r][c][2 * half + 1]);
        }
      }
    }
  }

  // Adds the product over 16 places of the inner dimension, from `k` on. `a` has rows of the inner
  // dimension, from `row` on; so has `b`, from `column` on, or, transposed, it has columns of it.
  template <typename PlaneA, typename PlaneB, bool kTransposed>
  __device__ __forceinline__ void Add(const unsigned char* a, const unsigned char* b, int row,
                                      int column, int k) {
    const int lane = threadIdx.x % kWarp;
    uint32_t of_a[kPlanes<T>][kRowTiles][4];
#pragma unroll
    for (int plane = 0; plane < kPlanes<T>; ++plane) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        LoadMatrices(of_a[plane][r], a + plane * PlaneA::kBytes +
                                         PlaneA::At(row + r * 16 + lane % 16, k + lane / 16 * 8));
      }
    }
#pragma unroll
    for (int c = 0; c < kColumnTiles; c += 2) {
      uint32_t of_b[kPlanes<T>][4];
#pragma unroll
      for (int plane = 0; plane < kPlanes<T>; ++plane) {
        const unsigned char* from = b + plane * PlaneB::kBytes;
        if constexpr (kTransposed) {
          LoadMatricesTransposed(of_b[plane],
                                 from + PlaneB::At(k + lane % 16, column + c * 8 + lane / 16 * 8));
        } else {
          LoadMatrices(of_b[plane], from + PlaneB::At(column + c * 8 + lane % 8 + lane / 16 * 8,
                                                      k + lane / 8 % 2 * 8));
        }
      }
      AddTiles(of_a, of_b, c);
    }
  }

 private:
  // To tiles c and c + 1 of each row.
  __device__ __forceinline__ void AddTiles(const uint32_t (&a)[kPlanes<T>][kRowTiles][4],
                                           const uint32_t (&b)[kPlanes<T>][4], int c) {
    const auto add = [&](int of_a, int of_b, auto&& sums_of) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          MultiplyAdd(typename InPlanes<T>::type(), sums_of(r, half), a[of_a][r], b[of_b][2 * half],
                      b[of_b][2 * half + 1]);
        }
      }
    };
    if constexpr (kPlanes<T> == 1) {
      add(0, 0, [&](int r, int half) -> float (&)[4] { return sums[r][c + half]; });
    } else {
      // The smallest products first; those of one sum not next to one another, as each waits for
      // the one before it.
      float parts[kRowTiles][2][4] = {};
#pragma unroll
      for (int order = kPlanes<T> - 1; order >= 0; --order) {
#pragma unroll
        for (int i = 0; i <= order; ++i) {
          add(i, order - i, [&](int r, int half) -> float (&)[4] { return parts[r][half]; });
        }
      }
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[r][c + half][i] += parts[r][half][i];
        }
      }
    }
  }
};

}  // namespace jaxsparse
