// The product by a packed matrix (packed/problem.h) on tensor cores of warpgroups. A block makes a
// tile of the result, or one of the parts of its columns: a strip for each of eight warps, which
// walk through its piece and make fragments of the matrix in registers, so that it is never written
// out. Tensor cores of each four of them multiply these by x in shared memory, while the next
// fragments are made. Other warps bring words, masks and x there, so that those that multiply
// neither copy nor wait for one another.
//
// Floors: a fragment takes 8 wavefronts of shared memory with cell 1, 4 with cell 2, for its words,
// as much as an eighth of that for those that arrive, and 1 for each 16 columns of x; and 24 or 12
// instructions. From memory comes each word once for each tile of columns.
#include "cuda/warpgroup.cuh"
#include "packed/kernels/packed_exact.cuh"
#include "packed/kernels/packed_panels.cuh"
#include "packed/kernels/packed_sums.cuh"
#include "packed/kernels/packed_turns.cuh"

namespace jaxsparse {

// Where panels of x come and go: warps of producers take turns.
template <PackedWgmmaConfig kConfig>
class PackedXStages {
  static constexpr uint32_t kStages = kConfig.Stages();
  uint64_t* barriers_;

 public:
  __device__ explicit PackedXStages(unsigned char* shared)
      : barriers_(reinterpret_cast<uint64_t*>(shared + kConfig.BarriersAt()) + 2 * kConfig.kTurns) {
  }
  __device__ void Init() const {
    for (uint32_t stage = 0; stage < kStages; ++stage) {
      StageOf(stage).Init(1, kConfig.warps);
    }
  }
  __device__ __forceinline__ PipelineStage StageOf(uint32_t panel) const {
    const auto at = PipelineState<kStages>::Of(panel);
    return {barriers_ + at.stage, barriers_ + kStages + at.stage, at.phase};
  }
};

// A warp that copies panels of x, every one of kXProducers, of which some are under way at once.
template <typename T, PackedWgmmaConfig kConfig>
__device__ __forceinline__ void ProduceX(const PackedPanelsOfX<T, kConfig>& x,
                                         const PackedXStages<kConfig>& stages, uint32_t first,
                                         uint32_t panels) {
  constexpr uint32_t kEvery = kConfig.kXProducers, kAtOnce = kConfig.Stages() / kEvery;
  constexpr uint32_t kBehind = (kAtOnce - 1) * kEvery;
#pragma unroll 1
  for (uint32_t panel = first; panel < panels + kBehind; panel += kEvery) {
    if (panel < panels) {
      stages.StageOf(panel).WaitUntilEmpty();
      x.Copy(panel, panel % kConfig.Stages());
    } else {
      CommitCopies();
    }
    if (panel < first + kBehind) continue;
    x.template Await<kAtOnce - 1>();
    if (threadIdx.x % kWarp == 0) stages.StageOf(panel - kBehind).Filled();
  }
}

// The sums of a warp's piece, by products of its warpgroup.
template <typename T, PackedWgmmaConfig kConfig>
__device__ __forceinline__ void SumPiece(const PackedPanelsOfX<T, kConfig>& x,
                                         const PackedXStages<kConfig>& x_stages,
                                         const PackedTurns<kConfig>& turns, int warp,
                                         uint32_t panels, float (&sums)[kConfig.columns / 8][4]) {
  constexpr int kSums = kConfig.columns / 2;
  constexpr int kQuarters = 4, kFragments = 4;  // of a panel, and of a quarter
  PackedTurnsConsumer<kConfig> words(turns, warp, panels);
  using Streams = PackedStreamsOf<T, kConfig.numbers, kConfig.cell, kConfig.RingRows()>;
  typename Streams::Type streams(turns.Ring(warp));
  float of_panel[kSums] = {};
  // Tensor cores cut off what does not fit when they add, so only a panel is summed there.
  const auto add_panel = [&] {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      sums[i / 4][i % 4] += of_panel[i];
      of_panel[i] = 0;
    }
  };
#pragma unroll 1
  for (uint32_t panel = 0; panel < panels; ++panel) {
    const uint32_t needed = words.Enter();
    const int stage = panel % kConfig.Stages();
    uint32_t a[2][kFragments][4];  // one is made while tensor cores read the other
    uint32_t masks[kQuarters / kConfig.cell];
#pragma unroll
    for (int step = 0; step < kQuarters / kConfig.cell; ++step) masks[step] = words.Mask(step);
#pragma unroll
    for (int quarter = 0; quarter < kQuarters; ++quarter) {
      streams.Wrap();
      streams.Fragments(masks[quarter / kConfig.cell], quarter % kConfig.cell * kFragments,
                        a[quarter % 2]);
      WaitForGroups<0>();
      KeepInRegisters(of_panel);
      if (quarter == 0) {
        add_panel();
        if (panel > 0 && threadIdx.x % kWarp == 0) x_stages.StageOf(panel - 1).Emptied();
        x_stages.StageOf(panel).WaitUntilFull();
        KeepInRegisters(of_panel);
      }
      FenceProducts();
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        MultiplyAdd<!kConfig.x_on_left>(T(), of_panel, a[quarter % 2][f],
                                        x.Matrix(stage, (quarter * kFragments + f) * 16));
      }
      CommitProducts();
    }
    streams.PadTo(needed);
    words.Leave();
  }
  WaitForGroups<0>();
  KeepInRegisters(of_panel);
  add_panel();
  words.WaitForAll();
}

