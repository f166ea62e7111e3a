// Streams of lanes whose numbers have 8 bits (packed/problem.h): how they become pairs of what x
// is, exactly, and fragments of 16 x 16 places.
#pragma once

#include "cuda/device.cuh"
#include "packed/kernels/lane_streams.cuh"

namespace jaxsparse {

// How two numbers become a pair of T, exactly, but for a factor that scales of rows make up for.
// Each stands in one byte of a half of `bytes`, kAt bits from its right, beside zeros.
template <typename T, PackedNumbers kNumbers>
struct PairOfBytes;

// Plain numbers are no bytes.
template <typename T>
struct PairOfBytes<T, PackedNumbers::kPlain> {
  static constexpr float kFactor = 1;
};

// Of u, which is 128 more than a number, the bits are the bfloat16 u 2^-133: the least normal
// numbers are as far from one another as those below them.
template <>
struct PairOfBytes<bfloat16, PackedNumbers::kInt8> {
  static constexpr int kAt = 0;
  static constexpr float kFactor = 64;

  __device__ __forceinline__ static uint32_t Make(uint32_t bytes) {
    constexpr uint32_t kLargest = 0x7f007f00u, kMinusTwo = 0xc000c000u;  // 2^127
    return MultiplyAddBfloats(bytes ^ 0x00800080u, kLargest, kMinusTwo);
  }
};

// Behind the bits of 2^10 they are the float16 2^10 + u.
template <>
struct PairOfBytes<float16, PackedNumbers::kInt8> {
  static constexpr int kAt = 0;
  static constexpr float kFactor = 1;

  __device__ __forceinline__ static uint32_t Make(uint32_t bytes) {
    constexpr uint32_t kOne = 0x3c003c00u, kOfZero = 0xe480e480u;  // -(2^10 + 128)
    return MultiplyAddHalves(bytes ^ 0x64806480u, kOne, kOfZero);
  }
};

// Of e4m3 exponent and fraction move to where T has them, so many bits to the right; its exponents
// have another bias, for which a product makes up. Without that, sums of small x would have fewer
// bits than float32 has.
template <int kShift>
__device__ __forceinline__ uint32_t MovedE4M3(uint32_t bytes) {
  return (bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> kShift;
}
constexpr uint32_t kMinusZeros = 0x80008000u;  // to which zeros of either sign add as they are

template <>
struct PairOfBytes<bfloat16, PackedNumbers::kE4M3> {
  static constexpr int kAt = 8;
  static constexpr float kFactor = 1;

  __device__ __forceinline__ static uint32_t Make(uint32_t bytes) {
    constexpr uint32_t kBias = 0x7b807b80u;  // 2^120
    return MultiplyAddBfloats(MovedE4M3<4>(bytes), kBias, kMinusZeros);
  }
};

template <>
struct PairOfBytes<float16, PackedNumbers::kE4M3> {
  static constexpr int kAt = 8;
  static constexpr float kFactor = 1;

  __device__ __forceinline__ static uint32_t Make(uint32_t bytes) {
    constexpr uint32_t kBias = 0x5c005c00u;  // 2^8
    return MultiplyAddHalves(MovedE4M3<1>(bytes), kBias, kMinusZeros);
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

// A pair that Make has made, without the factor.
template <typename T, PackedNumbers kNumbers>
__device__ __forceinline__ uint32_t WholePair(uint32_t pair) {
  constexpr float kFactor = PairOfBytes<T, kNumbers>::kFactor;
  if constexpr (kFactor == 1) return pair;
  else return MultiplyAddBfloats(pair, BfloatsOfFloats(kFactor, kFactor), kMinusZeros);
}

// Number `i` of the lane in a row of words, by itself, over the factor.
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
