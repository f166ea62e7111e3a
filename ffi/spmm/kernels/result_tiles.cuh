// Tiles of the result of the tensor core kernel: which one a block computes, what its warpgroups
// have of it in shared memory, and split-K, where several blocks share one.
#pragma once

#include "spmm/kernels/tile_pipeline.cuh"

namespace jaxsparse {

// A tile of the result, or one of the parts into which its inner places are cut.
template <int kColumns>
struct ResultTile {
  int64_t number, entry, first_row, first_column;
  int part, parts;
  int first_step, end_step;

  __device__ ResultTile(const SpmmProblem& p, int64_t item, int of_tile)
      : number(item / of_tile), part(static_cast<int>(item % of_tile)), parts(of_tile) {
    const int64_t down = CeilDivide(p.pattern.rows, kSpmmTileRows);
    const int64_t across = CeilDivide(p.n, kColumns);
    entry = number / (down * across);
    first_row = number / across % down * kSpmmTileRows;
    first_column = number % across * kColumns;
    const int steps = static_cast<int>(SpmmStepsOf(p));
    first_step = steps * part / parts;
    end_step = steps * (part + 1) / parts;
  }
  __device__ static int64_t Count(const SpmmProblem& p) { return SpmmTilesOf(p, kColumns); }
  // There are more blocks than tiles only if each tile has several.
  __device__ static int PartsOfEach(const SpmmProblem& p) {
    const int64_t tiles = Count(p);
    return gridDim.x > tiles ? static_cast<int>(gridDim.x / tiles) : 1;
  }
};

// What the warpgroups have of a tile, in stages that are empty: a few instructions write it out
// from there, where one copy of the epilogue for each register took longer than the product, as
// instructions come from memory.
template <int kColumns>
struct SumTiles {
  static constexpr int kRun = 4, kRuns = kColumns / kRun;
  static constexpr int kAllRuns = kSpmmTileRows * kRuns;
  using Run = Vector<float, kRun>;
  static constexpr int kPitch =
      kColumns + 8;  // so that rows which a warp writes lie in other banks
  static constexpr int kBytes = kSpmmTileRows * kPitch * sizeof(float);  // of a warpgroup

  uint32_t sums;  // the first warpgroup's
  int count;      // of warpgroups, 1 or 2

  // The place of run number `run`, of those of a warpgroup's row one behind the other.
  __device__ __forceinline__ Run& At(int run) const {
    return SharedAt<Run>(sums + (run / kRuns * kPitch + run % kRuns * kRun) * sizeof(float));
  }
  __device__ __forceinline__ Run Sum(int run) const {
    Run sum = At(run);
    if (count == 1) return sum;
    const Run other = SumTiles{sums + kBytes, 1}.At(run);
#pragma unroll
    for (int c = 0; c < kRun; ++c) sum.elements[c] += other.elements[c];
    return sum;
  }
};

// A tile whose inner places several blocks share. Each leaves its sums in the workspace; the
// block that comes last adds up all of them, in the order of parts, so that no block waits for
// another one that may not run yet.
template <int kColumns>
class SplitTile {
  using Sums = SumTiles<kColumns>;
  using Run = typename Sums::Run;
  uint32_t* arrived_;  // blocks
  Run* parts_;         // one tile behind the other
  int part_, count_;

 public:
  __device__ SplitTile(const Preparation& prepared, const Workspace& workspace,
                       const ResultTile<kColumns>& tile)
      : part_(tile.part), count_(tile.parts) {
    char* behind = workspace.data + prepared.Bytes();
    arrived_ = reinterpret_cast<uint32_t*>(behind) + tile.number;
    parts_ = reinterpret_cast<Run*>(behind + kSpmmArrivedBytes) +
             tile.number * tile.parts * Sums::kAllRuns;
  }

  // By the consumers. Sums that are not exact become NaN, which tells the last one.
  __device__ __forceinline__ void Leave(const Sums& sums, bool exact) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < Sums::kAllRuns; i += kConsumers) {
      Run sum = sums.Sum(i);
#pragma unroll
      for (int c = 0; c < Sums::kRun; ++c) {
        if (!exact) sum.elements[c] = __uint_as_float(0x7fffffff);
      }
      parts_[part_ * Sums::kAllRuns + i] = sum;
    }
  }
  // Whether all have left theirs, by one thread, behind what the block wrote.
  __device__ __forceinline__ bool IsLast() const {
    return FetchAndAddOfGpu(arrived_, 1) == static_cast<uint32_t>(count_ - 1);
  }
  // Adds up into what one warpgroup had; returns whether what the thread added is finite.
  __device__ __forceinline__ bool AddUp(const Sums& sums) const {
    constexpr int kAtOnce = Sums::kAllRuns / kConsumers < 4 ? Sums::kAllRuns / kConsumers : 4;
    static_assert(Sums::kAllRuns % (kAtOnce * kConsumers) == 0);
    float not_finite = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < Sums::kAllRuns; i += kAtOnce * kConsumers) {
      Run all[kAtOnce] = {};
#pragma unroll 1
      for (int part = 0; part < count_; ++part) {
        Run of_part[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          of_part[k] = parts_[part * Sums::kAllRuns + i + k * kConsumers];
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
          for (int c = 0; c < Sums::kRun; ++c) all[k].elements[c] += of_part[k].elements[c];
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int c = 0; c < Sums::kRun; ++c) not_finite += all[k].elements[c] * 0.0f;
        sums.At(i + k * kConsumers) = all[k];
      }
    }
    return not_finite == 0;
  }
};

}  // namespace jaxsparse
