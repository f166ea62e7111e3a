// Panels of a tile of columns of x in shared memory, as tensor cores of warpgroups read them.
//
// x on the left has lines of 64 numbers for each column, those of each 64 one block behind the
// other; else a panel's rows are lines of up to 64 columns.
#pragma once

#include "cuda/tensor_cores.cuh"
#include "cuda/warpgroup_instructions.cuh"
#include "packed/kernels/packed_wgmma.h"

namespace jaxsparse {

template <typename T, PackedWgmmaConfig kConfig>
class PackedPanelsOfX {
  static constexpr bool kLeft = kConfig.x_on_left;
  static constexpr int kVector = 8, kColumns = kConfig.columns, kPanel = kPackedPanelColumns;
  static constexpr int kWidth = kLeft ? 64 : kColumns;  // of a line
  static constexpr int kLines = kLeft ? kColumns : kPanel;
  using Block = SwizzledTile<kLines, kWidth>;
  // Vectors that lanes copy at once: those of a line's panel, or of rows.
  static constexpr int kAcross = kLeft ? kPanel / kVector : kColumns / kVector;
  static constexpr int kDown = kWarp / kAcross;
  static_assert(kColumns <= 64 && kLines % kDown == 0 &&
                Block::kBytes * (kLeft ? kPanel / kWidth : 1) == kConfig.PanelBytes());

  const PackedProblem& p_;
  int64_t first_row_, first_column_;  // of x
  uint32_t panels_;                   // the address of the first stage

  __device__ __forceinline__ static uint32_t PlaceOf(int line, int at) {
    return at / kWidth * Block::kBytes + Block::At(line, at % kWidth);
  }

 public:
  __device__ PackedPanelsOfX(const PackedProblem& p, int64_t first_row, int64_t first_column,
                             uint32_t panels)
      : p_(p), first_row_(first_row), first_column_(first_column), panels_(panels) {}

  // Begins to copy one, by a warp; places that x does not have are 0.
  __device__ __forceinline__ void Copy(uint32_t panel, int stage) const {
    const int lane = threadIdx.x % kWarp, across = lane % kAcross * kVector;
    const int64_t pitch = kLeft ? p_.k : p_.n, row = first_row_ + int64_t{panel} * kPanel;
    const int64_t rows = p_.k - row, columns = p_.n - first_column_;
    const int64_t lines = kLeft ? columns : rows, width = kLeft ? rows : columns;
    const T* from = static_cast<const T*>(p_.x.data) +
                    (kLeft ? first_column_ * pitch + row : row * pitch + first_column_) +
                    lane / kAcross * pitch + across;
    const uint32_t to = panels_ + stage * kConfig.PanelBytes();
    if (pitch % kVector == 0 && IsAligned<Words4>(p_.x.data)) {
#pragma unroll 8
      for (int line = lane / kAcross; line < kLines; line += kDown) {
        AsyncCopyOrZero(to + PlaceOf(line, across), from, line < lines && across < width);
        from += kDown * pitch;
      }
    } else {
      // All numbers of some lines at once: each load waits for memory.
      constexpr int kMost = kConfig.SharesRegisters() ? 1 : 4;  // that registers have room for
      constexpr int kAtOnce = kLines / kDown < kMost ? kLines / kDown : kMost;
#pragma unroll 1
      for (int first = lane / kAcross; first < kLines; first += kAtOnce * kDown) {
        T numbers[kAtOnce][kVector];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            const bool exists = first + i * kDown < lines && across + e < width;
            numbers[i][e] = exists ? from[i * kDown * pitch + e] : T{};
          }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
          for (int e = 0; e < kVector; ++e) {
            SharedAt<T>(to + PlaceOf(first + i * kDown, across) + e * sizeof(T)) = numbers[i][e];
          }
        }
        from += kAtOnce * kDown * pitch;
      }
    }
    CommitCopies();
  }
  // Waits until all are there that the warp has begun to copy, and tensor cores may read them.
  __device__ __forceinline__ static void Await() {
    WaitForCopyGroups<0>();
    FenceShared();
    __syncwarp();
  }

  // Of 16 rows of x from the panel's `row` on.
  __device__ __forceinline__ uint64_t Matrix(int stage, int row) const {
    const uint32_t panel = panels_ + stage * kConfig.PanelBytes();
    constexpr int kEightLinesOfOneChunk = 128;
    if constexpr (kLeft) return Behind(SharedMatrix<kWidth>(panel), PlaceOf(0, row));
    else if constexpr (kWidth > 8) return Behind(SharedMatrix<kWidth>(panel), PlaceOf(row, 0));
    else return Behind(SharedMatrixOfChunks(panel, kEightLinesOfOneChunk), PlaceOf(row, 0));
  }
};

}  // namespace jaxsparse
