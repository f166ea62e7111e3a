// Types that host and device code share. NVRTC has no standard headers, so this file includes none
// for it.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#define JAXSPARSE_INLINE __host__ __device__ __forceinline__
#else
#include <cstdint>
// Internal linkage in effect: an out-of-line copy made for one instruction set must never be the
// one that the linker picks for another.
#define JAXSPARSE_INLINE [[gnu::always_inline]] inline
#endif

namespace jaxsparse {

enum class DType : int { kFloat32, kFloat64, kBFloat16, kFloat16 };
enum class IndexType : int { kInt32, kUint16 };

JAXSPARSE_INLINE int64_t SizeOf(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

constexpr int kWarp = 32;  // lanes

// As much as one instruction of a thread loads or stores.
struct alignas(16) Words4 {
  uint32_t x, y, z, w;
};
struct alignas(8) Words2 {
  uint32_t x, y;
};

// The GPU that a kernel is chosen for: an H200 unless a call says otherwise.
struct Gpu {
  int compute_capability = 90;  // 9.0
  int multiprocessors = 132;
  int64_t shared_bytes = 232448;  // that a block can have
};

// The least power of 2 that is no less than `size`, at most a warp: lanes that share a unit of
// work.
JAXSPARSE_INLINE int LanesFor(int64_t size) {
  int lanes = 1;
  while (lanes < size && lanes < kWarp) lanes *= 2;
  return lanes;
}

JAXSPARSE_INLINE int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Leading (batch) dimensions of an operation's outputs. An operand may have size 1 where the output
// has more; its stride is 0 there.
constexpr int kMaxBatchRank = 8;

struct Batch {
  int rank = 0;
  int64_t count = 1;
  int64_t sizes[kMaxBatchRank] = {};
};

// One operand or result: the first element of its first batch entry, and the distance in elements
// between neighbours along each batch dimension.
struct Array {
  void* data = nullptr;
  int64_t strides[kMaxBatchRank] = {};

  template <typename T>
  JAXSPARSE_INLINE T* At(const Batch& batch, int64_t index) const {
    int64_t offset = 0;
#ifdef __CUDACC_RTC__
#pragma unroll 1  // divisions, which would be most of a kernel's code
#endif
    for (int d = batch.rank - 1; d >= 0; --d) {
      offset += (index % batch.sizes[d]) * strides[d];
      index /= batch.sizes[d];
    }
    return static_cast<T*>(data) + offset;
  }
};

// How many of a batch's entries an operand has: 1 along dimensions in which it is broadcast.
JAXSPARSE_INLINE int64_t OwnEntries(const Batch& batch, const Array& array) {
  int64_t entries = 1;
  for (int d = 0; d < batch.rank; ++d) entries *= array.strides[d] == 0 ? 1 : batch.sizes[d];
  return entries;
}

// Which of them a batch entry reads.
JAXSPARSE_INLINE int64_t OwnEntry(const Batch& batch, const Array& array, int64_t index) {
  int64_t own = 0, distance = 1;
#ifdef __CUDACC_RTC__
#pragma unroll 1  // as in Array::At
#endif
  for (int d = batch.rank - 1; d >= 0; --d) {
    if (array.strides[d] != 0) {
      own += index % batch.sizes[d] * distance;
      distance *= batch.sizes[d];
    }
    index /= batch.sizes[d];
  }
  return own;
}

// Memory for what a call's kernels leave for one another, aligned as XLA's buffers are.
struct Workspace {
  char* data = nullptr;
  int64_t bytes = 0;
};

// The pattern that a kernel walks. Rows of a transposed product are the columns of the stored
// matrix: then `permutation` says where in the stored order each value lies, and is null otherwise.
struct Pattern {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t nse = 0;  // stored entries, padding behind row_offsets[rows] included
  IndexType index_type = IndexType::kInt32;
  Array row_offsets;     // int32 (rows + 1,)
  Array column_indices;  // index_type (nse,)
  Array row_order;       // int32 (rows,), by falling length
  Array permutation;     // int32 (nse,) or null
  Array tile_starts;     // int32, as TileStarts says, or null
};

// Whether batch entries have offsets and columns of their own along the same dimensions. Without
// stored entries there are no columns.
JAXSPARSE_INLINE bool IsBatchedAsOne(const Batch& batch, const Pattern& pattern) {
  for (int d = 0; d < batch.rank && pattern.nse > 0; ++d) {
    const bool own_offsets = pattern.row_offsets.strides[d] != 0;
    if (own_offsets != (pattern.column_indices.strides[d] != 0)) return false;
  }
  return true;
}

}  // namespace jaxsparse
