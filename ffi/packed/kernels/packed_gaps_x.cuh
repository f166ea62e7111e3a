// Rows of x on their way to shared memory, where lanes that walk over numbers find them
// (PackedGapsConfig). All warps of a block bring them.
#pragma once

#include "cuda/vector_access.cuh"
#include "packed/kernels/packed_gaps.h"

namespace jaxsparse {

// By units, each of one thread; some are loaded before there is room for them.
template <typename T, PackedGapsConfig kConfig>
class GapXUnits {
  static constexpr int kColumns = kConfig.columns;
  static constexpr int kAtOnce = kColumns == 1 ? 16 : kColumns < 8 ? 8 : 1;
  static constexpr bool kVectors = kColumns > 1 && !kConfig.x_on_left;
  static constexpr int kUnit = kConfig.UnitBytes(), kCopies = kConfig.Copies();
  using Unit = Vector<T, kColumns>;
  const T* from_;  // the next row to load
  int64_t apart_, columns_apart_;
  int columns_, next_, end_;  // that x has from there on; rows
  bool wide_;
  Unit units_[kAtOnce];

  __device__ __forceinline__ Unit Load() {
    Unit unit = {};
    if (next_ < end_) {
      if (kVectors && wide_) {
        unit = *reinterpret_cast<const Unit*>(from_);
      } else {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (i < columns_) unit.elements[i] = from_[i * columns_apart_];
        }
      }
    }
    next_ += blockDim.x;
    from_ += apart_;
    return unit;
  }
  // Lanes of different rows begin with different copies, which are in different banks.
  __device__ __forceinline__ static void Store(uint32_t row, uint32_t first_copy,
                                               const Unit& unit) {
#pragma unroll
    for (uint32_t i = 0; i < kCopies; ++i) {
      const uint32_t address = row + (first_copy + i) % kCopies * (kGapLanes * kUnit);
      if constexpr (kColumns == 1) {
        StoreShared(address, ToAccumulator(unit.elements[0]));
      } else {
        SharedAt<Unit>(address) = unit;
      }
    }
  }

 public:
  // Begins with rows of x, from one on.
  __device__ __forceinline__ GapXUnits(const PackedProblem& p, int first_row, int first_column)
      : columns_(static_cast<int>(p.n) - first_column),
        next_(threadIdx.x),
        end_(static_cast<int>(p.k) - first_row) {
    const int64_t pitch = kConfig.x_on_left ? 1 : p.n;
    columns_apart_ = kConfig.x_on_left ? p.k : 1;
    from_ = static_cast<const T*>(p.x.data) + (int64_t{first_row} + next_) * pitch +
            first_column * columns_apart_;
    apart_ = pitch * blockDim.x;
    wide_ = p.n % kColumns == 0 && IsAligned<Unit>(p.x.data);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) units_[i] = Load();
  }
  // So many rows in all, those behind the end of x as zeros.
  __device__ __forceinline__ void Store(uint32_t to, int rows) {
    const uint32_t thread = threadIdx.x, place = thread / kGapLanes;
    const uint32_t apart = blockDim.x / kGapLanes * kConfig.kRowBytes;
    to += place * kConfig.kRowBytes + thread % kGapLanes * kUnit;
    const auto threads = static_cast<int>(blockDim.x);
#pragma unroll 1
    for (auto row = static_cast<int>(thread); row < rows;) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (row < rows) Store(to, place % kCopies, units_[i]);
        row += threads;
        to += apart;
      }
      if (row >= rows) break;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) units_[i] = Load();
    }
  }
};

// Eight columns that are rows of numbers side by side, 16 bytes each, which lie there as they do in
// shared memory.
template <typename T>
__device__ __forceinline__ void CopyGapX(const PackedProblem& p, int first_row, int first_column,
                                         uint32_t to, int rows) {
  const T* from = static_cast<const T*>(p.x.data) + first_column;
  const int end = static_cast<int>(p.k) - first_row;
#pragma unroll 4
  for (auto row = static_cast<int>(threadIdx.x); row < rows; row += blockDim.x) {
    AsyncCopyOrZero(to + row * 16, from + (row < end ? (int64_t{first_row} + row) * p.n : 0),
                    row < end);
  }
  WaitForCopies();
}

