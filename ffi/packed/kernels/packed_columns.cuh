// A tile of columns of x in shared memory, panel by panel, for all warps of a block.
//
// x on the left has lines of a panel's numbers, one for each column; else there are rows of 8
// columns, those of each 8 columns one behind the other. In either way eight that ldmatrix reads,
// and eight that are copied at once, lie in different banks.
#pragma once

#include "cuda/vector_access.cuh"
#include "packed/kernels/packed_mma.h"

namespace jaxsparse {

template <typename T, PackedMmaConfig kConfig>
class PackedColumns {
  static constexpr bool kLeft = kConfig.x_on_left;
  static constexpr int kVector = 8;
  static constexpr int kThreads = kConfig.warps * kWarp;
  // Vectors of a line or row, and lines or rows between those that a thread copies.
  static constexpr int kAcross = kLeft ? kPackedPanelColumns / kVector : kConfig.columns / kVector;
  static constexpr int kDown = kLeft ? kConfig.columns : kPackedPanelColumns;
  static constexpr int kApart = kThreads / kAcross;
  static constexpr int kTurns = (kDown + kApart - 1) / kApart;
  static_assert(kThreads % kAcross == 0);

  const T* from_;  // what the thread copies first of panel 0
  int64_t pitch_;
  uint32_t panels_, to_;
  int line_, chunk_;    // of that
  int rows_, columns_;  // of x, from the first one of the tile on
  bool wide_;

 public:
  // From these on; `panels`: the address of the first stage.
  __device__ PackedColumns(const PackedProblem& p, int64_t first_row, int64_t first_column,
                           uint32_t panels)
      : pitch_(kLeft ? p.k : p.n),
        panels_(panels),
        line_(threadIdx.x / kAcross),
        chunk_(threadIdx.x % kAcross),
        rows_(static_cast<int>(p.k - first_row)),
        columns_(static_cast<int>(p.n - first_column)),
        wide_(pitch_ % kVector == 0 && IsAligned<Words4>(p.x.data)) {
    const int64_t first = kLeft ? first_column * p.k + first_row : first_row * p.n + first_column;
    from_ = static_cast<const T*>(p.x.data) + first + line_ * pitch_ + chunk_ * kVector;
    to_ = panels_ + (kLeft ? line_ * kConfig.LineBytes() + chunk_ * 16
                           : chunk_ * kConfig.PlaneBytes() + line_ * 16);
  }

  // Asks for a panel; places that x does not have are 0.
  __device__ __forceinline__ void Ask(uint32_t panel, int stage) const {
    constexpr int kStep = kLeft ? kConfig.LineBytes() : 16;
    const int first = static_cast<int>(panel) * kPackedPanelColumns;
    const T* from = from_ + (kLeft ? first : first * pitch_);
    const uint32_t to = to_ + stage * kConfig.PanelBytes();
    const int rows = rows_ - first;
    if (wide_) {
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int line = line_ + i * kApart;
        const bool exists = kLeft ? line < columns_ && chunk_ * kVector < rows
                                  : line < rows && chunk_ * kVector < columns_;
        if (kDown % kApart != 0 && line >= kDown) break;
        AsyncCopyOrZero(to + i * kApart * kStep, from, exists);
        from += kApart * pitch_;
      }
      return;
    }
#pragma unroll 1
    for (int line = line_; line < kDown; line += kApart) {
#pragma unroll 1
      for (int e = 0; e < kVector; ++e) {
        const int across = chunk_ * kVector + e;
        const bool exists =
            kLeft ? line < columns_ && across < rows : line < rows && across < columns_;
        SharedAt<T>(to + (line - line_) * kStep + e * sizeof(T)) = exists ? from[e] : T{};
      }
      from += kApart * pitch_;
    }
  }

  // Of two fragments' 32 rows of x, 8 columns as mma.m16n8k16 takes them: two words of each.
  __device__ __forceinline__ void Load(int stage, int fragment, int tile, uint32_t (&b)[4]) const {
    const int lane = threadIdx.x % kWarp;
    const uint32_t panel = panels_ + stage * kConfig.PanelBytes();
    if constexpr (kLeft) {
      const uint32_t own = panel + lane % 8 * kConfig.LineBytes() + lane / 8 * 16;
      LoadMatrices(b, &SharedAt<char>(own + tile * 8 * kConfig.LineBytes() + fragment * 32));
    } else {
      const uint32_t own = panel + lane * 16;
      LoadTransposedMatrices(b,
                             &SharedAt<char>(own + tile * kConfig.PlaneBytes() + fragment * 256));
    }
  }
};

}  // namespace jaxsparse
