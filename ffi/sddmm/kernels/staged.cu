// The sampled dense-dense product of rows that all read y from shared memory. A block computes the
// entries of some rows, a tile, and walks over y panel by panel; the next panels are copied
// meanwhile. A warp owns some rows of the tile and takes, of each, the entries that lie in the
// panel, 32 at a time. So every load of y takes the same time, whether or not rows walk through the
// columns in step. Where rows are few, several tiles share them, each with its part of the columns.
//
// A group of lanes takes an entry: each multiplies some vectors of 16 bytes by the row of x in its
// registers. Of a quarter of a warp, which reads shared memory at once, no two lanes read
// the same banks, though they read several rows: groups take their vectors in different order. What
// the lanes of a group have to add up they exchange for all entries at once.
//
// Columns of a row may stand in any order and more than once: the walk stops at the first entry
// behind the panel, and entries that lie outside of it read y from memory.
//
// Floors: every entry reads a row of y from shared memory, 128 bytes a clock and
// multiprocessor, and passes about two words from lane to lane, a sixteenth of a clock for each
// lane of a group; each tile writes its part of y there once, and each visit of a row reads x. From
// memory come the columns, x and y once, and the result is written once; from L2 comes y as often
// as there are tiles of rows.
#include "cuda/panel_pipeline.cuh"
#include "cuda/row_swizzle.cuh"
#include "sddmm/kernels/staged.h"

namespace jaxsparse {

// Of one batch entry some columns, and the rows that SwizzledRow tells.
struct StagedTile {
  uint32_t entry;
  uint32_t part;
  uint32_t number;  // among those of the same columns
};

template <SddmmStagedConfig kConfig>
struct StagedSchedule {
  uint32_t down;    // tiles of the same columns
  uint32_t panels;  // of each

  __device__ explicit StagedSchedule(const SddmmProblem& p)
      : down(p.pattern.rows == 0
                 ? 1
                 : static_cast<uint32_t>(CeilDivide(p.pattern.rows, kConfig.TileRows()))),
        panels(p.pattern.rows == 0 ? 0
                                   : static_cast<uint32_t>(CeilDivide(
                                         p.pattern.columns, kConfig.panel * kConfig.parts))) {}

  __device__ StagedTile TileAt(uint32_t tile) const {
    return {tile / down / kConfig.parts, tile / down % kConfig.parts, tile % down};
  }
  __device__ uint32_t FirstColumn(uint32_t part) const { return part * panels * kConfig.panel; }
};

// The panels of all of a block's tiles, one after another.
template <typename T, SddmmStagedConfig kConfig>
struct StagedPanels {
  static constexpr int kPanel = kConfig.panel;
  const SddmmProblem& p;
  const StagedSchedule<kConfig>& schedule;

  __device__ MatrixPanel<T> operator()(uint32_t panel) const {
    const StagedTile tile = schedule.TileAt(blockIdx.x + panel / schedule.panels * gridDim.x);
    const int64_t first = schedule.FirstColumn(tile.part) + panel % schedule.panels * kPanel;
    const int64_t left = p.pattern.columns - first;
    const T* y = p.y.At<const T>(p.batch, tile.entry);
    return {y + first * p.d, p.d,
            static_cast<int>(left < 0        ? 0
                             : left < kPanel ? left
                                             : kPanel),
            static_cast<int>(p.d)};
  }
};

// Where the entries of a warp's rows are that have not been taken: lane `slot` knows it for row
// `slot`. Behind the warp's own rows comes one that all warps share, each taking 32 entries of
// every 512.
template <int kRows>
struct RowCursors {
  int next = 0, end = 0;  // of the shared row, `next` counts the warp's entries
  int first_shared = 0;   // the warp's first, in all lanes

