// Writes a packed matrix (packed/problem.h) out, zeros in place. A warp has a piece: fragments go
// from registers to a panel of its strip in shared memory, from where whole rows are written.
// Numbers of 8 bits become those of T, without their scales.
//
// Floor: the matrix passes through memory once, packed and written out.
#include "cuda/vector_access.cuh"
#include "packed/kernels/lane_bytes.cuh"
#include "packed/kernels/packed_unpack.h"

namespace jaxsparse {

template <typename T, PackedUnpackConfig kConfig>
__global__ void __launch_bounds__(kConfig.warps* kWarp)
    PackedUnpack(const __grid_constant__ PackedProblem p) {
  constexpr int kCell = kConfig.cell, kStages = kConfig.kStages, kLine = kConfig.kLineBytes;
  constexpr int kSteps = kPackedPanelMasks / kCell, kFragments = 4 * kCell, kAtOnce = 4,
                kVector = 8;
  extern __shared__ __align__(128) unsigned char unpack_stages[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kConfig.warps + warp;
  if (number >= PackedStrips(p) * p.parts) return;
  const int64_t first_place = number / p.parts * kPackedStripRows;
  const PackedPiece piece(p, number);
  const int64_t first_column = number % p.parts * piece.panel_count * kPackedPanelColumns;

  const uint32_t shared = AddressOfShared(unpack_stages);
  const uint32_t ring = shared + warp * PackedRingBytes();
  const uint32_t tile = shared + kConfig.PanelsAt() + warp * kConfig.PanelBytes();
  PackedArrivals<kCell, kConfig.bulk> arrivals(
      piece, ring, shared + kConfig.MasksAt() + warp * kStages * PackedMasksBytes(kCell),
      reinterpret_cast<uint64_t*>(unpack_stages + kConfig.BarriersAt()) + warp * kPackedTurns);
  PackedPanelRows panel_rows(piece);
  typename PackedStreamsOf<T, kConfig.numbers, kCell>::Type streams(ring);
  int64_t row_of_lane = -1;
  if (lane < kPackedStripRows && first_place + lane < p.m) {
    row_of_lane = Within(static_cast<const int32_t*>(p.rows.data)[first_place + lane], p.m);
  }
  const bool wide = p.k % kVector == 0 && IsAligned<Words4>(p.out.data);

  arrivals.Ask(0, 0, kStages - 1, 0);
#pragma unroll 1
  for (uint32_t panel = 0; panel < piece.panel_count; ++panel) {
    const Words2 rows = panel_rows.At(panel);
    const int stage = panel % kStages;
    arrivals.template WaitForTurns<0>();
    __syncwarp();  // all lanes have read what is overwritten
    const uint32_t asked = arrivals.asked();
    arrivals.Ask(rows.x, panel + 1, 1, 1 - stage);
    if (rows.y > asked) arrivals.template WaitForTurns<0>();
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t mask = arrivals.Mask(stage, step);
#pragma unroll
      for (int first = 0; first < kFragments; first += kAtOnce) {
        uint32_t a[kAtOnce][4];
        streams.Wrap();
        streams.Fragments(mask, first, a);
#pragma unroll
        for (int i = 0; i < 4 * kAtOnce; ++i) {
          const int f = step * kFragments + first + i / 4, q = i % 4;
          const int row = lane / 4 + 8 * (q % 2), column = f * 16 + 8 * (q / 2) + 2 * (lane % 4);
          SharedAt<uint32_t>(tile + row * kLine + column * 2) =
              WholePair<T, kConfig.numbers>(a[i / 4][q]);
        }
      }
    }
    streams.PadTo(rows.y);
    __syncwarp();
    // Lanes have a vector each, of as many rows as they are for.
    constexpr int kAcross = kPackedPanelColumns / kVector;
    const int across = lane % kAcross * kVector;
    const int64_t column =
        first_column + static_cast<int64_t>(panel) * kPackedPanelColumns + across;
#pragma unroll 1
    for (int first = 0; first < kPackedStripRows; first += kWarp / kAcross) {
      const int r = first + lane / kAcross;
      const int64_t row = __shfl_sync(kAllLanes, row_of_lane, r);
      if (row < 0 || column >= p.k) continue;
      uint32_t words[4];
      LoadShared(tile + r * kLine + across * 2, words);
      uint16_t* out = static_cast<uint16_t*>(p.out.data) + row * p.k + column;
      StoreNumbers(out, words, wide, p.k - column);
    }
  }
  arrivals.template WaitForTurns<0>();
}

}  // namespace jaxsparse
