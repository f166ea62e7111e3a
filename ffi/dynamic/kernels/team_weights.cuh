// How a product warp brings its part of a matrix from memory to where tensor cores take it from:
// for a chunk of 32 columns and 16 rows, a lane needs 8 columns of rows lane / 4 and lane / 4 + 8.
// A launch begins with that. Element by element it takes as long as several levels of a graph, so
// lanes load 16 bytes, and the next chunk is asked for while one is arranged.
#pragma once

#include "cuda/device.cuh"
#include "cuda/matrix_instructions.cuh"
#include "dynamic/problem.h"
#include "persistent/exchange.cuh"
#include "recurrent/scan_of_block.cuh"

namespace jaxsparse {

// What a lane multiplies by in a chunk: tiles of rows, k16 steps.
template <typename Plan>
using ChunkWeights = Words4[Plan::kSizes.row_tiles][2];

// Whether a block's part of the matrix has all columns of its warps' chunks, and all its units.
template <typename Plan>
constexpr bool kHasWholeChunks =
    Plan::kSizes.columns == Plan::kSizes.loads * Plan::kSizes.warps * Plan::kSizes.load_columns &&
    Plan::kSizes.hidden % Plan::kSizes.units == 0;

// Of the matrix of a pass to sources: rows (slot of a source, its unit), columns (state, unit),
// which are neighbours in memory.
template <typename Plan>
class EmitWeights {
  static constexpr auto kSizes = Plan::kSizes;
  using Weight = typename Plan::Weight;

 public:
  static constexpr bool kStages = false;
  struct Asked {
    Words4 rows[kSizes.row_tiles][2];  // the upper and the lower one of a tile
  };

  __device__ __forceinline__ EmitWeights(const DenseWeights& weights, Words4*)
      : values_(static_cast<const Weight*>(weights.values)),
        row_stride_(static_cast<uint32_t>(weights.row_stride)) {}

  __device__ __forceinline__ void Ask(int first_column, Asked* asked) const {
    const int lane = threadIdx.x % kWarp, column = first_column + lane % 4 * 8;
#pragma unroll
    for (int i = 0; i < 2 * kSizes.row_tiles; ++i) {
      const int row = i * 8 + lane / 4;
      const int unit = BlockOfScan<Plan>() * kSizes.units + row % kSizes.units;
      const bool exists =
          i * 8 < kSizes.rows &&
          (kHasWholeChunks<Plan> || (unit < kSizes.hidden && column < kSizes.columns));
      const auto at = static_cast<uint32_t>(row / kSizes.units * kSizes.hidden + unit);
      if (!exists) asked->rows[i / 2][i % 2] = {0, 0, 0, 0};
      else {
        asked->rows[i / 2][i % 2] =
            *reinterpret_cast<const Words4*>(values_ + uint64_t{at} * row_stride_ + column);
      }
    }
  }

  __device__ __forceinline__ void Arrange(const Asked& asked, ChunkWeights<Plan>& to) const {
#pragma unroll
    for (int m = 0; m < kSizes.row_tiles; ++m) {
      const Words4 upper = asked.rows[m][0], lower = asked.rows[m][1];
      to[m][0] = {upper.x, lower.x, upper.y, lower.y};
      to[m][1] = {upper.z, lower.z, upper.w, lower.w};
    }
  }

 private:
  const Weight* const values_;
  const uint32_t row_stride_;
};

// Of the matrix of a pass from sources: rows (product, unit), which are neighbours in memory,
// columns (slot of a source, its unit).
// Its chunks are transposed on their way through shared memory, a k16 step at a time.
template <typename Plan>
class GatherWeights {
  static constexpr auto kSizes = Plan::kSizes;
  using Weight = typename Plan::Weight;
  static constexpr int kRowPieces = kSizes.rows / 8;  // 16 bytes each, of a column
  static constexpr int kPieces = (16 * kRowPieces + kWarp - 1) / kWarp;  // of a lane, in a step
  // Of a column. One more than it has, where the ring has room, puts neighbours in different banks.
  static constexpr int kRoom = kSizes.stages * kSizes.warp_part / 4;  // of a warp
  static constexpr int kLeast = kSizes.row_tiles * 2;
  static constexpr int kColumnPieces = 16 * (kLeast + 1) <= kRoom ? kLeast + 1 : kLeast;
  static constexpr int kWarpPieces = 16 * kColumnPieces;
  static_assert(kSizes.units % 8 == 0 && kWarpPieces <= kRoom);

 public:
  static constexpr bool kStages = true;
  struct Asked {
    Words4 pieces[2][kPieces];  // of the k16 steps
  };

  // In the memory of the ring, before it is used.
  __device__ __forceinline__ GatherWeights(const DenseWeights& weights, Words4* ring)
      : values_(static_cast<const Weight*>(weights.values)),
        column_stride_(static_cast<uint32_t>(weights.column_stride)),
        staged_(ring + threadIdx.x / kWarp * kWarpPieces) {}

  __device__ __forceinline__ void Ask(int first_column, Asked* asked) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const Piece piece = PieceOf(i);
        // Neighbours in a step are those of a lane (MmaFragment).
        const int of_lanes = piece.k % 8 / 2 * 8 + piece.k / 8 * 2 + piece.k % 2;
        const int column = first_column + of_lanes + 4 * half, row = piece.place * 8;
        const int unit = BlockOfScan<Plan>() * kSizes.units + row % kSizes.units;
        const bool exists = piece.exists && (kHasWholeChunks<Plan> ||
                                             (unit < kSizes.hidden && column < kSizes.columns));
        const auto at = static_cast<uint32_t>(row / kSizes.units * kSizes.hidden + unit);
        if (!exists) asked->pieces[half][i] = {0, 0, 0, 0};
        else {
          asked->pieces[half][i] = *reinterpret_cast<const Words4*>(
              values_ + uint64_t{static_cast<uint32_t>(column)} * column_stride_ + at);
        }
      }
    }
  }

  __device__ __forceinline__ void Arrange(const Asked& asked, ChunkWeights<Plan>& to) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      __syncwarp();  // all lanes are done with the last step
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const Piece piece = PieceOf(i);
        if (piece.exists) staged_[piece.k * kColumnPieces + piece.place] = asked.pieces[half][i];
      }
      __syncwarp();
#pragma unroll
      for (int m = 0; m < kSizes.row_tiles; ++m) {
        uint32_t a[4];
        const int k = lane % 8 + lane / 16 * 8, place = 2 * m + lane / 8 % 2;
        LoadTransposedMatrices(a, staged_ + k * kColumnPieces + place);
        // A block may have half a tile of rows; what it loads for the other half is none.
        const bool is_whole = (2 * m + 1) * 8 < kSizes.rows;
        to[m][half] = {a[0], is_whole ? a[1] : 0, a[2], is_whole ? a[3] : 0};
      }
    }
  }

 private:
  // 8 rows of a column of a step.
  struct Piece {
    int k, place;
    bool exists;
  };
  __device__ __forceinline__ static Piece PieceOf(int i) {
    const int index = i * kWarp + static_cast<int>(threadIdx.x % kWarp);
    const bool exists = 16 * kRowPieces % kWarp == 0 || index < 16 * kRowPieces;
    return {index / kRowPieces, index % kRowPieces, exists};
  }

  const Weight* const values_;
  const uint32_t column_stride_;
  Words4* const staged_;
};

}  // namespace jaxsparse