  __device__ __forceinline__ int PlaceOf(int slot, uint32_t i) const {
    return slot == kRows ? first_shared + i + i / kWarp * (kSddmmStagedThreads - kWarp) : i;
  }
};

// The next 32 entries of a row, loaded while the warp multiplies others.
template <SddmmStagedConfig kConfig>
struct Chunk {
  static constexpr uint32_t kNone = ~0u;  // no column
  uint32_t column;                        // of the entry of the lane's number
  int place;                              // of the entry whose sum the lane gets

  // Which of the entries that is.
  __device__ __forceinline__ static int Mine(int lane) {
    constexpr int kLanes = kConfig.lanes;
    return lane % kLanes * kConfig.Groups() + lane / kLanes;
  }

  template <typename Index>
  __device__ __forceinline__ void Load(const Index* columns,
                                       const RowCursors<kConfig.rows>& cursors, int slot) {
    const int lane = threadIdx.x % kWarp;
    const int next = __shfl_sync(kAllLanes, cursors.next, slot);
    const int end = __shfl_sync(kAllLanes, cursors.end, slot);
    const int from = cursors.PlaceOf(slot, next + lane);
    column = from < end ? static_cast<uint32_t>(columns[from]) : kNone;
    place = cursors.PlaceOf(slot, next + Mine(lane));
  }
};

// A lane's part of rows in shared memory, by addresses.
template <typename T, SddmmStagedConfig kConfig>
struct LanePart {
  static constexpr int kBanksBytes = 128;
  static constexpr int kVector = 16 / sizeof(T);  // elements
  static constexpr int kVectors = kConfig.vectors, kLanes = kConfig.lanes;
  static constexpr int kTurns = 8 / kLanes;  // vectors of a lane in 128 bytes
  static_assert(kConfig.RowBytes() % kBanksBytes == 0 && kLanes <= 8);
  using RowVector = Vector<T, kVector>;

  float x[kVectors * kVector];

  __device__ __forceinline__ static RowVector VectorAt(uint32_t row, int vector) {
    const uint32_t slot = (threadIdx.x % 8 ^ vector % kTurns * kLanes) * 16;
    return SharedAt<const RowVector>(row + slot + vector / kTurns * kBanksBytes);
  }

  __device__ __forceinline__ void LoadX(uint32_t row) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const RowVector of_x = VectorAt(row, vector);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        x[vector * kVector + i] = ToAccumulator(of_x.elements[i]);
      }
    }
  }

  __device__ __forceinline__ float MultiplyBy(uint32_t row) const {
    float sums[2] = {};  // so that an addition need not wait for the one before
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const RowVector of_y = VectorAt(row, vector);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        sums[i % 2] += x[vector * kVector + i] * ToAccumulator(of_y.elements[i]);
      }
    }
    return sums[0] + sums[1];
  }

  // Sums of the first `count` entries of a chunk, whose rows of y lie at `row`, one a lane. A lane
  // gets that of Chunk::Mine.
  template <bool kWhole>
  __device__ __forceinline__ float SumsOf(uint32_t row, int count) const {
    const int group = threadIdx.x % kWarp / kLanes;
    float sums[kLanes] = {};
#pragma unroll
    for (int k = 0; k < kLanes; ++k) {
      const int entry = k * kConfig.Groups() + group;
      if (!kWhole && k * kConfig.Groups() >= count) break;
      const uint32_t at = __shfl_sync(kAllLanes, row, entry);
      if (kWhole || entry < count) sums[k] = MultiplyBy(at);
    }
    return ExchangeSums(sums);
  }
};

// The same for entries that need not lie in the panel: y comes from memory, x is a row in shared
// memory.
template <typename T, typename ChunkOf>
__device__ float SumsFromMemory(const T* x, const T* y, int64_t d, int64_t columns, uint32_t column,
                                int count) {
  const int lane = threadIdx.x % kWarp;
  float own = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const int64_t from = __shfl_sync(kAllLanes, column, i);
    float sum = 0;
#pragma unroll 1
    for (int64_t c = lane; c < d && from < columns; c += kWarp) {
      sum += ToAccumulator(x[c]) * ToAccumulator(y[from * d + c]);
    }
    sum = SumOverLanes(sum, kWarp);
    if (ChunkOf::Mine(lane) == i) own = sum;
  }
  return own;
}

