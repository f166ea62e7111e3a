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

// Of a block's tiles, one after another: its place in the result, and whether there is one more.
template <PackedWgmmaConfig kConfig>
struct PackedTileOfBlock {
  uint32_t number, apart, across, count;

  // `blocks`: so many make a tile together.
  __device__ PackedTileOfBlock(const PackedProblem& p, uint32_t blocks)
      : number(blockIdx.x / blocks),
        apart(gridDim.x / blocks),
        across((static_cast<uint32_t>(p.n) + kConfig.columns - 1) / kConfig.columns),
        count(static_cast<uint32_t>(CeilDivide(p.m, kConfig.TileRows())) * across) {}

  __device__ __forceinline__ bool Exists() const { return number < count; }
  __device__ __forceinline__ int FirstStrip() const {
    return static_cast<int>(number / across) * kConfig.Strips();
  }
  __device__ __forceinline__ int FirstColumn() const {
    return static_cast<int>(number % across) * kConfig.columns;
  }
  // Goes on to the next tile; false if there is none.
  __device__ __forceinline__ bool Advance() {
    number += apart;
    return kConfig.MakesMoreTiles() && Exists();
  }
};

// The pieces of a range, by strips of the tile.
struct PackedRange {
  const PackedProblem& p;
  int part;
  uint32_t panels;

  __device__ __forceinline__ bool Exists(int strip) const { return strip < PackedStrips(p); }
  // Of a strip that does not exist another one's masks, but no words.
  __device__ __forceinline__ int64_t NumberOf(int strip) const {
    return (Exists(strip) ? int64_t{strip} : 0) * p.parts + part;
  }
  __device__ __forceinline__ PackedPiece PieceOf(int strip) const {
    PackedPiece piece(p, NumberOf(strip), panels);
    if (!Exists(strip)) piece.rows = 0;
    return piece;
  }
  __device__ __forceinline__ void Prefetch(int strip) const {
    PackedPiece::Prefetch(p, NumberOf(strip), panels);
  }
};

// A range's warp that copies: words and masks of its strips, by a lane each, and panels of x.
template <typename T, PackedWgmmaConfig kConfig>
__device__ __forceinline__ void ProduceRange(const PackedRange& range,
                                             const PackedTurns<kConfig>& turns,
                                             PackedTileOfBlock<kConfig> tile,
                                             PackedXProducer<T, kConfig> x) {
  const int strip_of_tile = static_cast<int>(threadIdx.x % kWarp) % kConfig.Strips();
  PackedWordProducer<kConfig> words(turns);
  PipelineState<kConfig.Stages()> stage;
  bool more = tile.Exists();
#pragma unroll 1
  while (more) {
    words.Begin(range.PieceOf(tile.FirstStrip() + strip_of_tile));
    x.Begin(tile.FirstColumn());
    more = tile.Advance();
    if (more) range.Prefetch(tile.FirstStrip() + strip_of_tile);
#pragma unroll 1
    for (uint32_t panel = 0; panel < range.panels; ++panel) {
      const PipelineStage turn = words.Turn();
      WaitForPhase(turns.EmptyX(stage.stage), stage.phase ^ 1);
      x.Copy(stage.stage, turn.full);
      stage.Advance();
    }
  }
}

// What a warp that multiplies has read: turns, the row of the ring behind the last one, and a stage
// of x.
struct PackedProgress {
  uint32_t turn = 0, row = 0, stage = 0;
};

// The sums of a warp's piece, by products of its warpgroup.
template <typename T, PackedWgmmaConfig kConfig>
__device__ __forceinline__ void SumPiece(const PackedPanelsOfX<kConfig>& x,
                                         const PackedTurns<kConfig>& turns, int strip,
                                         uint32_t panels, PackedProgress& progress,
                                         float (&sums)[kConfig.columns / 8][4]) {
  constexpr int kSums = kConfig.columns / 2, kStages = kConfig.Stages();
  constexpr int kFragments = kConfig.Fragments(), kOfPanel = kPackedPanelColumns / 16;
  constexpr int kOfStep = 4 * kConfig.cell, kOfWrap = 4;
  const int lane = threadIdx.x % kWarp;
  using Streams = PackedStreamsOf<T, kConfig.numbers, kConfig.cell, kConfig.RingRows()>;
  typename Streams::Type streams(turns.Ring(strip));
  streams.Begin(progress.row);
  float of_panel[kSums] = {};
  // Tensor cores cut off what does not fit when they add, so only a panel is summed there.
  const auto add_panel = [&] {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[i / 4][i % 4] += of_panel[i];
      of_panel[i] = 0;
    }
  };
  uint32_t stage_before = 0;  // of x
