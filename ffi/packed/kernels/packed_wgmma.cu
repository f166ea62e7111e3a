// The product by a packed matrix (packed/problem.h) on tensor cores of warpgroups. A block makes a
// tile of the result, or a share of its columns: each of sixteen warps has a strip's piece, walks
// through it and makes fragments of the matrix in registers, so that it is never written out.
// Tensor cores of each four of them multiply these by x in shared memory, while the next fragments
// are made. Warps of the same strip have neighbouring ranges of columns, and the block adds up
// their sums in the end. Each range has a warp more that brings words, masks and x there, so that
// those that multiply neither copy nor wait for other ranges.
//
// Floors: a fragment takes 8 wavefronts of shared memory with cell 1, 4 with cell 2, for its words,
// as much as an eighth of that for those that arrive, and 1 for each 16 columns of x; and, of
// numbers of 16 bits, 24 or 12 instructions. Those of 8 bits take as many wavefronts as cell 1, and
// more instructions, to widen them. From memory comes each word once for each tile of columns, from
// the L2 cache x once for each block.
#include "cuda/warpgroup.cuh"
#include "packed/kernels/packed_exact.cuh"
#include "packed/kernels/packed_panels.cuh"
#include "packed/kernels/packed_sums.cuh"
#include "packed/kernels/packed_turns.cuh"

namespace jaxsparse {

// A range's warp that copies: words and masks of its strips, by a lane each, and panels of x.
// `piece_of_lane` loads what is needed to begin with words, x needs none of it.
template <typename T, PackedWgmmaConfig kConfig, typename Function>
__device__ __forceinline__ void ProduceRange(PackedXProducer<T, kConfig> x,
                                             const PackedTurns<kConfig>& turns, uint32_t panels,
                                             Function piece_of_lane) {
  if (panels == 0) return;
  PipelineState<kConfig.Stages()> stage;
  x.Copy(stage.stage, turns.TurnOf(0).full);
  PackedWordProducer<kConfig> words(turns, piece_of_lane());
  words.Turn(0);
#pragma unroll 1
  for (uint32_t panel = 1; panel < panels; ++panel) {
    words.Turn(panel);
    stage.Advance();
    WaitForPhase(turns.EmptyX(stage.stage), stage.phase ^ 1);
    x.Copy(stage.stage, turns.TurnOf(panel).full);
  }
}

// The sums of a warp's piece, by products of its warpgroup.
template <typename T, PackedWgmmaConfig kConfig>
__device__ __forceinline__ void SumPiece(const PackedPanelsOfX<kConfig>& x,
                                         const PackedTurns<kConfig>& turns, int strip,
                                         uint32_t panels, float (&sums)[kConfig.columns / 8][4]) {
  constexpr int kSums = kConfig.columns / 2, kStages = kConfig.Stages();
  constexpr int kFragments = kConfig.Fragments(), kOfPanel = kPackedPanelColumns / 16;
  constexpr int kOfStep = 4 * kConfig.cell, kOfWrap = 4;
  const int lane = threadIdx.x % kWarp;
  using Streams = PackedStreamsOf<T, kConfig.numbers, kConfig.cell, kConfig.RingRows()>;
  typename Streams::Type streams(turns.Ring(strip));
  float of_panel[kSums] = {};
  // Tensor cores cut off what does not fit when they add, so only a panel is summed there.
  const auto add_panel = [&] {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[i / 4][i % 4] += of_panel[i];
      of_panel[i] = 0;
    }
  };
  uint32_t stage = 0, stage_before = 0;  // of x
#pragma unroll 1
  for (uint32_t panel = 0; panel < panels; ++panel) {
    turns.TurnOf(panel).WaitUntilFull();
    FenceShared();                 // tensor cores read what lanes had copied
    uint32_t a[2][kFragments][4];  // one is made while tensor cores read the other
    uint32_t mask = 0;
#pragma unroll
    for (int first = 0; first < kOfPanel; first += kFragments) {
      uint32_t (&made)[kFragments][4] = a[first / kFragments % 2];
      if (first % kOfStep == 0) {
        mask = SharedAt<const uint32_t>(turns.Masks(strip, panel) +
                                        first / kOfStep * kPackedRowBytes + lane * 4);
      }
      if (first % kOfWrap == 0) streams.Wrap();
      streams.Fragments(mask, first % kOfStep, made);
      WaitForGroups<0>();
      KeepInRegisters(of_panel);
      if (first == 0) {
        add_panel();
        if (panel > 0 && lane == 0) {
          Arrive(turns.EmptyX(stage_before));
        }
        KeepInRegisters(of_panel);
      }
      FenceProducts();
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        MultiplyAdd<!kConfig.x_on_left>(T(), of_panel, made[f], x.Matrix(stage, (first + f) * 16));
      }
      CommitProducts();
    }
    streams.PadTo(SharedAt<const uint32_t>(turns.Needed(strip, panel)));
    __syncwarp();
    if (lane == 0) turns.TurnOf(panel).Emptied();
    stage_before = stage;
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  WaitForGroups<0>();
  KeepInRegisters(of_panel);
  add_panel();
}

