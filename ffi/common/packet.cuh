// Wide loads and stores of neighbouring elements, where their place allows them.
#pragma once

#include "common/device.cuh"

namespace jaxsparse {

// So many elements by one access.
template <typename T, int kCount>
struct alignas(kCount * sizeof(T)) Packet {
  T elements[kCount];
};

template <typename P>
__device__ __forceinline__ bool IsAligned(const void* at) {
  return reinterpret_cast<uint64_t>(at) % sizeof(P) == 0;
}

// kCount elements; one by one where `wide` is false.
template <int kCount, typename T>
__device__ __forceinline__ Packet<T, kCount> LoadPacket(const T* from, bool wide) {
  Packet<T, kCount> packet;
  if (wide) {
    packet = *reinterpret_cast<const Packet<T, kCount>*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) packet.elements[i] = from[i];
  }
  return packet;
}

// The same where there are only `left` elements.
template <int kCount, typename T>
__device__ __forceinline__ Packet<T, kCount> LoadPacket(const T* from, bool wide, int left) {
  if (left >= kCount) return LoadPacket<kCount>(from, wide);
  Packet<T, kCount> packet = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < left) packet.elements[i] = from[i];
  }
  return packet;
}

template <typename T, int kCount>
__device__ __forceinline__ void StorePacket(T* to, const Packet<T, kCount>& packet) {
  if (IsAligned<Packet<T, kCount>>(to)) {
    *reinterpret_cast<Packet<T, kCount>*>(to) = packet;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) to[i] = packet.elements[i];
  }
}

}  // namespace jaxsparse
