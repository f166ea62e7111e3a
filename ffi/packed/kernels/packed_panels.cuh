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

// A warp that copies panels of a range, one after another, for one tile after another.
template <typename T, PackedWgmmaConfig kConfig>
class PackedXProducer {
  using Panels = PackedPanelsOfX<kConfig>;
  static constexpr bool kLeft = Panels::kLeft, kTiles = kConfig.IsForTiles();
  // Numbers that a lane copies side by side, and lines that lanes copy at once.
  static constexpr int kVector = 8, kLines = Panels::kLines;
  static constexpr int kAcross = (kLeft ? Panels::kPanel : Panels::kColumns) / kVector;
  static constexpr int kDown = kWarp / kAcross;
  static_assert(kLines % kDown == 0);

  const Panels& panels_;
  const PackedWgmmaProblem& p_;
  int first_row_, row_, column_ = 0;  // of x: of the range, and where the next panel begins
  bool wide_;                         // not number by number

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

  // What a lane copies of a panel: from its first line and number on.
  struct Lane {
    int line, across;
    int lines, width;  // that x has from there on
    int64_t pitch;
    const T* from;
  };
  __device__ __forceinline__ Lane OwnPart() const {
    Lane own;
    const int lane = static_cast<int>(threadIdx.x % kWarp);
    own.line = lane / kAcross, own.across = lane % kAcross * kVector;
    const auto rows = static_cast<int>(p_.k) - row_, columns = static_cast<int>(p_.n) - column_;
    own.lines = (kLeft ? columns : rows) - own.line;
    own.width = (kLeft ? rows : columns) - own.across;
    own.pitch = kLeft ? p_.k : p_.n;
    own.from = static_cast<const T*>(p_.x.data) +
               (int64_t{kLeft ? column_ : row_} + own.line) * own.pitch + (kLeft ? row_ : column_) +
               own.across;
    return own;
  }
  __device__ __forceinline__ void CopyVectors(uint32_t to) const {
    Lane own = OwnPart();
    const int lines = own.width > 0 ? own.lines : 0;
#pragma unroll 8
    for (int line = 0; line < kLines; line += kDown) {
      AsyncCopyOrZero(to + Panels::PlaceOf(own.line + line, own.across), own.from, line < lines);
      own.from += kDown * own.pitch;
    }
  }
  // All numbers of some lines at once: each load waits for memory.
  __device__ __forceinline__ void CopyNumbers(uint32_t to) const {
    constexpr int kMost = kConfig.columns > 32 ? 1 : 4;  // that registers have room for
    constexpr int kAtOnce = kLines / kDown < kMost ? kLines / kDown : kMost;
    Lane own = OwnPart();
#pragma unroll 1
    for (int first = 0; first < kLines; first += kAtOnce * kDown) {
      T numbers[kAtOnce][kVector];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
          const bool exists = first + i * kDown < own.lines && e < own.width;
          numbers[i][e] = exists ? own.from[i * kDown * own.pitch + e] : T{};
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint32_t place = to + Panels::PlaceOf(own.line + first + i * kDown, own.across);
#pragma unroll
        for (int e = 0; e < kVector; ++e) SharedAt<T>(place + e * sizeof(T)) = numbers[i][e];
      }
      own.from += kAtOnce * kDown * own.pitch;
    }
  }

 public:
  // Threads that arrive for a panel.
  static constexpr uint32_t kArrivals = kTiles ? 1 : kWarp;

  __device__ PackedXProducer(const Panels& panels, const PackedWgmmaProblem& p, int first_row)
      : panels_(panels), p_(p), first_row_(first_row) {
    wide_ = kTiles ? CopiesTiles(p, kConfig) : p.n % kVector == 0 && IsAligned<Words4>(p.x.data);
  }

  __device__ __forceinline__ void Begin(int first_column) {
    row_ = first_row_;
    column_ = first_column;
  }
  // Has the next panel copied; places that x does not have are 0. Nobody waits for vectors: each
  // lane arrives at `full` once its own are there, and those who wait there fence what they read.
  __device__ __forceinline__ void Copy(uint32_t stage, uint64_t* full) {
    const uint32_t to = panels_.Stage(stage);
    const bool is_first = threadIdx.x % kWarp == 0;
    if (wide_) {
      if constexpr (kTiles) {
        if (is_first) CopyTiles(to, full);
      } else {
        CopyVectors(to);
        ArriveWhenCopied(full);
      }
    } else {
      CopyNumbers(to);
      if constexpr (kTiles) {
        FenceShared();
        __syncwarp();
      }
      if (!kTiles || is_first) Arrive(full);
    }
    row_ += Panels::kPanel;
  }
};

}  // namespace jaxsparse