// A block has as many parts as it has ranges; where there are more, blocks of all are a cluster.
template <typename T, typename Out, PackedWgmmaConfig kConfig>
__global__ void __launch_bounds__(kConfig.Threads(), 1)
    PackedWgmma(const __grid_constant__ PackedProblem p) {
  constexpr int kWarps = kConfig.warps, kStrips = kConfig.Strips(), kRanges = kConfig.ranges;
  constexpr int kTiles = kConfig.columns / 8;
  // Named barriers: of ranges, where copies begin, and of strips, where sums are added up.
  constexpr int kRangeBarriers = kAllThreads + 1, kStripBarriers = kRangeBarriers + kRanges;
  extern __shared__ __align__(1024) unsigned char packed_shared[];
  const int warp = WarpOfBlock();
  // In 32 bits: divisions of 64 take long, and before them nothing is copied.
  const auto parts = static_cast<uint32_t>(p.parts), blocks = parts / kRanges;
  const uint32_t across = (static_cast<uint32_t>(p.n) + kConfig.columns - 1) / kConfig.columns;
  const uint32_t width = parts * kPackedPanelColumns;  // of a panel of each part
  const uint32_t panels = (static_cast<uint32_t>(p.k) + width - 1) / width;
  const uint32_t tile = blockIdx.x / blocks, rank = blockIdx.x % blocks;
  const auto first_strip = static_cast<int>(tile / across) * kStrips;
  const auto first_column = static_cast<int>(tile % across) * kConfig.columns;
  const bool multiplies = warp < kWarps;
  const int range = multiplies ? warp / kStrips : warp - kWarps;
  const int part = static_cast<int>(rank) * kRanges + range;
  const uint32_t shared = AddressOfShared(packed_shared);
  const PackedTurns<kConfig> turns(shared, range);
  const PackedPanelsOfX<kConfig> x{shared + range * kConfig.Stages() * kConfig.PanelBytes()};
  const auto exists = [&](int strip) { return strip < PackedStrips(p); };
  // Of a strip that does not exist another one's masks, but no words.
  const auto number_of = [&](int strip) {
    return (exists(strip) ? int64_t{strip} : 0) * parts + part;
  };
  const auto piece_of = [&](int strip) {
    PackedPiece piece(p, number_of(strip), panels);
    if (!exists(strip)) piece.rows = 0;
    return piece;
  };

  constexpr int kThreadsOfRange = (kStrips + 1) * kWarp;
  if (!multiplies) {
    if constexpr (kConfig.SharesRegisters()) GiveUpRegisters<kConfig.kProducerRegisters>();
    if (range < kRanges) {
      const int strip = first_strip + static_cast<int>(threadIdx.x % kWarp) % kStrips;
      PackedPiece::Prefetch(p, number_of(strip), panels);
      if (threadIdx.x % kWarp == 0) {
        turns.Init();
        FenceShared();
      }
      __syncwarp();
      ArriveAt<kThreadsOfRange>(kRangeBarriers + range);
      ProduceRange<T, kConfig>({x, p, int64_t{panels} * part * kPackedPanelColumns, first_column},
                               turns, panels, [&] { return piece_of(strip); });
      __syncwarp();
    }
    if (blocks > 1) {
      ClusterBarrier();
      ClusterBarrier();
    }
    return;
  }

  if constexpr (kConfig.SharesRegisters()) TakeRegisters<kConfig.kConsumerRegisters>();
  const int strip_of_block = warp % kStrips;
  const int strip = first_strip + strip_of_block;
  using Result = PackedResult<T, Out, kConfig.numbers, kConfig.x_on_left>;
  Result::Prefetch(p, strip);
  float sums[kTiles][4] = {};
  WaitAt<kThreadsOfRange>(kRangeBarriers + range);
  SumPiece<T>(x, turns, strip_of_block, panels, sums);
  const Result result(p, strip);
  if (exists(strip) && !AreFinite(sums)) {
    MakeExact<T, kConfig.numbers, kConfig.cell>(p, piece_of(strip), part, first_column,
                                                turns.Ring(strip_of_block), sums);
  }
  if (parts == 1) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) result.Write(first_column + t * 8, sums[t]);
    return;
  }
  const PackedPartsOfCluster<kTiles, kRanges> all(
      PackedTurns<kConfig>(shared, 0).Ring(strip_of_block), kStrips * kConfig.WarpBytes(),
      static_cast<int>(blocks));
  all.Leave(range, sums);
  __syncwarp();
  if (blocks > 1) ClusterBarrier();
  else WaitAt<kRanges * kWarp>(kStripBarriers + strip_of_block);
#pragma unroll 1
  for (int t = part; t < kTiles; t += static_cast<int>(parts)) {
    float of_tile[4];
    all.AddUp(t, of_tile);
    result.Write(first_column + t * 8, of_tile);
  }
  __syncwarp();
  if (blocks > 1) ClusterBarrier();
}

}  // namespace jaxsparse
