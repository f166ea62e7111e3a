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
//
// A stream has one number of each half of a fragment at most. That of the first half stands where
// the lane is before both are counted, that of the second one row in front of where it is then. So
// one addition serves both, and the lane stands behind the first row of the ring or its copy.
template <typename T, PackedNumbers kNumbers, int kRingRows>
struct LaneBytes {
  using Pair = PairOfBytes<T, kNumbers>;
  using Place = PackedPlace<kRingRows>;
  static constexpr int kStreams = 4;
  uint32_t begin;  // of the ring, for the lane
  Place places[kStreams];

  __device__ explicit LaneBytes(uint32_t ring) : begin(ring + threadIdx.x % kWarp * 4) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) places[i].at = begin + i + Place::kBytes;
  }

  __device__ __forceinline__ void Wrap() {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      if (places[i].at > begin + i + Place::kBytes) places[i].at -= Place::kBytes;
    }
  }
  __device__ __forceinline__ void PadTo(uint32_t rows) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) places[i].PadTo(rows, begin + i);
  }

  // Bit 2 f + h of byte 2 j + e tells whether number e of pair j of half h of fragment f is stored.
  // One that is not takes a byte that is 0, of those above what is loaded.
  __device__ __forceinline__ void Fragment(uint32_t mask, int f, uint32_t (&a)[4]) {
    // Of halves of a pair: byte 3 or 0 of the first number, 7 or 4 of the second, else 7.
    constexpr uint32_t kAbsent = Pair::kAt == 0 ? 0x77737773u : 0x77377737u;
    constexpr uint32_t kLess = 3u << Pair::kAt / 2;
    const uint32_t counts = (mask & 0x55555555u) + (mask >> 1 & 0x55555555u);  // of both halves
    // They stay where they are, and so many times more.
    const uint32_t of_fragment = counts & 0x03030303u << 2 * f;
    const uint32_t row = kPackedRowBytes >> 2 * f;
    uint32_t bytes[2][kStreams];
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      uint32_t& at = places[i].at;
      bytes[0][i] = SharedAt<const unsigned char>(at);
      at = AddProductsOfBytes(of_fragment, row << 8 * i, at);
      bytes[1][i] = SharedAt<const unsigned char>(at - kPackedRowBytes);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t stored = mask >> (2 * f + half) & 0x01010101u;
      const uint32_t picked = kAbsent - kLess * stored;
      a[2 * half] = Pair::Make(PickBytes(bytes[half][0], bytes[half][1], picked));
      a[2 * half + 1] = Pair::Make(PickBytes(bytes[half][2], bytes[half][3], picked >> 16));
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