// Eight columns that are lines of x: a lane loads eight numbers of one of these, and a warp
// transposes matrices of 8 x 8. Some are loaded before there is room for them.
template <typename T>
class GapXLines {
  static constexpr int kVector = 8, kOfWarp = 4 * kVector, kAtOnce = 8;
  const T* from_;
  int next_, end_;  // of the lane's line; no numbers if there is none
  Words4 vectors_[kAtOnce];

  __device__ __forceinline__ Words4 Load() {
    Words4 vector = {};
    if (next_ < end_) vector = *reinterpret_cast<const Words4*>(from_);
    next_ += blockDim.x;
    from_ += blockDim.x;
    return vector;
  }
  // Of 32 rows: each lane begins with another word of its vector, so that what it stores at once
  // is in banks of its own.
  __device__ __forceinline__ static void Store(uint32_t to, const Words4& vector) {
    const uint32_t lane = threadIdx.x % kWarp, first = lane % 4;
    const bool one = (first & 1) != 0, two = (first & 2) != 0;
    const uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
    uint32_t by_one[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) by_one[j] = one ? words[(j + 1) % 4] : words[j];
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) {
      const uint32_t pair = TransposeMatrix(two ? by_one[(j + 2) % 4] : by_one[j]);
      const uint32_t from = lane / 8, half = lane / 4 % 2;  // lane and half of a word
      SharedAt<uint32_t>(to + from * 128 + (2 * ((j + from) % 4) + half) * 16 + lane % 4 * 4) =
          pair;
    }
  }

 public:
  __device__ __forceinline__ void Begin(const PackedProblem& p, int first_row, int first_column) {
    const int lane = threadIdx.x % kWarp, line = first_column + lane / 4;
    next_ = static_cast<int>(threadIdx.x / kWarp) * kOfWarp + lane % 4 * kVector;
    end_ = line < p.n ? static_cast<int>(p.k) - first_row : 0;
    from_ = static_cast<const T*>(p.x.data) + int64_t{line} * p.k + first_row + next_;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) vectors_[i] = Load();
  }
  // So many rows in all; up to 31 more become zeros.
  __device__ __forceinline__ void Store(uint32_t to, int rows) {
    constexpr int kBytes = kOfWarp * 16;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const auto threads = static_cast<int>(blockDim.x);
    to += warp * kBytes;
#pragma unroll 1
    for (int row = warp * kOfWarp; row < rows;) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (row < rows) Store(to, vectors_[i]);
        row += threads;
        to += threads / kOfWarp * kBytes;
      }
      if (row >= rows) break;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) vectors_[i] = Load();
    }
  }
};

// The rows of a tile of columns, from one on: construction begins to load, Store() ends it.
template <typename T, PackedGapsConfig kConfig>
class GapX : public GapXUnits<T, kConfig> {
  using GapXUnits<T, kConfig>::GapXUnits;
};

// Where x is not aligned, eight columns come number by number.
template <typename T, PackedGapsConfig kConfig>
  requires(kConfig.columns == 8)
class GapX<T, kConfig> {
  const PackedProblem& p_;
  int first_row_, first_column_;
  bool wide_;
  GapXLines<T> lines_;

 public:
  __device__ __forceinline__ GapX(const PackedProblem& p, int first_row, int first_column)
      : p_(p), first_row_(first_row), first_column_(first_column) {
    constexpr int kVector = 8;
    wide_ = (kConfig.x_on_left ? p.k : p.n) % kVector == 0 && IsAligned<Words4>(p.x.data);
    if (kConfig.x_on_left && wide_) lines_.Begin(p, first_row, first_column);
  }
  __device__ __forceinline__ void Store(uint32_t to, int rows) {
    if (!wide_) {
      GapXUnits<T, kConfig>(p_, first_row_, first_column_).Store(to, rows);
    } else if constexpr (kConfig.x_on_left) {
      lines_.Store(to, rows);
    } else {
      CopyGapX<T>(p_, first_row_, first_column_, to, rows);
    }
  }
};

}  // namespace jaxsparse
