// Vectors of queries, keys and values, of which the lanes of a group have a part each.
#pragma once

#include "cuda/vector_access.cuh"

namespace jaxsparse {

constexpr uint32_t kNoEntry = ~0u;  // in place of a column

// Neighbouring numbers as they are read by one access. In 16 bits they stay in pairs: as numbers of
// their own they would take a register each.
template <typename T, int kCount>
struct PackedNumbers {
  Vector<T, kCount> numbers;

  __device__ __forceinline__ void Load(const T* from) { numbers = LoadVector<kCount>(from, true); }
  __device__ __forceinline__ Accumulator<T> At(int i) const {
    return ToAccumulator(numbers.elements[i]);
  }
};

__device__ __forceinline__ float LowerOf(uint32_t pair, bfloat16) {
  return __uint_as_float(pair << 16);
}
__device__ __forceinline__ float UpperOf(uint32_t pair, bfloat16) {
  return __uint_as_float(pair & 0xffff0000u);
}
__device__ __forceinline__ float LowerOf(uint32_t pair, float16) {
  return FloatOfHalf(static_cast<uint16_t>(pair));
}
__device__ __forceinline__ float UpperOf(uint32_t pair, float16) {
  return FloatOfHalf(static_cast<uint16_t>(pair >> 16));
}

template <typename T, int kCount>
  requires(sizeof(T) == 2 && kCount > 1)
struct PackedNumbers<T, kCount> {
  Vector<uint32_t, kCount / 2> pairs;

  __device__ __forceinline__ void Load(const T* from) {
    pairs = LoadVector<kCount / 2>(reinterpret_cast<const uint32_t*>(from), true);
  }
  __device__ __forceinline__ float At(int i) const {
    const uint32_t pair = pairs.elements[i / 2];
    return i % 2 == 0 ? LowerOf(pair, T{}) : UpperOf(pair, T{});
  }
};

// A matrix of one head. Rows have `size` numbers and are `stride` numbers apart.
template <typename T>
struct CsrMatrix {
  T* data;
  int64_t stride, size;
};

// A matrix whose rows are kLanes * kVectors accesses of kVector numbers, or fewer unless kWhole.
template <typename T, int kVector, int kVectors, int kLanes, bool kWhole>
class LaneRows {
 public:
  using Acc = Accumulator<T>;
  using Packed = PackedNumbers<T, kVector>[kVectors];
  using Sums = Acc[kVectors][kVector];

  // `part`: of each access, the one of the lanes' that is this lane's.
  __device__ __forceinline__ LaneRows(const CsrMatrix<T>& matrix, uint32_t part)
      : lane_(part % kLanes),
        size_(static_cast<uint32_t>(matrix.size)),
        stride_(static_cast<uint32_t>(matrix.stride * sizeof(T))),
        data_(reinterpret_cast<char*>(matrix.data + lane_ * kVector)) {}

  // Zeros in place of what does not exist.
  __device__ __forceinline__ void Load(uint32_t row, Packed& to) const {
    const T* from = Row(row);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (!kWhole) to[i] = {};
      if (kWhole || Exists(i)) to[i].Load(from + Place(i));
    }
  }
  static __device__ __forceinline__ void Clear(Packed& to) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) to[i] = {};
  }
  __device__ __forceinline__ void Load(uint32_t row, Sums& to) const {
    Packed packed;
    Load(row, packed);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) to[i][e] = packed[i].At(e);
    }
  }
  __device__ __forceinline__ void Store(uint32_t row, const Sums& from) const {
    T* to = Row(row);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Vector<T, kVector> packed;
#pragma unroll
      for (int e = 0; e < kVector; ++e) FromAccumulator(from[i][e], &packed.elements[e]);
      if (kWhole || Exists(i)) *reinterpret_cast<Vector<T, kVector>*>(to + Place(i)) = packed;
    }
  }

  __device__ __forceinline__ uint32_t size() const { return size_; }

  // A row's sums as accumulators, anywhere.
  __device__ __forceinline__ void StoreSums(const Sums& from, Acc* to) const {
    ForEach([&](int i, int e) { to[NumberOf(i, e)] = from[i][e]; });
  }
  // to += factor * from
  __device__ __forceinline__ void AddSums(const Acc* from, Acc factor, Sums& to) const {
    ForEach([&](int i, int e) { to[i][e] += factor * from[NumberOf(i, e)]; });
  }

 private:
  __device__ __forceinline__ T* Row(uint32_t row) const {
    return reinterpret_cast<T*>(data_ + MultiplyWide(row, stride_));
  }
  static constexpr __device__ int Place(int i) { return i * kLanes * kVector; }
  __device__ __forceinline__ uint32_t NumberOf(int i, int e) const {
    return Place(i) + lane_ * kVector + e;
  }
  __device__ __forceinline__ bool Exists(int i) const { return NumberOf(i, 0) < size_; }
  template <typename F>
  __device__ __forceinline__ void ForEach(F&& f) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        if (kWhole || Exists(i)) f(i, e);
      }
    }
  }

  uint32_t lane_, size_, stride_;
  char* data_;
};

// What a lane has of the product of two vectors.
template <typename T, int kVector, int kVectors, typename Acc>
__device__ __forceinline__ Acc PartOfDot(const Acc (&x)[kVectors][kVector],
                                         const PackedNumbers<T, kVector> (&y)[kVectors]) {
  Acc sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum += x[i][e] * y[i].At(e);
  }
  return sum;
}

template <typename T, int kVector, int kVectors, typename Acc>
__device__ __forceinline__ void AddMultiple(Acc factor,
                                            const PackedNumbers<T, kVector> (&x)[kVectors],
                                            Acc (&to)[kVectors][kVector]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) to[i][e] += factor * x[i].At(e);
  }
}

template <int kVector, int kVectors, typename Acc, typename F>
__device__ __forceinline__ void ForEachSum(Acc (&sums)[kVectors][kVector], F&& f) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) sums[i][e] = f(sums[i][e]);
  }
}

template <int kVector, int kVectors, typename Acc>
__device__ __forceinline__ bool AreFinite(const Acc (&sums)[kVectors][kVector]) {
  Acc zero = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) zero += sums[i][e] * 0;
  }
  return zero == 0;
}

}  // namespace jaxsparse
