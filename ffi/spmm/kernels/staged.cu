// The sparse-dense product of rows that all read x from shared memory. A block computes a tile of
// the result, kRows rows for each of its warps, and walks over x panel by panel; the next panels
// are copied meanwhile. A warp owns kRows rows of the tile and adds, of each, the entries that lie
// in the panel. So every load of x takes the same time, whether or not rows walk through the
// columns in step.
//
// A row swizzle gives warps about as many entries each. Of a tile that has a row for which this
// does not do, the long rows are cut into parts, and each warp has room for kSpares of them besides
// its other rows.
//
// The panels lie in the stages of a pipeline (cuda/panel_pipeline.cuh). Warps may be as many panels
// apart as there are stages, less one, so what counts is how many entries a warp has in all of
// them, not in the worst one.
//
// Columns of a row may stand in any order and more than once: the walk stops at the first entry
// behind the panel, and entries in front of it read x from memory.
//
// Floors: every entry reads kRowBytes of x from shared memory, 128 bytes a clock and
// multiprocessor, and 8 bytes for its place and value, which is half a clock for kLanes == 32; each
// tile writes its columns of x there once. From memory come the entries, x and the result, once
// each; from L2 x as often as there are tiles down the result.
#include "cuda/panel_pipeline.cuh"
#include "spmm/kernels/staged.h"
#include "spmm/kernels/staged_entries.cuh"
#include "spmm/kernels/staged_rows.cuh"
#include "spmm/matrices.cuh"

namespace jaxsparse {

// A tile of the result: of one batch entry some columns, and rows from all over the order of
// lengths.
struct StagedTile {
  uint32_t entry;
  uint32_t first_column;
  uint32_t number;  // among those down the result
};

template <typename T, SpmmStagedConfig kConfig>
struct StagedShape {
  static constexpr int kLanes = kConfig.lanes, kPanel = kConfig.panel;
  static constexpr int kVector = 16 / sizeof(T);  // columns of a lane
  static constexpr int kColumns = kLanes * kVector;
  static constexpr int kGroups = kWarp / kLanes;  // that share a row's entries
  static constexpr int kRowBytes = kConfig.RowBytes();
  static constexpr int kTileRows = kConfig.TileRows();
  static constexpr int kBufferBytes = kConfig.BufferBytes();
  static_assert(kBufferBytes == kWarp * sizeof(StagedEntry));
  // The buffers hold a warp's part of a row, too.
  static_assert(kColumns * sizeof(float) <= 2 * kBufferBytes);

  // Of a lane: the group that it belongs to, and which of the group's it is.
  __device__ static int Group() { return static_cast<int>(threadIdx.x) % kWarp / kLanes; }
  __device__ static int Lane() { return static_cast<int>(threadIdx.x) % kLanes; }

  uint32_t down, across;  // tiles
  uint32_t panels;        // of each

  __device__ explicit StagedShape(const SpmmProblem& p)
      : down(static_cast<uint32_t>(CeilDivide(p.pattern.rows, kTileRows))),
        across(static_cast<uint32_t>(CeilDivide(p.n, kColumns))),
        panels(static_cast<uint32_t>(CeilDivide(p.pattern.columns, kPanel))) {}

  __device__ StagedTile TileAt(uint32_t tile) const {
    return {tile / down / across, tile / down % across * kColumns, tile % down};
  }
};

// The panels of all of a block's tiles, one after another.
template <typename T, typename Shape>
struct StagedPanels {
  static constexpr int kPanel = Shape::kPanel;
  const SpmmProblem& p;
  const Shape& shape;

  __device__ MatrixPanel<T> operator()(uint32_t panel) const {
    const StagedTile tile = shape.TileAt(blockIdx.x + panel / shape.panels * gridDim.x);
    const int64_t first = static_cast<int64_t>(panel % shape.panels) * kPanel;
    const int64_t rows_left = p.pattern.columns - first, columns_left = p.n - tile.first_column;
    return {p.x.At<const T>(p.batch, tile.entry) + first * p.n + tile.first_column, p.n,
            static_cast<int>(rows_left < kPanel ? rows_left : kPanel),
            static_cast<int>(columns_left < Shape::kColumns ? columns_left : Shape::kColumns)};
  }
};

// Writes a lane's part of a row of the result, of which `owned` columns exist.
template <typename M, int kVector>
__device__ __forceinline__ void WriteOwned(const M& m, const SpmmProblem& p, int64_t row,
                                           uint32_t column, int owned, float (&sums)[kVector]) {
  const int64_t first = row * p.n + column;
  if (owned == kVector) {
    m.WriteRun(p.activation, row, first, sums);
    return;
  }
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    if (c < owned) m.Write(p.activation, row, first + c, sums[c]);
  }
}

