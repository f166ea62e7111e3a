// The product by a packed matrix (packed/problem.h) on tensor cores of single warps. A block makes
// a tile of the result, or one of the parts of its columns: a strip for each warp, of which it
// walks through a piece. Words come through a ring of the warp's own, panels of x through stages
// that all warps share. Lanes make fragments of the matrix in registers, so that it is never
// written out.
//
// Floors: a fragment takes 8 wavefronts of shared memory with cell 1, 4 with cell 2, for its words,
// as much as an eighth of that for those that arrive, and 2 for each 8 columns of x; and 33 or 24
// instructions. From memory comes each word once for each tile of columns.
#include "cuda/device.cuh"
#include "packed/kernels/lane_streams.cuh"
#include "packed/kernels/packed_columns.cuh"
#include "packed/kernels/packed_exact.cuh"
#include "packed/kernels/packed_sums.cuh"

namespace jaxsparse {

// Masks of a warp's piece on their way through shared memory, panel by panel.
template <PackedMmaConfig kConfig>
struct PackedMasks {
  uint32_t stages;

  __device__ __forceinline__ void Ask(const PackedPiece& piece, uint32_t panel, int stage) const {
    constexpr int kLanes = kConfig.MasksBytes() / 16;
    const int lane = threadIdx.x % kWarp;
    if (lane < kLanes && panel < piece.panel_count) {
      AsyncCopy(stages + stage * kConfig.MasksBytes() + lane * 16,
                piece.masks + (static_cast<int64_t>(panel) * kLanes + lane) * 4);
    }
  }
  __device__ __forceinline__ uint32_t At(int stage, int step) const {
    return SharedAt<const uint32_t>(stages + stage * kConfig.MasksBytes() + step * kPackedRowBytes +
                                    threadIdx.x % kWarp * 4);
  }
};

template <typename T, typename Out, PackedMmaConfig kConfig>
__global__ void __launch_bounds__(kConfig.warps* kWarp, 1)
    PackedMma(const __grid_constant__ PackedProblem p) {
  constexpr int kTiles = kConfig.columns / 8, kStages = kConfig.stages;
  constexpr int kSteps = kPackedPanelMasks / kConfig.cell, kFragments = 4 * kConfig.cell;
  static_assert(kStages == 2 || kStages == 3);
  extern __shared__ __align__(128) unsigned char packed_stages[];
  static __shared__ bool is_last;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t across = CeilDivide(p.n, kConfig.columns);
  const int64_t tile = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
  const int64_t strip = tile / across * kConfig.warps + warp;
  const int64_t first_column = tile % across * kConfig.columns;
  const bool exists = strip < PackedStrips(p);
  const auto panels = static_cast<uint32_t>(PackedPanels(p.k, p.parts));
  PackedPiece piece(p, exists ? strip * p.parts + part : part);
  if (!exists) piece.rows = 0;

  const uint32_t shared = AddressOfShared(packed_stages);
  const uint32_t own_ring = shared + warp * kConfig.RingBytes();
  PackedRing<kConfig> ring(piece, own_ring);
  PackedPanelRows panel_rows(piece);
  const PackedMasks<kConfig> masks{shared + kConfig.MasksAt() +
                                   warp * kStages * kConfig.MasksBytes()};
  const PackedColumns<T, kConfig> columns(p, first_column, shared + kConfig.PanelsAt());
  const int64_t first_row = part * panels * kPackedPanelColumns;

  const auto ask = [&](uint32_t panel, int stage) {
    if (panel < panels) {
      columns.Ask(first_row + static_cast<int64_t>(panel) * kPackedPanelColumns, stage);
      masks.Ask(piece, panel, stage);
    }
  };
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    ask(stage, stage);
    if (stage == 0) ring.Ask(0);
    CommitCopies();
  }

  LaneStreams<kConfig.cell> streams(own_ring);
  float sums[kTiles][4] = {};
  // Rows that were asked for two panels ago, and one.
  uint32_t asked_before = ring.asked();
  int stage = 0;
#pragma unroll 1
  for (uint32_t panel = 0; panel < panels; ++panel) {
    const Words2 rows = panel_rows.At(panel);
    if (kStages == 2 || rows.y > asked_before) {
      WaitForCopyGroups<0>();
    } else {
      WaitForCopyGroups<kStages - 2>();
    }
    __syncthreads();
    asked_before = ring.asked();
    ask(panel + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
    ring.Ask(rows.x);
    CommitCopies();
    if (rows.y > asked_before) {
      WaitForCopyGroups<0>();
      __syncwarp();
    }
    // Tensor cores cut off what does not fit when they add, so only a panel is summed there.
    float of_panel[kTiles][4] = {};
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t mask = masks.At(stage, step);
      streams.Wrap();
#pragma unroll
      for (int f = 0; f < kFragments; f += 2) {
        uint32_t a[2][4];
        streams.Fragment(mask, f, a[0]);
        streams.Fragment(mask, f + 1, a[1]);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          uint32_t b[4];
          columns.Load(stage, step * kFragments + f, t, b);
          MultiplyAdd(T{}, of_panel[t], a[0], b[0], b[1]);
          MultiplyAdd(T{}, of_panel[t], a[1], b[2], b[3]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][i] += of_panel[t][i];
    }
    streams.PadTo(rows.y);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }

  // Where some number of x is not finite, no sum of its column is.
  float not_finite = 0;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) not_finite += sums[t][i] * 0.0f;
  }
  if (exists && __any_sync(kAllLanes, not_finite != 0)) {
    WaitForCopyGroups<0>();
    __syncwarp();
    const ExactPiece<T, kConfig.cell> exact(p, piece, part);
#pragma unroll 1
    for (int column = 0; column < kConfig.columns && first_column + column < p.n; ++column) {
      float exact_sums[2];
      exact.Sum(first_column + column, exact_sums);
      if (lane % 4 == column % 8 / 2) {
        const uint32_t to = own_ring + ((column / 8 * kWarp + lane) * 4 + column % 2) * 4;
        StoreShared(to, exact_sums[0]);
        StoreShared(to + 8, exact_sums[1]);
      }
    }
    __syncwarp();
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[t][i] = SharedAt<const float>(own_ring + ((t * kWarp + lane) * 4 + i) * 4);
      }
    }
  }

  if (p.parts > 1) {
    const PackedParts<kConfig> parts(p, tile);
    parts.Leave(part, sums);
    __syncthreads();
    if (threadIdx.x == 0) is_last = parts.IsLast();
    __syncthreads();
    if (!is_last) return;
    parts.AddUp(sums);
  }
  if (exists) WriteSums<T, Out, kConfig>(p, strip, first_column, sums);
}

}  // namespace jaxsparse
