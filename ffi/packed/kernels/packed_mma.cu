// The product by a packed matrix (packed/problem.h) on tensor cores of single warps. A block makes
// a tile of the result, or one of the parts of its columns: a strip for each warp, of which it
// walks through a piece. Words come through a ring of the warp's own, panels of x through stages
// that all warps share. Lanes make fragments of the matrix in registers, so that it is never
// written out.
//
// Floors: a fragment takes 8 wavefronts of shared memory with cell 1, 4 with cell 2, for its words,
// as much as an eighth of that for those that arrive, and 2 for each 8 columns of x; and, of
// numbers of 16 bits, 24 or 12 instructions. Those of 8 bits take as many wavefronts as cell 1, and
// more instructions, to widen them. From memory comes each word once for each tile of columns.
#include "cuda/device.cuh"
#include "packed/kernels/lane_bytes.cuh"
#include "packed/kernels/packed_columns.cuh"
#include "packed/kernels/packed_exact.cuh"
#include "packed/kernels/packed_sums.cuh"

namespace jaxsparse {

template <typename T, typename Out, PackedMmaConfig kConfig>
__global__ void __launch_bounds__(kConfig.warps* kWarp, 1)
    PackedMma(const __grid_constant__ PackedProblem p) {
  constexpr int kTiles = kConfig.columns / 8, kStages = kConfig.stages;
  constexpr int kSteps = kPackedPanelMasks / kConfig.cell, kFragments = 4 * kConfig.cell,
                kAtOnce = 4;
  constexpr int kSums = kTiles <= 2 ? 2 : 1;
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
  const uint32_t own_ring = shared + warp * PackedRingBytes();
  PackedArrivals<kConfig.cell, kConfig.bulk> arrivals(
      piece, own_ring, shared + kConfig.MasksAt() + warp * kStages * PackedMasksBytes(kConfig.cell),
      reinterpret_cast<uint64_t*>(packed_stages + kConfig.BarriersAt()) + warp * kPackedTurns);
  PackedPanelRows panel_rows(piece);
  const PackedColumns<T, kConfig> columns(p, part * panels * kPackedPanelColumns, first_column,
                                          shared + kConfig.PanelsAt());
  // The groups of copies that panels of x are in are turns, too.
#pragma unroll
  for (int panel = 0; panel < kStages - 1; ++panel) {
    if (static_cast<uint32_t>(panel) < panels) columns.Ask(panel, panel);
    if (panel < kStages - 2 || kConfig.bulk) CommitCopies();
  }
  arrivals.Ask(0, 0, kStages - 1, 0);

  typename PackedStreamsOf<T, kConfig.numbers, kConfig.cell>::Type streams(own_ring);
  float sums[kTiles][4] = {};
  uint32_t asked_before = arrivals.asked();  // until the turn before the last one
  int stage = 0;
#pragma unroll 1
  for (uint32_t panel = 0; panel < panels; ++panel) {
    const Words2 rows = panel_rows.At(panel);
    WaitForCopyGroups<kStages - 2>();
    if (kStages == 2 || panel == 0 || rows.y > asked_before) {
      arrivals.template WaitForTurns<0>();
    } else {
      arrivals.template WaitForTurns<1>();
    }
    __syncthreads();
    asked_before = arrivals.asked();
    const uint32_t next = panel + kStages - 1;
    const int next_stage = stage == 0 ? kStages - 1 : stage - 1;
    if (next < panels) columns.Ask(next, next_stage);
    if (kConfig.bulk) CommitCopies();
    arrivals.Ask(rows.x, next, 1, next_stage);
    if (rows.y > asked_before) arrivals.template WaitForTurns<0>();
    // Tensor cores cut off what does not fit when they add, so only a panel is summed there.
    // Products that wait for one another would take longer than what comes between them.
    float of_panel[kSums][kTiles][4] = {};
#pragma unroll(kTiles <= 2 ? kSteps : 1)
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t mask = arrivals.Mask(stage, step);
#pragma unroll
      for (int first = 0; first < kFragments; first += kAtOnce) {
        uint32_t a[kAtOnce][4];
        streams.Wrap();
        streams.Fragments(mask, first, a);
#pragma unroll
        for (int f = 0; f < kAtOnce; f += 2) {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            uint32_t b[4];
            columns.Load(stage, step * kFragments + first + f, t, b);
            MultiplyAdd(T{}, of_panel[0][t], a[f], b[0], b[1]);
            MultiplyAdd(T{}, of_panel[kSums - 1][t], a[f + 1], b[2], b[3]);
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[t][i] += of_panel[0][t][i];
        if (kSums > 1) sums[t][i] += of_panel[kSums - 1][t][i];
      }
    }
    streams.PadTo(rows.y);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  arrivals.template WaitForTurns<0>();

  if (exists && !AreFinite(sums)) {
    MakeExact<T, kConfig.numbers, kConfig.cell>(p, piece, part, first_column, own_ring, sums);
  }
  if (AddParts<kConfig>(p, tile, part, kAllThreads, &is_last, sums) && exists) {
    const PackedResult<T, Out, kConfig.numbers, kConfig.x_on_left> result(p, strip);
#pragma unroll
    for (int t = 0; t < kTiles; ++t) result.Write(first_column + t * 8, sums[t]);
  }
}

}  // namespace jaxsparse
