// Wide loads and stores of neighbouring elements, where their place allows them.
#pragma once

#include "cuda/device.cuh"

namespace jaxsparse {

// So many elements by one access.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Vector {
  T elements[kCount];
};

template <typename P>
__device__ __forceinline__ bool IsAligned(const void* at) {
  return reinterpret_cast<uint64_t>(at) % sizeof(P) == 0;
}

// kCount elements; one by one where `wide` is false.
template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> LoadVector(const T* from, bool wide) {
  Vector<T, kCount> vector;
  if (wide) {
    vector = *reinterpret_cast<const Vector<T, kCount>*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) vector.elements[i] = from[i];
  }
  return vector;
}

// The same where there are only `left` elements.
template <int kCount, typename T>
__device__ __forceinline__ Vector<T, kCount> LoadVector(const T* from, bool wide, int left) {
  if (left >= kCount) return LoadVector<kCount>(from, wide);
  Vector<T, kCount> vector = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < left) vector.elements[i] = from[i];
  }
  return vector;
}

template <typename T, int kCount>
__device__ __forceinline__ void StoreVector(T* to, const Vector<T, kCount>& vector) {
  if (IsAligned<Vector<T, kCount>>(to)) {
    *reinterpret_cast<Vector<T, kCount>*>(to) = vector;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = vector.elements[i];
  }
}

// Stores eight numbers of 16 bits that words hold; where they are not `wide`, one by one, only as
// many as are `left`.
__device__ __forceinline__ void StoreNumbers(uint16_t* to, const uint32_t (&words)[4], bool wide,
                                             int64_t left) {
  if (wide) {
    StoreGlobal(reinterpret_cast<Words4*>(to), {words[0], words[1], words[2], words[3]});
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i < left) to[i] = static_cast<uint16_t>(words[i / 2] >> 16 * (i % 2));
  }
}

}  // namespace jaxsparse
