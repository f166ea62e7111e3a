// The sampled dense-dense product on tensor cores: tile by tile x y^T is computed densely, and its
// stored entries are picked. A tile costs what tensor cores take for it, however many entries it
// has, where a product entry by entry reads a row of y for each.
//
// A prologue kernel (cuda/preparation.cuh) splits y into components of 16 bits, tile by tile as
// they are copied to shared memory, and finds where each row's entries of each tile begin. Two
// consumer warpgroups of a block multiply; the epilogue warps pick the entries of one tile while
// the next one is multiplied, each warp those that one consumer warp has the sums of. A block's
// work is cut into work units of a tile's rows and some neighbouring tiles: for a unit, rows of x
// are in registers. While the first tile of a unit is multiplied, epilogue warps find out which
// tiles of the next one have any entries. Others are left out. Epilogue warps take turns as the
// producer, which has tiles of y copied: a single producer warp was the bottleneck.
//
// A row whose columns do not rise has no entries in any tile. It is computed entry by entry with
// the last unit of its rows, and so are sums in float32 that are not finite: there is no component
// of an infinite number, so what meets one is NaN in the tile, and it alone, since rows and columns
// do not mix.
//
// Floors: 6 * rows * columns * d multiply-adds of tensor cores in float32, a sixth of them in 16
// bits, for tiles with entries, of which a multiprocessor does 2,048 a clock. Through shared
// memory, 128 bytes a clock, pass for each place of d of a tile, in float32, 6 * 64 bytes of y as
// they are copied and 2 * 12 * 64 as the warpgroups multiply; for each tile 32 KiB of sums, and 4
// bytes for each entry. From memory come x, y, column indices and scale, and goes the result, once
// each; in between, column indices and starts of tiles pass from the L2 cache once more, components
// of y once for every kSddmmTileRows rows.
#include "sddmm/kernels/sampled_rows.cuh"

namespace jaxsparse {

// The producer: has tiles of y copied, in the order in which they are multiplied. Epilogue warps
// take turns.
template <typename T, SddmmTensorConfig kConfig>
class SddmmProducer {
  static constexpr int kBytes = kConfig.StageBytes(kComponents<T>);
  static constexpr int kStages = kConfig.Stages(kComponents<T>);
  static_assert(kStages <= kSddmmWarps);
  uint32_t next_, queued_ = 0;  // the warp's next copy; how many there are in all

 public:
  __device__ explicit SddmmProducer(int warp) : next_(warp) {}

  // Queues those of a unit that are the warp's.
  __device__ __forceinline__ void Queue(SddmmControl& control, const SddmmUnit& unit) {
    const uint32_t lane = threadIdx.x % kWarp;
    const uint32_t place = queued_ + __popc(unit.tiles & ((1u << lane) - 1));
    if ((unit.tiles >> lane & 1) != 0 && (place - next_) % kSddmmWarps == 0) {
      control.queue[place % (2 * kSddmmUnitTiles)] = unit.tile_of_y + lane;
    }
    queued_ += __popc(unit.tiles);
    __syncwarp();
  }

