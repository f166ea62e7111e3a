// Panels of a tile of columns of x in shared memory, as tensor cores of warpgroups read them, and
// how they come there.
//
// x on the left has lines of 64 numbers for each column, those of each 64 one block behind the
// other; else a panel's rows are lines of up to 64 columns.
#pragma once

#include "cuda/tensor_cores.cuh"
#include "cuda/warpgroup_instructions.cuh"
#include "packed/kernels/packed_wgmma.h"

namespace jaxsparse {

// Where stages of a range hold numbers.
template <PackedWgmmaConfig kConfig>
struct PackedPanelsOfX {
  static constexpr bool kLeft = kConfig.x_on_left;
  static constexpr int kColumns = kConfig.columns, kPanel = kPackedPanelColumns;
  static constexpr int kWidth = kConfig.XWidth(), kLines = kConfig.XLines();
  using Block = SwizzledTile<kLines, kWidth>;
  static_assert(kColumns <= 64 &&
                Block::kBytes * (kLeft ? kPanel / kWidth : 1) == kConfig.PanelBytes());

  uint32_t first;  // the address of the first stage

  __device__ __forceinline__ static uint32_t PlaceOf(int line, int at) {
    return at / kWidth * Block::kBytes + Block::At(line, at % kWidth);
  }
  __device__ __forceinline__ uint32_t Stage(uint32_t stage) const {
    return first + stage * kConfig.PanelBytes();
  }
  // Of 16 rows of x from the panel's `row` on.
  __device__ __forceinline__ uint64_t Matrix(uint32_t stage, int row) const {
    const uint32_t panel = Stage(stage);
    constexpr int kEightLinesOfOneChunk = 128;
    if constexpr (kLeft) return Behind(SharedMatrix<kWidth>(panel), PlaceOf(0, row));
    else if constexpr (kWidth > 8) return Behind(SharedMatrix<kWidth>(panel), PlaceOf(row, 0));
    else return Behind(SharedMatrixOfChunks(panel, kEightLinesOfOneChunk), PlaceOf(row, 0));
  }
};

// A warp that copies panels of a range, one after another. Each time one of its lanes arrives.
template <typename T, PackedWgmmaConfig kConfig>
class PackedXProducer {
  using Panels = PackedPanelsOfX<kConfig>;
  static constexpr bool kLeft = Panels::kLeft;
  // Numbers that a lane copies side by side, and lines that lanes copy at once.
  static constexpr int kVector = 8, kLines = Panels::kLines;
  static constexpr int kAcross = (kLeft ? Panels::kPanel : Panels::kColumns) / kVector;
  static constexpr int kDown = kWarp / kAcross;
  static_assert(kLines % kDown == 0);

  const Panels& panels_;
  const PackedWgmmaProblem& p_;
  int row_, column_;  // of x, the next panel's first ones
  bool by_tiles_;

  __device__ __forceinline__ void CopyTiles(uint32_t to, uint64_t* full) const {
    ArriveAndExpect(full, kConfig.PanelBytes());
    if constexpr (kLeft) {
#pragma unroll
      for (int at = 0; at < Panels::kPanel; at += Panels::kWidth) {
        TensorCopy(&SharedAt<char>(to + Panels::PlaceOf(0, at)), p_.tiles_of_x, row_ + at, column_,
                   0, full);
      }
    } else {
      TensorCopy(&SharedAt<char>(to), p_.tiles_of_x, column_, row_, 0, full);
    }
  }
  // All numbers of some lines at once: each load waits for memory.
  __device__ __forceinline__ void CopyNumbers(uint32_t to) const {
    constexpr int kMost = kConfig.columns > 32 ? 1 : 4;  // that registers have room for
    constexpr int kAtOnce = kLines / kDown < kMost ? kLines / kDown : kMost;
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    const int line = lane / kAcross, across = lane % kAcross * kVector;
    const auto rows = static_cast<int>(p_.k) - row_, columns = static_cast<int>(p_.n) - column_;
    const int lines = (kLeft ? columns : rows) - line, width = (kLeft ? rows : columns) - across;
    const int64_t pitch = kLeft ? p_.k : p_.n;
    const T* from = static_cast<const T*>(p_.x.data) +
                    (int64_t{kLeft ? column_ : row_} + line) * pitch + (kLeft ? row_ : column_) +
                    across;
#pragma unroll 1
    for (int first = 0; first < kLines; first += kAtOnce * kDown) {
      T numbers[kAtOnce][kVector];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          numbers[i][e] =
              first + i * kDown < lines && e < width ? from[i * kDown * pitch + e] : T{};
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t place = to + Panels::PlaceOf(line + first + i * kDown, across);
#pragma unroll
        for (int e = 0; e < kVector; ++e) SharedAt<T>(place + e * sizeof(T)) = numbers[i][e];
      }
      from += kAtOnce * kDown * pitch;
    }
  }

 public:
  __device__ PackedXProducer(const Panels& panels, const PackedWgmmaProblem& p, int first_row,
                             int first_column)
      : panels_(panels),
        p_(p),
        row_(first_row),
        column_(first_column),
        by_tiles_(PackedCopiesX(p, kLeft)) {}

  // Has the next panel copied; places that x does not have are 0.
  __device__ __forceinline__ void Copy(uint32_t stage, uint64_t* full) {
    const bool arrives = threadIdx.x % kWarp == 0;
    const uint32_t to = panels_.Stage(stage);
    if (by_tiles_) {
      if (arrives) CopyTiles(to, full);
    } else {
      CopyNumbers(to);
      FenceShared();  // tensor cores read what lanes have written
      __syncwarp();
      if (arrives) Arrive(full);
    }
    row_ += Panels::kPanel;
  }
};

}  // namespace jaxsparse