// The blocks of a tile's parts are a cluster.
template <typename T, typename Out, PackedWgmmaConfig kConfig>
__global__ void __launch_bounds__(kConfig.Threads(), 1)
    PackedWgmma(const __grid_constant__ PackedProblem p) {
  constexpr int kWarps = kConfig.warps, kWordProducers = kConfig.kWordProducers;
  extern __shared__ __align__(1024) unsigned char packed_shared[];
  const int warp = WarpOfBlock();
  const int64_t across = CeilDivide(p.n, kConfig.columns);
  const int64_t tile = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
  const int64_t first_strip = tile / across * kWarps;
  const int64_t first_column = tile % across * kConfig.columns;
  const auto panels = static_cast<uint32_t>(PackedPanels(p.k, p.parts));
  const PackedTurns<kConfig> turns(packed_shared);
  const PackedXStages<kConfig> x_stages(packed_shared);
  const PackedPanelsOfX<T, kConfig> x(p, part * panels * kPackedPanelColumns, first_column,
                                      AddressOfShared(packed_shared) + kConfig.PanelsAt());
  const auto piece_of = [&](int64_t strip) {
    const bool exists = strip < PackedStrips(p);
    PackedPiece piece(p, exists ? strip * p.parts + part : part);
    if (!exists) piece.rows = 0;
    return piece;
  };
  if (threadIdx.x == 0) {
    turns.Init();
    x_stages.Init();
    FenceShared();
  }
  __syncthreads();

  const int64_t strip = first_strip + warp;
  const bool multiplies = warp < kWarps, exists = multiplies && strip < PackedStrips(p);
  float sums[kConfig.columns / 8][4] = {};
  if (multiplies) {
    SumPiece<T>(x, x_stages, turns, warp, panels, sums);
    if (exists) {
      MakeExact<T, kConfig.numbers, kConfig.cell>(p, piece_of(strip), part, first_column,
                                                  turns.Ring(warp), sums);
    }
  } else if (warp < kWarps + kWordProducers) {
    using Producer = PackedWordProducer<kConfig>;
    const int first = (warp - kWarps) * kWarps / kWordProducers;
    Producer(turns, first, piece_of(first_strip + Producer::StripOfLane(first))).Run();
  } else {
    ProduceX(x, x_stages, warp - kWarps - kWordProducers, panels);
  }
  const bool is_whole =
      p.parts == 1 || AddPartsOfCluster(static_cast<int>(p.parts), static_cast<int>(part),
                                        multiplies ? warp : -1, turns.Ring(warp), sums);
  if (exists && is_whole) WriteSums<T, Out, kConfig>(p, strip, first_column, sums);
  __syncwarp();
  if (p.parts > 1) ClusterBarrier();
}

}  // namespace jaxsparse
