// What every kernel needs: 16-bit types, accumulators, sums over lanes, reading a pattern. It
// includes no CUDA header, so that NVRTC needs none at run time and compiles in milliseconds.
#pragma once

#include "cuda/arithmetic_instructions.cuh"
#include "cuda/instructions.cuh"
#include "cuda/matrix_instructions.cuh"

namespace jaxsparse {

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

__device__ __forceinline__ float ToAccumulator(float x) { return x; }
__device__ __forceinline__ double ToAccumulator(double x) { return x; }
__device__ __forceinline__ float ToAccumulator(bfloat16 x) {
  return __uint_as_float(static_cast<uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float ToAccumulator(float16 x) { return FloatOfHalf(x.bits); }

__device__ __forceinline__ void FromAccumulator(float x, float* to) { *to = x; }
__device__ __forceinline__ void FromAccumulator(double x, double* to) { *to = x; }
__device__ __forceinline__ void FromAccumulator(float x, bfloat16* to) {
  to->bits = BfloatOfFloat(x);
}
__device__ __forceinline__ void FromAccumulator(float x, float16* to) { to->bits = HalfOfFloat(x); }

// A number of the first argument's type that is a half of a word.
__device__ __forceinline__ float NumberOfHalf(bfloat16, uint32_t word, bool upper) {
  return __uint_as_float(upper ? word & 0xffff0000u : word << 16);
}
__device__ __forceinline__ float NumberOfHalf(float16, uint32_t word, bool upper) {
  return FloatOfHalf(static_cast<uint16_t>(upper ? word >> 16 : word));
}

// Two numbers of the first argument's type in a word, the first one in its lower half.
__device__ __forceinline__ uint32_t PairOf(bfloat16, float low, float high) {
  return BfloatsOfFloats(low, high);
}
__device__ __forceinline__ uint32_t PairOf(float16, float low, float high) {
  return HalvesOfFloats(low, high);
}

// d += a b on tensor cores, of numbers of the first argument's type.
__device__ __forceinline__ void MultiplyAdd(bfloat16, float (&d)[4], const uint32_t (&a)[4],
                                            uint32_t b0, uint32_t b1) {
  MultiplyAddBfloats(d, a, b0, b1);
}
__device__ __forceinline__ void MultiplyAdd(float16, float (&d)[4], const uint32_t (&a)[4],
                                            uint32_t b0, uint32_t b1) {
  MultiplyAddHalves(d, a, b0, b1);
}
__device__ __forceinline__ void MultiplyAdd(bfloat16, float (&d)[4], const uint32_t (&a)[2],
                                            uint32_t b) {
  MultiplyAddBfloats(d, a, b);
}
__device__ __forceinline__ void MultiplyAdd(float16, float (&d)[4], const uint32_t (&a)[2],
                                            uint32_t b) {
  MultiplyAddHalves(d, a, b);
}

// The same of a warpgroup; b is a SharedMatrix.
template <bool kTransposed, int kCount>
__device__ __forceinline__ void MultiplyAdd(bfloat16, float (&d)[kCount], const uint32_t (&a)[4],
                                            uint64_t b) {
  MultiplyAddBfloats<kTransposed>(d, a, b);
}
template <bool kTransposed, int kCount>
__device__ __forceinline__ void MultiplyAdd(float16, float (&d)[kCount], const uint32_t (&a)[4],
                                            uint64_t b) {
  MultiplyAddHalves<kTransposed>(d, a, b);
}

// Sums of 16-bit products are taken in float32.
template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

constexpr unsigned kAllLanes = 0xffffffffu;

// The sum over groups of `lanes` neighbouring lanes (a power of 2), the same in each lane of a
// group. The order is fixed, so results repeat bitwise.
template <typename Acc>
__device__ __forceinline__ Acc SumOverLanes(Acc x, int lanes) {
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

// Of kLanes sums a lane's parts: of a group of as many neighbouring lanes, lane k receives the
// whole of sum k. They hand over the half that the other one keeps, so that it takes kLanes - 1
// exchanges.
template <int kLanes, typename Acc>
__device__ __forceinline__ Acc ExchangeSums(Acc (&sums)[kLanes]) {
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const bool upper = (threadIdx.x & half) != 0;
#pragma unroll
    for (int k = 0; k < half; ++k) {
      const Acc other = upper ? sums[k] : sums[k + half];
      const Acc own = upper ? sums[k + half] : sums[k];
      sums[k] = own + __shfl_xor_sync(kAllLanes, other, half);
    }
  }
  return sums[0];
}

// The stored entries of one row: bounds that can't leave the arrays, whatever the offsets say.
struct RowBounds {
  int64_t begin, end;
  __device__ RowBounds(const int32_t* row_offsets, int64_t row, int64_t nse) {
    begin = Clamp(row_offsets[row], nse);
    end = Clamp(row_offsets[row + 1], nse);
  }
  // In 32 bits, which count all entries and take half the instructions.
  __device__ static uint32_t Clamp(int32_t offset, int64_t nse) {
    const auto last = static_cast<int32_t>(nse);
    const int32_t least = offset < last ? offset : last;
    return least > 0 ? least : 0;
  }
};

// An index of one of so many things, at least one, whatever an array of indices says: it may be
// that of a damaged file. One instruction, since what is negative is large.
__device__ __forceinline__ uint32_t Within(uint32_t index, int64_t count) {
  const uint32_t last = static_cast<uint32_t>(count) - 1;
  return index < last ? index : last;
}

__device__ __forceinline__ int Clamp(int x, int least, int most) {
  return x < least ? least : x > most ? most : x;
}

// The first of a row's entries from each of some columns on, in as many steps whatever they are; of
// a row in any order some entries, later ones for later columns. All are looked for at once.
template <int kCount, typename Index>
__device__ __forceinline__ void FirstFrom(const Index* columns, int begin, int end,
                                          const uint32_t (&wanted)[kCount], int (&first)[kCount]) {
  const Index* before = columns + begin - 1;
  uint32_t found[kCount] = {};  // that are left of it
#pragma unroll 1
  for (uint32_t left = end > begin ? end - begin : 0; left > 0; left /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t middle = found[i] + (left + 1) / 2;
      if (static_cast<uint32_t>(before[middle]) < wanted[i]) found[i] = middle;
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) first[i] = begin + static_cast<int>(found[i]);
}
template <typename Index>
__device__ __forceinline__ int FirstFrom(const Index* columns, int begin, int end,
                                         uint32_t column) {
  int first[1];
  FirstFrom<1>(columns, begin, end, {column}, first);
  return first[0];
}

}  // namespace jaxsparse
