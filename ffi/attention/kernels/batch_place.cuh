// Where a batch entry lies in the arrays of a problem, found by one division for each batch
// dimension and not by one for each array as well.
#pragma once

#include "cuda/device.cuh"

namespace jaxsparse {

// A batch entry's place along each batch dimension. It belongs into shared memory, where places can
// be looked up one by one.
struct BatchPlace {
  uint32_t along[kMaxBatchRank];

  __device__ __forceinline__ void Set(const Batch& batch, uint32_t entry) {
#pragma unroll 1
    for (int d = batch.rank - 1; d >= 0; --d) {
      const auto size = static_cast<uint32_t>(batch.sizes[d]);
      along[d] = entry % size;
      entry /= size;
    }
  }

  // Elements in front of the entry's.
  __device__ __forceinline__ uint32_t ElementsBefore(const Batch& batch, const Array& array) const {
    int64_t elements = 0;
#pragma unroll 1
    for (int d = 0; d < batch.rank; ++d) elements += along[d] * array.strides[d];
    return static_cast<uint32_t>(elements);
  }

  // As Array::At and OwnEntry.
  template <typename T>
  __device__ __forceinline__ T* At(const Batch& batch, const Array& array) const {
    T* at = static_cast<T*>(array.data);
#pragma unroll 1
    for (int d = 0; d < batch.rank; ++d) at += along[d] * array.strides[d];
    return at;
  }
  __device__ __forceinline__ uint32_t OwnEntry(const Batch& batch, const Array& array) const {
    uint32_t own = 0;
#pragma unroll 1
    for (int d = 0; d < batch.rank; ++d) {
      if (array.strides[d] == 0) continue;
      own = own * static_cast<uint32_t>(batch.sizes[d]) + along[d];
    }
    return own;
  }
};

}  // namespace jaxsparse