// Writes a row of x to shared memory, with zeros behind it; called by all lanes of a warp.
template <typename T, int kElements>
__device__ __forceinline__ void StageRow(T* to, const T* from, int64_t d) {
#pragma unroll
  for (int k = 0; k < CeilDivide(kElements, kWarp); ++k) {
    const int c = k * kWarp + threadIdx.x % kWarp;
    if (c < kElements) to[c] = c < d ? from[c] : T{};
  }
}

template <typename T, typename Out, typename Index, SddmmStagedConfig kConfig>
__global__ void __launch_bounds__(kSddmmStagedThreads, 1)
    SddmmStaged(const __grid_constant__ SddmmProblem p) {
  constexpr int kRows = kConfig.rows, kPanel = kConfig.panel;
  constexpr int kRowBytes = kConfig.RowBytes(), kElements = kRowBytes / sizeof(T);
  using Panels = StagedPanels<T, kConfig>;
  using Pipeline = PanelPipeline<T, kRowBytes, kPanel, kConfig.stages, kSddmmStagedWarps, Panels>;
  using ChunkOf = Chunk<kConfig>;
  static_assert(kRows < kWarp &&
                kConfig.CountersAt() + Pipeline::kCounterBytes == kConfig.SharedBytes());
  extern __shared__ __align__(128) unsigned char sddmm_staged_memory[];
  const StagedSchedule<kConfig> schedule(p);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  // Rows of y are multiplied up to their pitch, and what lies in shared memory may be NaN.
#pragma unroll 1
  for (int r = warp; r < kConfig.stages * kPanel; r += kSddmmStagedWarps) {
    T* row = reinterpret_cast<T*>(sddmm_staged_memory + r * kRowBytes);
#pragma unroll 1
    for (int64_t c = p.d + lane; c < kElements; c += kWarp) row[c] = T{};
  }
  const uint32_t rows = static_cast<uint32_t>(p.pattern.rows);
  const uint32_t tiles_of_entry = schedule.down * kConfig.parts;
  const uint32_t tiles = static_cast<uint32_t>(p.batch.count) * tiles_of_entry;
  const uint32_t mine = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const Panels panels{p, schedule};
  Pipeline pipeline(panels, sddmm_staged_memory, sddmm_staged_memory + kConfig.CountersAt(),
                    mine * schedule.panels);

  const uint32_t stages = AddressOfShared(sddmm_staged_memory);
  const auto row_of_x = [&](int w, int slot) {  // the shared one is the first warp's first
    return kConfig.RowsAt() + (slot == kRows ? 0 : w * kRows + slot) * kRowBytes;
  };
  for (uint32_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const StagedTile tile = schedule.TileAt(t);
    const int32_t* row_offsets = p.pattern.row_offsets.At<const int32_t>(p.batch, tile.entry);
    const int32_t* row_order = p.pattern.row_order.At<const int32_t>(p.batch, tile.entry);
    const Index* columns = p.pattern.column_indices.At<const Index>(p.batch, tile.entry);
    const T* x = p.x.At<const T>(p.batch, tile.entry);
    const T* y = p.y.At<const T>(p.batch, tile.entry);
    const T* scale_by =
        p.scale_by.data == nullptr ? nullptr : p.scale_by.At<const T>(p.batch, tile.entry);
    Out* out = p.out.At<Out>(p.batch, tile.entry);

    const auto row_at = [&](uint32_t place) { return Within(row_order[place], rows); };

    // All tiles of a batch entry share the padding.
    const int64_t stored = rows > 0 ? RowBounds::Clamp(row_offsets[rows], p.pattern.nse) : 0;
#pragma unroll 1
    for (int64_t i = stored + t % tiles_of_entry * kSddmmStagedThreads + threadIdx.x;
         i < p.pattern.nse; i += tiles_of_entry * kSddmmStagedThreads) {
      FromAccumulator(Accumulator<T>(0), &out[i]);
    }
    if (rows == 0) continue;

    const RowBounds longest_row(row_offsets, row_at(tile.number), p.pattern.nse);
    const bool has_common = longest_row.end - longest_row.begin >
                            MostEntriesOfWarp<kSddmmStagedWarps, kRows>(p.pattern);
    const int slots = kRows + (has_common ? 1 : 0);
    __syncwarp();  // the rows of the tile before are read
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      const uint32_t at = SwizzledRow<kSddmmStagedWarps>(schedule.down, tile.number, warp, r);
      if (at >= rows) break;
      StageRow<T, kElements>(reinterpret_cast<T*>(sddmm_staged_memory + row_of_x(warp, r)),
                             x + row_at(at) * p.d, p.d);
    }
    RowCursors<kRows> cursors;
    const uint32_t at = lane < kRows
                            ? SwizzledRow<kSddmmStagedWarps>(schedule.down, tile.number, warp, lane)
                            : tile.number;
    if (lane < slots && at < rows && (lane == kRows || !has_common || at != tile.number)) {
      const RowBounds bounds(row_offsets, row_at(at), p.pattern.nse);
      const int first = static_cast<int>(bounds.begin), end = static_cast<int>(bounds.end);
      cursors.next = first;
      cursors.end = end;
      if (tile.part > 0) {
        cursors.next = FirstFrom(columns, first, end, schedule.FirstColumn(tile.part));
      }
      if (tile.part + 1 < kConfig.parts) {
        cursors.end = FirstFrom(columns, first, end, schedule.FirstColumn(tile.part + 1));
      }
    }
    cursors.first_shared = __shfl_sync(kAllLanes, cursors.next, kRows) + warp * kWarp;
    if (lane == kRows) cursors.next = 0;
    if (has_common) {
      __syncthreads();
    } else {
      __syncwarp();
    }

    LanePart<T, kConfig> part;
    int loaded = -1;  // whose x the lanes have
    ChunkOf next;
    next.Load(columns, cursors, 0);
    for (uint32_t panel = 0; panel < schedule.panels; ++panel) {
      const uint32_t begin = schedule.FirstColumn(tile.part) + panel * kPanel;
      // The last panel takes whatever is left.
      const uint32_t end = panel + 1 < schedule.panels ? begin + kPanel : ChunkOf::kNone;
      const uint32_t first_row = stages + pipeline.Enter();
      for (int slot = 0; slot < slots;) {
        const ChunkOf chunk = next;
        const unsigned inside = __ballot_sync(kAllLanes, chunk.column < end);
        const int count = inside == kAllLanes ? kWarp : __ffs(static_cast<int>(~inside)) - 1;
        const int row = slot;
        if (lane == row) cursors.next += count;
        if (count < kWarp) ++slot;
        next.Load(columns, cursors, slot < slots ? slot : 0);
        if (count == 0) continue;

        const int entry = ChunkOf::Mine(lane);
        float factor = 1;
        if (scale_by != nullptr && entry < count) factor = ToAccumulator(scale_by[chunk.place]);
        const uint32_t from_begin = chunk.column - begin;
        float sum;
        if (__any_sync(kAllLanes, lane < count && from_begin >= kPanel)) {
          sum = SumsFromMemory<T, ChunkOf>(
              reinterpret_cast<const T*>(sddmm_staged_memory + row_of_x(warp, row)), y, p.d,
              p.pattern.columns, chunk.column, count);
        } else {
          if (row != loaded) part.LoadX(stages + row_of_x(warp, row));
          loaded = row;
          const uint32_t of_y = first_row + from_begin * kRowBytes;
          sum = count == kWarp ? part.template SumsOf<true>(of_y, count)
                               : part.template SumsOf<false>(of_y, count);
        }
        if (entry < count) FromAccumulator(sum * factor, &out[chunk.place]);
      }
      pipeline.Leave();
    }
    if (has_common) __syncthreads();  // its row of x is read
  }
}

}  // namespace jaxsparse
