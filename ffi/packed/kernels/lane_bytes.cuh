// Streams of lanes whose numbers have 8 bits (packed/problem.h): how they become pairs of what x
// is, exactly, and fragments of 16 x 16 places.
#pragma once

#include "cuda/device.cuh"
#include "packed/kernels/lane_streams.cuh"

namespace jaxsparse {

// What pairs of T are made by: a power of 2 whose unit in the last place is 1; and e4m3, whose bits
// stand so far to the left of where T has them, with exponents whose bias is so much less.
template <typename T>
struct PairsOf;

template <>
struct PairsOf<bfloat16> {
  static constexpr uint32_t kUnits = 0x43004300u, kMinusOne = 0xbf80bf80u;  // 2^7, -1
  static constexpr int kShift = 4;
  static constexpr uint32_t kBias = 0x7b807b80u;  // 2^120
  __device__ __forceinline__ static uint32_t MultiplyAdd(uint32_t a, uint32_t b, uint32_t c) {
    return MultiplyAddBfloats(a, b, c);
  }
};

template <>
struct PairsOf<float16> {
  static constexpr uint32_t kUnits = 0x64006400u, kMinusOne = 0xbc00bc00u;  // 2^10, -1
  static constexpr int kShift = 1;
  static constexpr uint32_t kBias = 0x5c005c00u;  // 2^8
  __device__ __forceinline__ static uint32_t MultiplyAdd(uint32_t a, uint32_t b, uint32_t c) {
    return MultiplyAddHalves(a, b, c);
  }
};

// A pair of T of two numbers, each of which stands in one byte of a half of `bytes`, kAt bits from
// its right, beside zeros.
template <typename T, PackedNumbers kNumbers>
struct PairOfBytes;

template <typename T>
struct PairOfBytes<T, PackedNumbers::kInt8> {
  static constexpr int kAt = 0;

  // x is the rest of its bits less 128 times its sign. The units of T and either are exact, since
  // 128 units more are the next power of 2, or one below it.
  __device__ __forceinline__ static uint32_t Make(uint32_t bytes) {
    using Pair = PairsOf<T>;
    const uint32_t rest = (bytes & 0x007f007fu) | Pair::kUnits;
    const uint32_t signs = (bytes & 0x00800080u) | Pair::kUnits;
    return Pair::MultiplyAdd(signs, Pair::kMinusOne, rest);
  }
};

template <typename T>
struct PairOfBytes<T, PackedNumbers::kE4M3> {
  static constexpr int kAt = 8;

  // Without the product, sums of small x would have fewer bits than float32 has.
  __device__ __forceinline__ static uint32_t Make(uint32_t bytes) {
    using Pair = PairsOf<T>;
    const uint32_t magnitudes = (bytes & 0x7f007f00u) >> Pair::kShift;
    constexpr uint32_t kNothing = 0x80008000u;  // -0, to which zeros of either sign add as they are
    return Pair::MultiplyAdd((bytes & 0x80008000u) | magnitudes, Pair::kBias, kNothing);
  }
};

// As LaneStreams with cells of 1: four streams, of bytes.
template <typename T, PackedNumbers kNumbers, int kRingRows>
struct LaneBytes {
  using Pair = PairOfBytes<T, kNumbers>;
  static constexpr int kStreams = 4;
  uint32_t begin;  // of the ring, for the lane
  PackedPlace<kRingRows> places[kStreams];

  __device__ explicit LaneBytes(uint32_t ring)
      : begin(ring + threadIdx.x % kWarp * 4),
        places{{begin}, {begin + 1}, {begin + 2}, {begin + 3}} {}

  __device__ __forceinline__ void Wrap() {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) places[i].Wrap(begin + i);
  }
  __device__ __forceinline__ void PadTo(uint32_t rows) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) places[i].PadTo(rows, begin + i);
  }

  // Byte 2 j + e of `stored` is 1 if number e of pair j is. One that is not takes a byte that is 0,
  // of those above what is loaded.
  __device__ __forceinline__ void Fragment(uint32_t mask, int f, uint32_t (&a)[4]) {
    // Of halves of a pair: byte 3 or 0 of the first number, 7 or 4 of the second, else 7.
    constexpr uint32_t kAbsent = Pair::kAt == 0 ? 0x77737773u : 0x77377737u,
                       kLess = 3u << Pair::kAt / 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t stored = mask >> (2 * f + half) & 0x01010101u;
      const uint32_t picked = kAbsent - kLess * stored;
      uint32_t bytes[kStreams];
#pragma unroll
      for (int i = 0; i < kStreams; ++i) {
        bytes[i] = SharedAt<const unsigned char>(places[i].at);
        places[i].at = AddProductsOfBytes(stored, 0x80u << 8 * i, places[i].at);
      }
      a[2 * half] = Pair::Make(PickBytes(bytes[0], bytes[1], picked));
      a[2 * half + 1] = Pair::Make(PickBytes(bytes[2], bytes[3], picked >> 16));
    }
  }
};

// The streams of a lane, whatever numbers are.
template <typename T, PackedNumbers kNumbers, int kCell, int kRingRows = kPackedRingRows>
struct PackedStreamsOf {
  using Type = LaneBytes<T, kNumbers, kRingRows>;
  static_assert(kCell == 1);
};
template <typename T, int kCell, int kRingRows>
struct PackedStreamsOf<T, PackedNumbers::kPlain, kCell, kRingRows> {
  using Type = LaneStreams<kCell, kRingRows>;
};

// Number `i` of the lane in a row of words, by itself.
template <typename T, PackedNumbers kNumbers>
__device__ __forceinline__ float PackedNumberAt(const unsigned char* words, int64_t row, int i) {
  const int64_t number =
      (row * kWarp + static_cast<int>(threadIdx.x % kWarp)) * NumbersOfWord(kNumbers) + i;
  if constexpr (kNumbers == PackedNumbers::kPlain) {
    return ToAccumulator(reinterpret_cast<const T*>(words)[number]);
  } else {
    using Pair = PairOfBytes<T, kNumbers>;
    const uint32_t pair = Pair::Make(static_cast<uint32_t>(words[number]) << Pair::kAt);
    return ToAccumulator(T{static_cast<uint16_t>(pair)});
  }
}

}  // namespace jaxsparse