#pragma unroll 1
  for (uint32_t panel = 0; panel < panels; ++panel) {
    const uint32_t number = progress.turn++, stage = progress.stage;
    turns.TurnOf(number).WaitUntilFull();
    // Tensor cores read what lanes had copied.
    if constexpr (!kConfig.IsForTiles()) FenceShared();
    uint32_t a[2][kFragments][4];  // one is made while tensor cores read the other
    uint32_t mask = 0;
#pragma unroll
    for (int first = 0; first < kOfPanel; first += kFragments) {
      uint32_t (&made)[kFragments][4] = a[first / kFragments % 2];
      if (first % kOfStep == 0) {
        mask = SharedAt<const uint32_t>(turns.Masks(strip, number) +
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
    progress.row = SharedAt<const uint32_t>(turns.Needed(strip, number));
    streams.PadTo(progress.row);
    __syncwarp();
    if (lane == 0) turns.TurnOf(number).Emptied();
    stage_before = stage;
    progress.stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  WaitForGroups<0>();
  KeepInRegisters(of_panel);
  add_panel();
  if (panels > 0 && lane == 0) Arrive(turns.EmptyX(stage_before));
}

// A block has as many parts as it has ranges; where there are more, blocks of all are a cluster,
// which makes one tile.
template <typename T, typename Out, PackedWgmmaConfig kConfig>
__global__ void __launch_bounds__(kConfig.Threads(), 1)
    PackedWgmma(const __grid_constant__ PackedWgmmaProblem p) {
  constexpr int kWarps = kConfig.warps, kStrips = kConfig.Strips(), kRanges = kConfig.ranges;
  constexpr int kTiles = kConfig.columns / 8;
  // Named barriers: of ranges, where copies begin, and of strips, where sums are added up.
  constexpr int kRangeBarriers = kAllThreads + 1, kStripBarriers = kRangeBarriers + kRanges;
  extern __shared__ __align__(1024) unsigned char packed_shared[];
  const int warp = WarpOfBlock();
  // In 32 bits: divisions of 64 take long, and before them nothing is copied.
  const auto parts = static_cast<uint32_t>(p.parts), blocks = parts / kRanges;
  const uint32_t width = parts * kPackedPanelColumns;  // of a panel of each part
  const uint32_t panels = (static_cast<uint32_t>(p.k) + width - 1) / width;
  PackedTileOfBlock<kConfig> tile(p, blocks);
  const bool multiplies = warp < kWarps;
  const int range = multiplies ? warp / kStrips : warp - kWarps;
  const int part = static_cast<int>(blockIdx.x % blocks) * kRanges + range;
  const PackedRange pieces{p, part, panels};
  const uint32_t shared = AddressOfShared(packed_shared);
  const PackedTurns<kConfig> turns(shared, range);
  const PackedPanelsOfX<kConfig> x{shared + range * kConfig.Stages() * kConfig.PanelBytes()};

  constexpr int kThreadsOfRange = (kStrips + 1) * kWarp;
  if (!multiplies) {
    if constexpr (kConfig.SharesRegisters()) GiveUpRegisters<kConfig.kProducerRegisters>();
    if (range < kRanges) {
      using XProducer = PackedXProducer<T, kConfig>;
      pieces.Prefetch(tile.FirstStrip() + static_cast<int>(threadIdx.x % kWarp) % kStrips);
      if (threadIdx.x % kWarp == 0) {
        turns.Init(XProducer::kArrivals);
        FenceShared();
      }
      __syncwarp();
      ArriveAt<kThreadsOfRange>(kRangeBarriers + range);
      ProduceRange<T, kConfig>(
          pieces, turns, tile,
          XProducer(x, p, static_cast<int>(panels) * part * kPackedPanelColumns));
      __syncwarp();
    }
    if (blocks > 1) {
      ClusterBarrier();
      ClusterBarrier();
    }
    return;
  }

  if constexpr (kConfig.SharesRegisters()) TakeRegisters<kConfig.kConsumerRegisters>();
  const int strip_of_tile = warp % kStrips;
  using Result = PackedResult<T, Out, kConfig.numbers, kConfig.x_on_left>;
  Result::Prefetch(p, tile.FirstStrip() + strip_of_tile);
  WaitAt<kThreadsOfRange>(kRangeBarriers + range);
  PackedProgress progress;
  bool is_first = true, more = tile.Exists();
#pragma unroll 1
  while (more) {
    const int strip = tile.FirstStrip() + strip_of_tile, first_column = tile.FirstColumn();
    more = tile.Advance();
    float sums[kTiles][4] = {};
    SumPiece<T>(x, turns, strip_of_tile, panels, progress, sums);
    const Result result(p, strip);
    if (more) Result::Prefetch(p, tile.FirstStrip() + strip_of_tile);
    const uint32_t space = turns.Sums(strip_of_tile);
    // Where other warps' sums of the tile before may still be read, they are waited for.
    if (!is_first && parts > 1) WaitAt<kRanges * kWarp>(kStripBarriers + strip_of_tile);
    is_first = false;
    if (pieces.Exists(strip) && !AreFinite(sums)) {
      MakeExact<T, kConfig.numbers, kConfig.cell>(p, pieces.PieceOf(strip), part, first_column,
                                                  space, sums);
    }
    if (parts == 1) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t) result.Write(first_column + t * 8, sums[t]);
      continue;
    }
    const PackedPartsOfCluster<kTiles, kRanges> all(
        PackedTurns<kConfig>(shared, 0).Sums(strip_of_tile), kStrips * kConfig.WarpBytes(),
        static_cast<int>(blocks));
    all.Leave(range, sums);
    __syncwarp();
    if (blocks > 1) ClusterBarrier();
    else WaitAt<kRanges * kWarp>(kStripBarriers + strip_of_tile);
#pragma unroll 1
    for (int t = part; t < kTiles; t += static_cast<int>(parts)) {
      float of_tile[4];
      all.AddUp(t, of_tile);
      result.Write(first_column + t * 8, of_tile);
    }
    __syncwarp();
    if (blocks > 1) ClusterBarrier();
  }
}

}  // namespace jaxsparse