  // Copies the next one, if it is queued and the warp has picked the tile that was in its stage.
  __device__ __forceinline__ void Copy(const SddmmProblem& p, SddmmControl& control,
                                       unsigned char* stages, uint32_t picked) {
    if (next_ >= queued_ || next_ >= picked + kStages) return;
    if (threadIdx.x % kWarp == 0) {
      const uint32_t place = next_ % kStages;
      const int64_t tile = control.queue[next_ % (2 * kSddmmUnitTiles)];
      const PipelineStage stage = control.TileAt(PipelineState<kStages>::Of(next_));
      stage.WaitUntilEmpty();
      stage.Expect(kBytes);
      BulkCopy(stages + place * kBytes, control.components_of_y + tile * kBytes, kBytes,
               stage.full);
    }
    next_ += kSddmmWarps;
  }
};

// Multiplies the tiles of a block's units, by its consumer warpgroups, the first ones.
template <typename T, SddmmTensorConfig kConfig>
__device__ __forceinline__ void MultiplyUnits(const SddmmProblem& p, SddmmControl& control,
                                              unsigned char* shared) {
  using TileY = BlockedTile<kSddmmTileColumns, kConfig.inner>;
  constexpr int kStages = kConfig.Stages(kComponents<T>);
  constexpr int kStageBytes = kConfig.StageBytes(kComponents<T>);
  static_assert(kStageBytes == kComponents<T> * TileY::kBytes && kStageBytes % 1024 == 0);
  using Rows = WarpgroupRows<T, kConfig.inner>;
  constexpr int kProductsAt = kConfig.ProductsAt(kComponents<T>);
  constexpr int kRowBytes = kSddmmProductPitch * 4;
  static_assert(Rows::kSpaceBytes <= kSddmmWarpRows * kRowBytes);
  const int warp = threadIdx.x / kWarp, group = WarpgroupOfBlock();
  const uint32_t stages = AddressOfShared(shared);
  const uint32_t products = stages + kProductsAt + group * (kSddmmTileRows / 2 * kRowBytes);
  uint32_t number = 0;  // of a tile
#pragma unroll 1
  for (uint32_t units = 0;; ++units) {
    const auto slot = PipelineState<2>::Of(units);
    WaitForPhase(&control.scheduled[slot.stage], slot.phase);
    const SddmmUnit& unit = control.units[slot.stage];
    int tiles = __popc(unit.tiles);
    if (tiles == 0) return;
    // Rows of x come where the next product will be.
    const auto next = PipelineState<kSddmmProducts>::Of(number);
    control.ProductAt(next, warp).WaitUntilEmpty();
    Rows rows;
    rows.Load(
        p.x.At<const T>(p.batch, unit.entry), p.pattern.rows, p.d,
        int64_t{unit.first_row} + group * (kSddmmTileRows / 2),
        shared + kProductsAt + next.stage * kSddmmProductBytes + warp * kSddmmWarpRows * kRowBytes);
#pragma unroll 1
    for (; tiles > 0; --tiles, ++number) {
      WarpgroupProduct<T, kSddmmTileColumns> product;
      const auto from = PipelineState<kStages>::Of(number);
      const auto to = PipelineState<kSddmmProducts>::Of(number);
      control.TileAt(from).WaitUntilFull();
      // In a way that tells a compiler that all lanes agree.
      const uint32_t y = __shfl_sync(kAllLanes, stages + from.stage * kStageBytes, 0);
      product.template Add<TileY, false>(rows, y);
      control.TileAt(from).Emptied();
      control.ProductAt(to, warp).WaitUntilEmpty();
      const uint32_t rows_of_product = products + to.stage * kSddmmProductBytes;
      product.ForEachPair([&](int r, int c, float low, float high) {
        SharedAt<Vector<float, 2>>(rows_of_product + r * kRowBytes + c * 4) = {{low, high}};
      });
      control.ProductAt(to, warp).Filled();
    }
  }
}

// Picks the entries of a block's units, by its epilogue warps.
template <typename T, typename Out, typename Index, SddmmTensorConfig kConfig>
__device__ __forceinline__ void PickUnits(const SddmmProblem& p, SddmmControl& control,
                                          unsigned char* stages) {
  const uint32_t products = AddressOfShared(stages) + kConfig.ProductsAt(kComponents<T>);
  const int warp = threadIdx.x / kWarp - kSddmmWarps;
  if (control.prepared.own_starts > 0) WaitForPrologue();  // it finds starts
  SddmmScheduler<T, Out, Index> scheduler(p, control);
  SddmmProducer<T, kConfig> producer(warp);
  uint32_t picked = 0;  // tiles
  int slot = 0;
  // The unit before the first one is empty.
#pragma unroll 1
  for (int tiles = 0;; slot ^= 1) {
    const SddmmUnit next = scheduler.Schedule(slot);
    producer.Queue(control, next);
    WaitForPrologue();  // it writes components of y
    SampledRows<T, Out, Index, kConfig.scaled> entries(control.prepared, control.units[slot ^ 1],
                                                       static_cast<int>(p.pattern.nse));
#pragma unroll 1
    while (true) {
      producer.Copy(p, control, stages, picked);
      if (tiles == 0) break;
      const auto at = PipelineState<kSddmmProducts>::Of(picked);
      const PipelineStage product = control.ProductAt(at, warp);
      product.WaitUntilFull();
      entries.Read(products + at.stage * kSddmmProductBytes);
      product.Emptied();
      entries.Write();
      ++picked;
      --tiles;
      entries.Load();
    }
    entries.WriteOthers(p);
    tiles = __popc(next.tiles);
    if (tiles == 0) return;
  }
}

// The prologue kernel.
template <typename T, typename Index, SddmmTensorConfig kConfig>
__global__ void __launch_bounds__(kPrepareThreads, kPrepareBlocks)
    SddmmPrepare(const __grid_constant__ SddmmProblem p) {
  constexpr int kInner = kConfig.inner;
  Prepare<T, Index, kInner>(PreparationOf<T, kInner>(p), p.batch, p.pattern, p.y, p.workspace);
}

template <typename T, typename Out, typename Index, SddmmTensorConfig kConfig>
__global__ void __launch_bounds__(kSddmmTensorThreads, 1)
    SddmmTensorCores(const __grid_constant__ SddmmProblem p) {
  constexpr int kStages = kConfig.Stages(kComponents<T>);
  constexpr int kConsumerRegisters = 168, kEpilogueRegisters = 88;
  extern __shared__ __align__(1024) unsigned char sddmm_shared[];
  SddmmControl& control =
      *reinterpret_cast<SddmmControl*>(sddmm_shared + kConfig.ControlAt(kComponents<T>));
  // By several warps, as all wait for it.
  if (threadIdx.x < kSddmmWarps) {
    const int i = threadIdx.x;
    if (i < 2) InitBarrier(&control.scheduled[i], 1);
    if (i < kStages) control.TileAt<kStages>({threadIdx.x}).Init(1, kSddmmRoleThreads);
    for (uint32_t product = 0; product < kSddmmProducts; ++product) {
      control.ProductAt({product}, i).Init(kWarp, kWarp);
    }
    FenceShared();
  }
  if (threadIdx.x == kWarp) control.schedule = SddmmSchedule(p);
  if (threadIdx.x == 2 * kWarp) {
    control.prepared = PreparationOf<T, kConfig.inner>(p);
    control.components_of_y = control.prepared.ComponentsIn(p.workspace);
  }
  if (threadIdx.x == 3 * kWarp) control.units[1] = {};
  __syncthreads();
  if (threadIdx.x < kSddmmRoleThreads) {
    TakeRegisters<kConsumerRegisters>();
    MultiplyUnits<T, kConfig>(p, control, sddmm_shared);
  } else {
    GiveUpRegisters<kEpilogueRegisters>();
    PickUnits<T, Out, Index, kConfig>(p, control, sddmm_shared);
  }
}

}  // namespace jaxsparse
