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
  static constexpr int kWidth = kLeft ? 64 : kColumns;  // of a line
  static constexpr int kLines = kLeft ? kColumns : kPanel;
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

// A warp that copies panels of a range, one after another.
template <typename T, PackedWgmmaConfig kConfig>
class PackedXProducer {
  using Panels = PackedPanelsOfX<kConfig>;
  static constexpr bool kLeft = Panels::kLeft;
  static constexpr int kVector = 8, kLines = Panels::kLines;
  // Vectors that lanes copy at once: those of a line's panel, or of rows.
  static constexpr int kAcross = (kLeft ? Panels::kPanel : Panels::kColumns) / kVector;
  static constexpr int kDown = kWarp / kAcross;
  static_assert(kLines % kDown == 0);

  const Panels& panels_;
  int line_ = static_cast<int>(threadIdx.x % kWarp) / kAcross;
  int across_ = static_cast<int>(threadIdx.x % kWarp) % kAcross * kVector;
  const T* from_;       // the lane's first vector of the next panel
  int64_t apart_;       // of lines that the lane copies
  int rows_, columns_;  // of x, from the next panel's first one on
  bool wide_;

  // Of x, from the lane's first line and number of a panel on.
  __device__ __forceinline__ int Lines() const { return (kLeft ? columns_ : rows_) - line_; }
  __device__ __forceinline__ int Width() const { return (kLeft ? rows_ : columns_) - across_; }

  __device__ __forceinline__ void CopyVectors(uint32_t to) const {
    const int lines = Width() > 0 ? Lines() : 0;
    const T* from = from_;
#pragma unroll 8
    for (int line = 0; line < kLines; line += kDown) {
      AsyncCopyOrZero(to + Panels::PlaceOf(line_ + line, across_), from, line < lines);
      from += apart_;
    }
  }
  // All numbers of some lines at once: each load waits for memory.
  __device__ __forceinline__ void CopyNumbers(uint32_t to) const {
    constexpr int kMost = kConfig.columns > 32 ? 1 : 4;  // that registers have room for
    constexpr int kAtOnce = kLines / kDown < kMost ? kLines / kDown : kMost;
    const int lines = Lines(), width = Width();
    const T* from = from_;
#pragma unroll 1
    for (int first = 0; first < kLines; first += kAtOnce * kDown) {
      T numbers[kAtOnce][kVector];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          numbers[i][e] = first + i * kDown < lines && e < width ? from[i * apart_ + e] : T{};
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t place = to + Panels::PlaceOf(line_ + first + i * kDown, across_);
#pragma unroll
        for (int e = 0; e < kVector; ++e) SharedAt<T>(place + e * sizeof(T)) = numbers[i][e];
      }
      from += kAtOnce * apart_;
    }
  }

 public:
  __device__ PackedXProducer(const Panels& panels, const PackedProblem& p, int64_t first_row,
                             int64_t first_column)
      : panels_(panels),
        rows_(static_cast<int>(p.k - first_row)),
        columns_(static_cast<int>(p.n - first_column)) {
    const int64_t pitch = kLeft ? p.k : p.n;
    from_ = static_cast<const T*>(p.x.data) +
            (kLeft ? first_column * pitch + first_row : first_row * pitch + first_column) +
            line_ * pitch + across_;
    apart_ = kDown * pitch;
    wide_ = pitch % kVector == 0 && IsAligned<Words4>(p.x.data);
  }

  // Has the next panel copied; places that x does not have are 0. Each lane arrives at `full` once
  // what it copies is there, and waits for nothing. Who waits there fences what it reads.
  __device__ __forceinline__ void Copy(uint32_t stage, uint64_t* full) {
    const uint32_t to = panels_.Stage(stage);
    if (wide_) {
      CopyVectors(to);
      ArriveWhenCopied(full);
    } else {
      CopyNumbers(to);
      Arrive(full);
    }
    from_ += kLeft ? Panels::kPanel : kLines / kDown * apart_;
    rows_ -= Panels::kPanel;
  }
};

}  // namespace jaxsparse
