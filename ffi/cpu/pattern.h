// How CPU kernels read a pattern and write results whose types are known at run time only: a branch
// that is always taken the same way costs less than a copy of each kernel.
#pragma once

#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace jaxsparse {

// An index of one of `size` things, at least one, whatever an array of indices says: it may be that
// of a damaged file. What is negative is large. By a branch, which sound patterns never take: that
// is one instruction, and nothing has to wait for it.
JAXSPARSE_INLINE int64_t Within(uint32_t index, uint32_t size) {
  if (__builtin_expect_with_probability(index >= size, 0, 1.0)) return 0;
  return index;
}

// kLanes elements of an array of `size`, as accumulators. They go from register to register: stored
// one by one and loaded together, they would wait for the last store.
template <int kLanes, typename T, typename Index>
JAXSPARSE_INLINE auto Gather(const T* from, uint32_t size, const Index* indices) {
  T lanes[kLanes];
#pragma GCC unroll 16
  for (int l = 0; l < kLanes; ++l) {
    lanes[l] = from[Within(static_cast<uint32_t>(indices[l]), size)];
  }
  if constexpr (std::is_same_v<T, typename Accumulator<T>::type>) {
    Vector<T, kLanes> v;
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) v[l] = lanes[l];
    return v;
  } else {
    Vector<uint16_t, kLanes> bits;
#pragma GCC unroll 16
    for (int l = 0; l < kLanes; ++l) bits[l] = lanes[l].bits;
    return Widen<kLanes>(bits, T{});
  }
}

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
  JAXSPARSE_INLINE uint32_t operator[](int64_t i) const {
    return wide != nullptr ? static_cast<uint32_t>(wide[i]) : narrow[i];
  }
};

// `value`, or the nearest number that is `least` or more and `most` or less.
JAXSPARSE_INLINE int64_t Between(int64_t least, int64_t value, int64_t most) {
  value = value < most ? value : most;
  return value > least ? value : least;
}

// Row bounds that can't leave the arrays, whatever the offsets say.
struct RowBounds {
  int64_t begin, end;
  JAXSPARSE_INLINE RowBounds(const int32_t* row_offsets, int64_t row, int64_t nse)
      : begin(Between(0, row_offsets[row], nse)), end(Between(begin, row_offsets[row + 1], nse)) {}
};

// The rows of a task, and where their entries end.
struct TaskRows {
  int64_t first, last, end;

  JAXSPARSE_INLINE TaskRows(const RowTasks& tasks, const int32_t* row_offsets, int64_t task) {
    const int64_t part = task % tasks.per_entry;
    first = tasks.FirstRow(row_offsets, part);
    last = tasks.FirstRow(row_offsets, part + 1);
    end = last > 0 ? RowBounds(row_offsets, last - 1, tasks.pattern.nse).end : 0;
  }
};

// Which entries a buffer holds. Rows are short, so it is filled with what is behind a row as well,
// up to `limit`. A row that fits is never in two parts, and a longer one is cut at the same places
// wherever a task begins: sums do not depend on that.
struct Window {
  static constexpr int64_t kSize = 1024;
  int64_t limit;
  int64_t begin = 0, end = 0;

  // Whether entries [first, last) are here, or as many of them as there is room for.
  JAXSPARSE_INLINE bool Holds(int64_t first, int64_t last) const {
    return begin <= first && first < end && (last <= end || begin == first);
  }
  JAXSPARSE_INLINE void MoveTo(int64_t first, int64_t last) {
    if (last < limit) last = limit;
    begin = first;
    end = last - first < kSize ? last : first + kSize;
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