template <typename T, typename Out, typename Index, SpmmStagedConfig kConfig>
__global__ void __launch_bounds__(kConfig.warps* kWarp, 1)
    SpmmStaged(const __grid_constant__ SpmmProblem p) {
  constexpr int kRows = kConfig.rows, kPanel = kConfig.panel, kWarps = kConfig.warps;
  constexpr bool kPermuted = kConfig.permuted;
  using Shape = StagedShape<T, kConfig>;
  using M = Matrices<T, Out, Index>;
  using View = PanelView<T, Shape>;
  using Panels = StagedPanels<T, Shape>;
  using Pipeline = PanelPipeline<T, Shape::kRowBytes, kPanel, kConfig.stages, kWarps, Panels>;
  static_assert(kConfig.CountersAt() + Pipeline::kCounterBytes == kConfig.SharedBytes());
  extern __shared__ __align__(128) unsigned char spmm_stages[];
  const Shape shape(p);
  const uint32_t rows = static_cast<uint32_t>(p.pattern.rows);
  const uint32_t tiles = static_cast<uint32_t>(p.batch.count) * shape.across * shape.down;
  const uint32_t mine = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const Panels panels{p, shape};
  Pipeline pipeline(panels, spmm_stages, spmm_stages + kConfig.CountersAt(), mine * shape.panels);

  using Turns = SwizzledTurns<Shape::kTileRows>;
  constexpr int kSpares = kRows * Shape::kVector > 16 ? 1 : 2;  // as many as fit into registers
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  View view;
  view.stages = AddressOfShared(spmm_stages);
  view.buffers = view.stages + kConfig.BuffersAt() + warp * 2 * Shape::kBufferBytes;
  view.n = p.n;
  for (uint32_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const StagedTile tile = shape.TileAt(t);
    const uint32_t column = tile.first_column + Shape::Lane() * Shape::kVector;
    const int64_t left = p.n - column;
    view.owned =
        static_cast<int>(left < Shape::kVector ? left : Shape::kVector);  // or fewer than 0

    constexpr int kSlots = kRows + kSpares;
    StagedRow<T, Index, kPermuted, kConfig.prefetched> own[kSlots];
    float sums[kSlots][Shape::kVector] = {};
    StagedSlots slots;
    int parts = 0;
    {
      const M m(p, tile.entry);
      const StagedArrays<T, Index, kPermuted> arrays(m);
      view.x = m.x + column;
      // Lanes look at the warp's rows, where turns go forth and back, at those that it has where
      // the same turns go the other way, and at samples: all at once, as each takes two loads.
      constexpr int kFirstSample = 2 * kRows;
      static_assert(kFirstSample + Turns::kSamples <= kWarp);
      const Turns turns{shape.down, tile.number};
      const int turn = SwizzledTurn<kWarps>(warp, lane % kRows);
      uint32_t place = rows;
      if (lane < kFirstSample) {
        place = PlaceOfTurn(shape.down, tile.number, turn, (turn % 2 == 1) == (lane < kRows));
      } else if (lane < kFirstSample + Turns::kSamples) {
        place = turns.PlaceOfSample(lane - kFirstSample);
      }
      TileRow row;
      if (place < rows) {
        row.row = static_cast<int>(m.RowAt(place));
        const RowBounds bounds(m.row_offsets, row.row, p.pattern.nse);
        row.begin = static_cast<int>(bounds.begin);
        row.end = static_cast<int>(bounds.end);
      }
      const int64_t most = MostEntriesOfWarp<kWarps, kRows>(p.pattern);
      const int longest = __shfl_sync(kAllLanes, row.Entries(), kFirstSample);
      int cut = 0;
      if (__shfl_sync(kAllLanes, row.Entries(), kFirstSample + 1) > most) {
        const bool back = Turns::IsBack(turn, Turns::TurnsBack(row.Entries(), kFirstSample));
        row = row.Of(back == (turn % 2 == 1) ? lane : (lane + kRows) % kWarp);
        if (longest > most) {
          TileRow* rows_of_tile = reinterpret_cast<TileRow*>(spmm_stages + kConfig.BuffersAt());
          __syncthreads();  // buffers are read
          if (lane == 0) rows_of_tile[warp] = row;
          __syncthreads();
          const CutRows<kWarps, kRows, kSpares> all(
              p.pattern, lane < kWarps ? rows_of_tile[lane] : TileRow(), warp, slots);
          cut = all.rows;
          parts = all.parts;
          __syncthreads();
#pragma unroll
          for (int r = kRows; r < kSlots; ++r) own[r].template Load<true>(arrays, slots, r);
        }
      }
      if (lane < kRows && turn >= cut) {
        slots.next = row.begin;
        slots.end = row.end;
        slots.row = row.row;
      }
      __syncwarp();
#pragma unroll
      for (int r = 0; r < kRows; ++r) own[r].template Load<false>(arrays, slots, r);
#pragma unroll
      for (int r = 0; r < kSlots; ++r) own[r].LoadPermuted(arrays);

      for (uint32_t panel = 0; panel < shape.panels; ++panel) {
        view.begin = panel * kPanel;
        // An entry behind the last panel, a column that x does not have, ends the walk of its row.
        const auto columns = static_cast<uint32_t>(p.pattern.columns);
        view.end = view.begin + kPanel < columns ? view.begin + kPanel : columns;
        view.first_row = view.stages + pipeline.Enter();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          AddEntries<false>(own[r], arrays, slots, r, view, sums[r]);
        }
#pragma unroll
        for (int r = kRows; r < kSlots; ++r) {
          if (parts <= (r - kRows) * kWarps) break;
          AddEntries<true>(own[r], arrays, slots, r, view, sums[r]);
        }
        pipeline.Leave();
      }
    }
#pragma unroll
    for (int r = 0; r < kSlots; ++r) AddUpGroups<Shape>(sums[r]);
    if (parts > 0) {
      AddUpParts<Shape, kWarps, kSpares>(slots, kRows, parts, view.stages + kConfig.BuffersAt(),
                                         sums + kRows);
    }
    const M m(p, tile.entry);
    const int owned = Shape::Group() == 0 ? view.owned : 0;
    // One copy of the code that writes, which is long, and is waited for.
#pragma unroll 1
    for (int r = 0; r < kSlots; ++r) {
      const int row = __shfl_sync(kAllLanes, slots.row, r);
      if (row != StagedSlots::kNone) WriteOwned(m, p, row, column, owned, sums[0]);
#pragma unroll
      for (int next = 1; next < kSlots; ++next) {
#pragma unroll
        for (int c = 0; c < Shape::kVector; ++c) sums[next - 1][c] = sums[next][c];
      }
    }
  }
}

}  // namespace jaxsparse
