// Streams of lanes whose numbers have 8 bits (packed/problem.h): how they become pairs of what x
// is, exactly, and fragments of 16 x 16 places.
#pragma once

#include "cuda/device.cuh"
#include "packed/kernels/lane_streams.cuh"

namespace jaxsparse {

// How two numbers become a pair of T, exactly, but for a factor that scales of rows make up for.
// Each stands in the lower byte of a half of `bytes`, below zeros.
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
  static constexpr float kFactor = 64;

  __device__ __forceinline__ static uint32_t Make(uint32_t bytes) {
    constexpr uint32_t kLargest = 0x7f007f00u, kMinusTwo = 0xc000c000u;  // 2^127
    return MultiplyAddBfloats(bytes ^ 0x00800080u, kLargest, kMinusTwo);
  }
};

// Behind the bits of 2^10 they are the float16 2^10 + u.
template <>
struct PairOfBytes<float16, PackedNumbers::kInt8> {
  static constexpr float kFactor = 1;

  __device__ __forceinline__ static uint32_t Make(uint32_t bytes) {
    constexpr uint32_t kOne = 0x3c003c00u, kOfZero = 0xe480e480u;  // -(2^10 + 128)
    return MultiplyAddHalves(bytes ^ 0x64806480u, kOne, kOfZero);
  }
};

// Of e4m3 the sign moves by 8 bits, exponent and fraction by as many as T has them further to the
// left; its exponents have another bias, for which a product makes up. Without that, sums of small
// x would have fewer bits than float32 has.
template <int kShift>
__device__ __forceinline__ uint32_t MovedE4M3(uint32_t bytes) {
  constexpr uint32_t kFurther = 256 - (1 << kShift);  // what signs move by beside the others
  return (bytes << kShift) + (bytes & 0x00800080u) * kFurther;
}
constexpr uint32_t kMinusZeros = 0x80008000u;  // to which zeros of either sign add as they are

template <>
struct PairOfBytes<bfloat16, PackedNumbers::kE4M3> {
  static constexpr float kFactor = 1;

  __device__ __forceinline__ static uint32_t Make(uint32_t bytes) {
    constexpr uint32_t kBias = 0x7b807b80u;  // 2^120
    return MultiplyAddBfloats(MovedE4M3<4>(bytes), kBias, kMinusZeros);
  }
};

template <>
struct PairOfBytes<float16, PackedNumbers::kE4M3> {
  static constexpr float kFactor = 1;

  __device__ __forceinline__ static uint32_t Make(uint32_t bytes) {
    constexpr uint32_t kBias = 0x5c005c00u;  // 2^8
    return MultiplyAddHalves(MovedE4M3<7>(bytes), kBias, kMinusZeros);
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

  __device__ explicit LaneBytes(uint32_t ring) : begin(ring + threadIdx.x % kWarp * 4) { Begin(0); }

  __device__ __forceinline__ void Begin(uint32_t row) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) places[i].Begin(row, begin + i);
  }

  __device__ __forceinline__ void Wrap() {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) places[i].Wrap(begin + i);
  }
  __device__ __forceinline__ void PadTo(uint32_t rows) {
#pragma unroll
    for (int i = 0; i < kStreams; ++i) places[i].PadTo(rows, begin + i);
  }

  // Bit h of byte 2 j + e tells whether number e of pair j of half h of fragments is stored.
  template <int kCount>
  __device__ __forceinline__ void Fragments(uint32_t mask, int fragment, uint32_t (&a)[kCount][4]) {
    mask >>= 2 * fragment;
    const uint32_t counts = (mask & 0x55555555u) + (mask >> 1 & 0x55555555u);  // of both halves
#pragma unroll
    for (int i = 0; i < kStreams; ++i) {
      uint32_t& at = places[i].at;
#pragma unroll
      for (int h = 0; h < 2 * kCount; ++h) {
        if (h % 2 == 1) {
          // Counts stay where they are, and so many times more.
          const uint32_t row = kPackedRowBytes >> (h - 1);
          at = AddProductsOfBytes(counts & 0x03030303u << (h - 1), row << 8 * i, at);
        }
        const uint32_t from = at - h % 2 * kPackedRowBytes, stored = mask & 1u << (8 * i + h);
        uint32_t& bytes = a[h / 2][h % 2 * 2 + i / 2];
        if (i % 2 == 0) bytes = LoadSharedOrZero<unsigned char>(from, stored);
        else SetHighHalfIf(stored, SharedAt<const unsigned char>(from), &bytes);
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * kCount; ++i) a[i / 4][i % 4] = Pair::Make(a[i / 4][i % 4]);
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
    const uint32_t pair = Pair::Make(words[number]);
    return ToAccumulator(T{static_cast<uint16_t>(pair)});
  }
}

}  // namespace jaxsparse
