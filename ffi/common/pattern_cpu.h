// How CPU kernels read a pattern and write results whose types are known at run time only: a branch
// that is always taken the same way costs less than a copy of each kernel.
#pragma once

#include "common/simd.h"

namespace jaxsparse {

// Column indices of one batch entry, of 32 or 16 bits: the other pointer is null.
struct IndexReader {
  const int32_t* wide = nullptr;
  const uint16_t* narrow = nullptr;

  JAXSPARSE_INLINE IndexReader(const Pattern& pattern, const Batch& batch, int64_t entry) {
    if (pattern.index_type == IndexType::kInt32) {
      wide = pattern.column_indices.At<const int32_t>(batch, entry);
    } else {
      narrow = pattern.column_indices.At<const uint16_t>(batch, entry);
    }
  }
  JAXSPARSE_INLINE int64_t operator[](int64_t i) const {
    return wide != nullptr ? wide[i] : narrow[i];
  }
};

// Row bounds that can't leave the arrays, whatever the offsets say.
struct RowBounds {
  int64_t begin, end;
  JAXSPARSE_INLINE RowBounds(const int32_t* row_offsets, int64_t row, int64_t nse) {
    const auto clamp = [nse](int64_t v) { return v < 0 ? 0 : v > nse ? nse : v; };
    begin = clamp(row_offsets[row]);
    end = clamp(row_offsets[row + 1]);
  }
};

// Where the stored entries end and padding begins.
JAXSPARSE_INLINE int64_t StoredEnd(const int32_t* row_offsets, const Pattern& pattern) {
  return pattern.rows == 0 ? 0 : RowBounds(row_offsets, pattern.rows - 1, pattern.nse).end;
}

// A result of one batch entry: elements of T, or float32 where T has 16 bits. Absent if null.
template <typename T>
class OutWriter {
  using Acc = typename Accumulator<T>::type;

 public:
  JAXSPARSE_INLINE OutWriter(const Array& array, DType dtype, const Batch& batch, int64_t entry) {
    if (array.data == nullptr) return;
    if (std::is_same_v<T, Acc> || dtype == DType::kFloat32) {
      wide_ = array.At<Acc>(batch, entry);
    } else {
      narrow_ = array.At<T>(batch, entry);
    }
  }
  template <int kLanes>
  JAXSPARSE_INLINE void Write(Vector<Acc, kLanes> v, int64_t at) const {
    if (wide_ != nullptr) {
      Store<kLanes, Acc>(v, wide_ + at);
    } else if constexpr (!std::is_same_v<T, Acc>) {
      if (narrow_ != nullptr) Store<kLanes, Acc>(v, narrow_ + at);
    }
  }
  JAXSPARSE_INLINE void Write(Acc value, int64_t at) const {
    if (wide_ != nullptr) {
      wide_[at] = value;
    } else if constexpr (!std::is_same_v<T, Acc>) {
      if (narrow_ != nullptr) FromFloat(value, narrow_ + at);
    }
  }

 private:
  Acc* wide_ = nullptr;
  T* narrow_ = nullptr;
};

}  // namespace jaxsparse
