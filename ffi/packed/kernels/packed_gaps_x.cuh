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
  static constexpr int kAtOnce = kColumns == 1 ? 16 : kConfig.x_on_left ? 32 / kColumns / 2 : 1;
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
#pragma unroll 4
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

// Copies eight columns, each of which is a line of x. A warp takes 32 rows at a time, four matrices
// of 8 x 8: it has what is its own of each line copied side by side, 64 bytes of the 512 where the
// rows will be, then loads all of it and stores it transposed. The pieces of a line of each
// matrix stand in an order of their own, so that eight lines of one matrix lie in different banks.
template <typename T>
__device__ __forceinline__ void CopyGapLines(const PackedProblem& p, int first_row,
                                             int first_column, uint32_t to, int rows) {
  constexpr int kVector = 8, kRows = 4 * kVector, kRowBytes = 2 * kVector;
  constexpr int kMatrixBytes = kVector * kRowBytes, kLineBytes = 2 * kRows;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = threadIdx.x % kWarp;
  const int line = first_column + lane / 4, end = static_cast<int>(p.k) - first_row;
  const T* from = static_cast<const T*>(p.x.data) + (line < p.n ? int64_t{line} * p.k : 0);
  const auto apart = static_cast<int>(blockDim.x);
  const auto place_of = [](int line, int matrix) {
    return line * kLineBytes + (matrix + line / 2) % 4 * 16;
  };
  to += warp * kRows * kRowBytes;
  const uint32_t copied = to + place_of(lane / 4, lane % 4);
#pragma unroll 4
  for (int row = warp * kRows, behind = 0; row < rows; row += apart, behind += apart * kRowBytes) {
    const int own = row + lane % 4 * kVector;
    const bool exists = line < p.n && own < end;
    AsyncCopyOrZero<16>(copied + behind, from + (exists ? first_row + own : 0), exists);
  }
  WaitForCopies();
  __syncwarp();
  const uint32_t loaded = to + place_of(lane % 8, lane / 8), stored = to + lane * 4;
#pragma unroll 2
  for (int row = warp * kRows, behind = 0; row < rows; row += apart, behind += apart * kRowBytes) {
    uint32_t pairs[4];
    LoadTransposedMatrices(pairs, &SharedAt<char>(loaded + behind));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      SharedAt<uint32_t>(stored + behind + i * kMatrixBytes) = pairs[i];
    }
  }
}

// The rows of a tile of columns, from one on: construction begins to load, Store() ends it. Where x
// is aligned to units, or to vectors of lines, it is copied without registers.
template <typename T, PackedGapsConfig kConfig>
class GapX {
  static constexpr int kColumns = kConfig.columns, kVector = 8;
  static constexpr bool kMayCopy = kColumns > 1 && (!kConfig.x_on_left || kColumns == kVector);
  // Numbers are loaded early only where they always come one by one.
  static constexpr bool kEarly = !kMayCopy;
  const PackedProblem& p_;
  int first_row_, first_column_;
  bool copies_ = false;
  GapXUnits<T, kConfig> units_;

 public:
  __device__ __forceinline__ GapX(const PackedProblem& p, int first_row, int first_column)
      : p_(p), first_row_(first_row), first_column_(first_column) {
    if constexpr (kMayCopy) {
      constexpr int kAligned = kConfig.x_on_left ? kVector : kColumns;
      copies_ = (kConfig.x_on_left ? p.k : p.n) % kAligned == 0 &&
                IsAligned<Vector<T, kAligned>>(p.x.data);
    }
    if constexpr (kEarly) units_.Begin(p, first_row, first_column);
  }
  __device__ __forceinline__ void Store(uint32_t to, int rows) {
    if constexpr (kMayCopy) {
      if (copies_) {
        if constexpr (kConfig.x_on_left) {
          CopyGapLines<T>(p_, first_row_, first_column_, to, rows);
        } else {
          CopyGapUnits<T, kConfig>(p_, first_row_, first_column_, to, rows);
          WaitForCopies();
        }
        return;
      }
    }
    if constexpr (!kEarly) units_.Begin(p_, first_row_, first_column_);
    units_.Store(to, rows);
  }
};

}  // namespace jaxsparse
