// Vectors of queries, keys and values, of which the lanes of a group have a part each.
#pragma once

#include "cuda/vector_access.cuh"

namespace jaxsparse {

constexpr uint32_t kNoEntry = ~0u;  // in place of a column

// A matrix of one head, whose rows are kLanes * kVectors accesses of kVector numbers, or fewer
// unless kWhole.
template <typename T, int kVector, int kVectors, int kLanes, bool kWhole>
class LaneRows {
 public:
  using Acc = Accumulator<T>;
  using Packed = Vector<T, kVector>[kVectors];
  using Sums = Acc[kVectors][kVector];

  // Rows are `stride` numbers apart.
  __device__ __forceinline__ LaneRows(T* data, int64_t stride, int64_t size)
      : lane_(threadIdx.x % kLanes),
        size_(static_cast<uint32_t>(size)),
        stride_(static_cast<uint32_t>(stride * sizeof(T))),
        data_(reinterpret_cast<char*>(data + lane_ * kVector)) {}

  __device__ __forceinline__ void Load(uint32_t row, Packed& to) const {
    const T* from = Row(row);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      if (kWhole || Exists(i)) to[i] = LoadVector<kVector>(from + Place(i), true);
      else to[i] = {};
    }
  }
  __device__ __forceinline__ void Load(uint32_t row, Sums& to) const {
    Packed packed;
    Load(row, packed);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int e = 0; e < kVector; ++e) to[i][e] = ToAccumulator(packed[i].elements[e]);
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
                                         const Vector<T, kVector> (&y)[kVectors]) {
  Acc sum = 0;
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum += x[i][e] * ToAccumulator(y[i].elements[e]);
  }
  return sum;
}

template <typename T, int kVector, int kVectors, typename Acc>
__device__ __forceinline__ void AddMultiple(Acc factor, const Vector<T, kVector> (&x)[kVectors],
                                            Acc (&to)[kVectors][kVector]) {
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
#pragma unroll
    for (int e = 0; e < kVector; ++e) to[i][e] += factor * ToAccumulator(x[i].elements[e]);
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

// The sum over the groups of a warp, which have kLanes lanes each.
template <int kLanes, typename Acc>
__device__ __forceinline__ Acc SumOverGroups(Acc x) {
#pragma unroll
  for (int distance = kLanes; distance < kWarp; distance *= 2) {
    x += __shfl_xor_sync(kAllLanes, x, distance);
  }
  return x;
}

}  // namespace jaxsparse
