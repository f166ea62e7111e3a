// A tile of columns of x in shared memory, panel by panel, for all warps of a block.
//
// x on the left has lines of a panel's numbers, one for each column; else there are rows of 8
// columns, those of each 8 columns one behind the other. In either way eight that ldmatrix reads
// lie in different banks.
#pragma once

#include "cuda/vector_access.cuh"
#include "packed/kernels/packed_mma.h"

namespace jaxsparse {

template <typename T, PackedMmaConfig kConfig>
class PackedColumns {
  static constexpr bool kLeft = kConfig.x_on_left;
  static constexpr int kVector = 8;
  static constexpr int kAcross = kLeft ? kPackedPanelColumns / kVector : kConfig.columns / kVector;
  static constexpr int kCount = kConfig.columns * kPackedPanelColumns / kVector;  // vectors
  static constexpr int kPlaneBytes = kPackedPanelColumns * 16;
  const T* x_;
  int64_t pitch_, k_;
  int left_;  // columns that there are
  uint32_t panels_;
  bool wide_;

 public:
  // From this column on; `panels`: the address of the first stage.
  __device__ PackedColumns(const PackedProblem& p, int64_t first_column, uint32_t panels)
      : x_(static_cast<const T*>(p.x.data) + (kLeft ? first_column * p.k : first_column)),
        pitch_(kLeft ? p.k : p.n),
        k_(p.k),
        left_(static_cast<int>(p.n - first_column < kConfig.columns ? p.n - first_column
                                                                    : kConfig.columns)),
        panels_(panels),
        wide_(pitch_ % kVector == 0 && IsAligned<Words4>(p.x.data)) {}

  // Asks for the panel that begins with row `first` of x; places that x does not have are 0.
  __device__ __forceinline__ void Ask(int64_t first, int stage) const {
    const uint32_t to = panels_ + stage * kConfig.PanelBytes();
#pragma unroll
    for (int i = threadIdx.x; i < kCount; i += kConfig.warps * kWarp) {
      const int line = i / kAcross, chunk = i % kAcross;
      const int column = kLeft ? line : chunk * kVector;
      const int64_t row = first + (kLeft ? chunk * kVector : line);
      const T* from = x_ + (kLeft ? column * pitch_ + row : row * pitch_ + column);
      const uint32_t place =
          to + (kLeft ? line * kConfig.LineBytes() + chunk * 16 : chunk * kPlaneBytes + line * 16);
      if (wide_) {
        AsyncCopyOrZero(place, from, column < left_ && row < k_);
      } else {
        Vector<T, kVector> vector = {};
#pragma unroll 1
        for (int e = 0; e < kVector; ++e) {
          const bool exists =
              kLeft ? column < left_ && row + e < k_ : column + e < left_ && row < k_;
          SharedAt<T>(place + e * sizeof(T)) = exists ? from[e] : T{};
        }
      }
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
      LoadTransposedMatrices(b, &SharedAt<char>(own + tile * kPlaneBytes + fragment * 256));
    }
  }
};

}  // namespace jaxsparse
