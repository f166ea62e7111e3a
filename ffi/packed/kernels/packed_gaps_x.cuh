// Rows of x on their way to shared memory, where lanes that walk over numbers find them
// (PackedGapsConfig). All warps of a block bring them.
#pragma once

#include "cuda/vector_access.cuh"
#include "packed/kernels/packed_gaps.h"

namespace jaxsparse {

// Units that threads load number by number, the first ones before shared memory is free for them.
template <typename T, PackedGapsConfig kConfig>
class GapXUnits {
  static constexpr int kColumns = kConfig.columns;
  static constexpr int kAtOnce = kColumns == 1 || kConfig.x_on_left ? 32 / kColumns : 1;
  static constexpr int kUnit = kConfig.UnitBytes(), kCopies = kConfig.Copies();
  using Unit = Vector<T, kColumns>;
  const T* from_;  // the next row to load
  int64_t apart_, columns_apart_;
  int columns_, next_, end_;  // that x has from there on; rows
  Unit units_[kAtOnce];

  __device__ __forceinline__ Unit Load() {
    Unit unit = {};
    if (next_ < end_) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        if (i < columns_) unit.elements[i] = from_[i * columns_apart_];
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
  __device__ __forceinline__ void Begin(const PackedProblem& p, int first_row, int first_column) {
    columns_ = static_cast<int>(p.n) - first_column;
    next_ = static_cast<int>(threadIdx.x);
    end_ = static_cast<int>(p.k) - first_row;
    const int64_t pitch = kConfig.x_on_left ? 1 : p.n;
    columns_apart_ = kConfig.x_on_left ? p.k : 1;
    from_ = static_cast<const T*>(p.x.data) + (int64_t{first_row} + next_) * pitch +
            first_column * columns_apart_;
    apart_ = pitch * blockDim.x;
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

// Copies units of x as they stand in memory, where columns are neighbours, without registers.
template <typename T, PackedGapsConfig kConfig>
__device__ __forceinline__ void CopyGapUnits(const PackedProblem& p, int first_row,
                                             int first_column, uint32_t to, int rows) {
  constexpr int kUnit = kConfig.UnitBytes(), kCopies = kConfig.Copies();
  const T* from = static_cast<const T*>(p.x.data) + first_column;
  const int end = static_cast<int>(p.k) - first_row;
  to += threadIdx.x % kGapLanes * kUnit;
#pragma unroll 8
  for (auto row = static_cast<int>(threadIdx.x); row < rows; row += blockDim.x) {
    const T* unit = from + (row < end ? (int64_t{first_row} + row) * p.n : 0);
    const int place = row / kGapLanes;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int copy = (i + place) % kCopies;  // other rows begin with others, in other banks
      AsyncCopyOrZero<kUnit>(to + place * kConfig.kRowBytes + copy * kGapLanes * kUnit, unit,
                             row < end);
    }
  }
}

// Eight columns, each of which is a line of x: a lane loads eight numbers of one of them, and a
// warp transposes matrices of 8 x 8. Some are loaded before there is room for them.
template <typename T>
class GapXLines {
  static constexpr int kVector = 8, kOfWarp = 4 * kVector, kAtOnce = 16;
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

// The rows of a tile of columns, from one on: construction begins to load, Store() ends it. Where x
// is aligned to units they are copied, and where it is aligned to vectors of lines these are
// loaded.
template <typename T, PackedGapsConfig kConfig>
class GapX {
  static constexpr int kColumns = kConfig.columns, kVector = 8;
  static constexpr bool kLines = kConfig.x_on_left && kColumns == kVector;
  static constexpr bool kCopies = !kConfig.x_on_left && kColumns > 1;
  const PackedProblem& p_;
  int first_row_, first_column_;
  bool wide_ = false;  // aligned so
  GapXLines<T> lines_;
  GapXUnits<T, kConfig> units_;

 public:
  __device__ __forceinline__ GapX(const PackedProblem& p, int first_row, int first_column)
      : p_(p), first_row_(first_row), first_column_(first_column) {
    if constexpr (kLines || kCopies) {
      constexpr int kAligned = kLines ? kVector : kColumns;
      wide_ = (kLines ? p.k : p.n) % kAligned == 0 && IsAligned<Vector<T, kAligned>>(p.x.data);
      if (kLines && wide_) lines_.Begin(p, first_row, first_column);
    } else {
      units_.Begin(p, first_row, first_column);
    }
  }
  __device__ __forceinline__ void Store(uint32_t to, int rows) {
    if constexpr (kLines || kCopies) {
      if (!wide_) {
        units_.Begin(p_, first_row_, first_column_);
        units_.Store(to, rows);
      } else if constexpr (kLines) {
        lines_.Store(to, rows);
      } else {
        CopyGapUnits<T, kConfig>(p_, first_row_, first_column_, to, rows);
        WaitForCopies();
      }
    } else {
      units_.Store(to, rows);
    }
  }
};

}  // namespace jaxsparse
