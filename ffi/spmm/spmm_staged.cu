// The sparse-dense product of rows that all read x from shared memory. A block computes a tile of
// the result and walks over x panel by panel; the next panels are copied meanwhile. A warp
// owns kRows rows of the tile and adds, of each, the entries that lie in the panel. So every load
// of x takes the same time, whether or not rows walk through the columns in step.
//
// The panels lie in a ring of stages (common/panel_ring.cuh). Warps may be kStages - 1 panels
// apart, so what counts is how many entries a warp has in all of them, not in the worst one.
//
// Columns of a row may stand in any order and more than once: the walk stops at the first entry
// behind the panel, and entries in front of it read x from memory.
//
// Floors: every entry reads kRowBytes of x from shared memory, 128 bytes a clock and
// multiprocessor, and 8 bytes for its place and value, which is half a clock for kLanes == 32; each
// tile writes its columns of x there once. From memory come the entries, x and the result, once
// each; from L2 x as often as there are tiles down the result.
#include "common/dealt_rows.cuh"
#include "common/panel_ring.cuh"
#include "spmm/matrices.cuh"

namespace jaxsparse {

// Where an entry's row of x lies in the ring, and what it is multiplied by.
struct alignas(8) StagedEntry {
  uint32_t at;
  float value;
};

// A tile of the result: of one batch entry some columns, and the rows that DealtRow tells.
struct StagedTile {
  uint32_t entry;
  uint32_t first_column;
  uint32_t number;  // among those down the result
};

template <typename T, int kLanes, int kRows, int kPanel, int kStages, int kWarps>
struct StagedShape {
  static constexpr int kVector = 16 / sizeof(T);  // columns of a lane
  static constexpr int kColumns = kLanes * kVector;
  static constexpr int kGroups = kWarp / kLanes;  // that share a row's entries
  static constexpr int kRowBytes = kLanes * 16;
  static constexpr int kStageBytes = kPanel * kRowBytes;
  static constexpr int kTileRows = kWarps * kRows;
  // Behind the ring: of each warp two buffers of entries, and what counts bytes and warps.
  static constexpr int kBufferBytes = kWarp * sizeof(StagedEntry);
  static constexpr int kBuffersAt = kStages * kStageBytes;
  static constexpr int kCountersAt = kBuffersAt + kWarps * 2 * kBufferBytes;
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
template <typename T, typename Shape, int kPanel>
struct StagedPanels {
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

// The arrays of a batch entry that a walk over rows reads.
template <typename T, typename Index, bool kPermuted>
struct StagedArrays {
  const T* values;
  const Index* columns;
  const int32_t* permutation;

  template <typename M>
  __device__ explicit StagedArrays(const M& m)
      : values(m.values), columns(m.column_indices), permutation(m.permutation) {}
};

// Where the entries of a warp's rows are that have not been added: lane `slot` knows it for row
// `slot`, so that it takes no register for each row.
struct RowCursors {
  int next = 0, end = 0;
};

// The next 32 entries of a row, one a lane, loaded while the warp multiplies others. kTeam warps
// share a row: each counts, and takes, every kTeam-th run of 32 of all stored entries.
template <typename T, typename Index, bool kPermuted, bool kPrefetch, int kTeam>
struct StagedRow {
  static constexpr uint32_t kNone = ~0u;  // no column
  uint32_t column = kNone;
  int32_t place = 0;
  T value = {};

  // Which of the warp's entries is the first one from `begin` on.
  __device__ __forceinline__ static int FirstFrom(int begin, int warp) {
    if constexpr (kTeam == 1) return begin;
    const int run = begin / kWarp;
    return (run - warp + kTeam - 1) / kTeam * kWarp + (run % kTeam == warp ? begin % kWarp : 0);
  }

  using Arrays = StagedArrays<T, Index, kPermuted>;
  __device__ __forceinline__ void Load(const Arrays& from, const RowCursors& cursors, int slot) {
    int i = __shfl_sync(kAllLanes, cursors.next, slot) + static_cast<int>(threadIdx.x % kWarp);
    const int end = __shfl_sync(kAllLanes, cursors.end, slot);
    if constexpr (kTeam > 1) {
      i = i / kWarp * (kTeam * kWarp) + static_cast<int>(threadIdx.x / kWarp) * kWarp + i % kWarp;
    }
    if constexpr (kPrefetch) {
      const int behind = i + kTeam * kWarp;
      if (behind < end) {
        Prefetch(from.columns + behind);
        if constexpr (kPermuted) Prefetch(from.permutation + behind);
        else Prefetch(from.values + behind);
      }
    }
    const bool stored = i < end;
    column = kNone;
    if (stored) column = static_cast<uint32_t>(from.columns[i]);
    if constexpr (kPermuted) {
      place = stored ? from.permutation[i] : 0;
    } else {
      if (stored) value = from.values[i];
    }
  }
  // What has to wait for the first load.
  __device__ __forceinline__ void LoadPermuted(const Arrays& from) {
    if constexpr (kPermuted) value = column != kNone ? from.values[place] : T{};
  }
};

// What all rows of a warp have in common in a panel. Places in shared memory are addresses.
template <typename T, typename Shape>
struct PanelView {
  uint32_t ring;      // the first stage
  uint32_t buffers;   // of the warp, two: all lanes have read the one before the last one
  uint32_t last = 0;  // which one that is, in bytes
  const T* x;         // the lane's part of the tile, in memory
  int owned;          // columns that x has there
  int64_t n;
  uint32_t begin, end;  // columns of the matrix
  uint32_t first_row;   // the panel's

  using Vector = Packet<T, Shape::kVector>;

  __device__ __forceinline__ uint32_t NextBuffer() {
    last ^= Shape::kBufferBytes;
    return buffers + last;
  }
  __device__ __forceinline__ static Vector ReadRow(uint32_t row) {
    return SharedAt<const Vector>(row + Shape::Lane() * 16);
  }
  __device__ __forceinline__ static void Add(float value, const Vector& of_x,
                                             float (&sums)[Shape::kVector]) {
#pragma unroll
    for (int c = 0; c < Shape::kVector; ++c) sums[c] += value * ToAccumulator(of_x.elements[c]);
  }

  __device__ __forceinline__ StagedEntry Entry(uint32_t column, float value) const {
    return {first_row + (column - begin) * Shape::kRowBytes, value};
  }

  // Adds the first `count` entries of a buffer: of each 2 * kGroups every group takes two.
  __device__ __forceinline__ void AddFromRing(uint32_t buffer, int count,
                                              float (&sums)[Shape::kVector]) const {
    using Pair = Packet<StagedEntry, 2>;
    constexpr int kPairs = 2;  // of a group, at a time
    constexpr uint32_t kStep = Shape::kGroups * sizeof(Pair);
    const uint32_t ahead = Shape::Group() * sizeof(Pair);
    const uint32_t end = buffer + ahead + count * sizeof(StagedEntry);
    uint32_t at = buffer + ahead;
#pragma unroll 1
    for (const uint32_t last = end - kPairs * kStep; at <= last; at += kPairs * kStep) {
      Pair pairs[kPairs];
      Vector of_x[2 * kPairs];
#pragma unroll
      for (int k = 0; k < kPairs; ++k) pairs[k] = SharedAt<const Pair>(at + k * kStep);
#pragma unroll
      for (int k = 0; k < 2 * kPairs; ++k) of_x[k] = ReadRow(pairs[k / 2].elements[k % 2].at);
#pragma unroll
      for (int k = 0; k < 2 * kPairs; ++k) {
        Add(pairs[k / 2].elements[k % 2].value, of_x[k], sums);
      }
    }
#pragma unroll 1
    for (; at < end; at += kStep) {
      const Pair pair = SharedAt<const Pair>(at);
      // What lies behind the last entry may be anything: not even its product with 0 is added.
      const int left = static_cast<int>(end - ahead - at);
      if (left > 0) Add(pair.elements[0].value, ReadRow(pair.elements[0].at), sums);
      if (left > static_cast<int>(sizeof(StagedEntry))) {
        Add(pair.elements[1].value, ReadRow(pair.elements[1].at), sums);
      }
    }
  }

  // The same from memory, for entries that need not lie in the panel.
  __device__ __forceinline__ void AddFromMemory(uint32_t buffer, int count,
                                                float (&sums)[Shape::kVector]) const {
#pragma unroll 1
    for (int i = Shape::Group(); i < count; i += Shape::kGroups) {
      const StagedEntry entry = SharedAt<const StagedEntry>(buffer + i * sizeof(StagedEntry));
      const int from_begin = static_cast<int>(entry.at - first_row) / Shape::kRowBytes;
      const T* row = x + (static_cast<int64_t>(begin) + from_begin) * n;
      Vector of_x = {};
#pragma unroll
      for (int c = 0; c < Shape::kVector; ++c) {
        if (c < owned) of_x.elements[c] = row[c];
      }
      Add(entry.value, of_x, sums);
    }
  }
};

// Adds those of a row's next entries that lie in a panel, or in front of it.
template <typename Row, typename View, int kVector>
__device__ __forceinline__ void AddEntries(Row& row, const typename Row::Arrays& arrays,
                                           RowCursors& cursors, int slot, View& view,
                                           float (&sums)[kVector]) {
  const int lane = threadIdx.x % kWarp;
  for (;;) {
    const unsigned inside = __ballot_sync(kAllLanes, row.column < view.end);
    const int count = inside == kAllLanes ? kWarp : __ffs(static_cast<int>(~inside)) - 1;
    if (count == 0) return;
    const bool in_front = __any_sync(kAllLanes, lane < count && row.column < view.begin);
    const uint32_t buffer = view.NextBuffer();
    if (lane < count) {
      SharedAt<StagedEntry>(buffer + lane * sizeof(StagedEntry)) =
          view.Entry(row.column, ToAccumulator(row.value));
    }
    if (lane == slot) cursors.next += count;
    row.Load(arrays, cursors, slot);
    __syncwarp();
    if (in_front) {
      view.AddFromMemory(buffer, count, sums);
    } else {
      view.AddFromRing(buffer, count, sums);
    }
    row.LoadPermuted(arrays);
    if (count < kWarp) return;
  }
}

// Of partial sums of groups the whole, in each of them.
template <typename Shape>
__device__ __forceinline__ void AddUpGroups(float (&sums)[Shape::kVector]) {
  __syncwarp();
#pragma unroll
  for (int distance = kWarp / Shape::kGroups; distance < kWarp; distance *= 2) {
#pragma unroll
    for (int c = 0; c < Shape::kVector; ++c) {
      sums[c] += __shfl_xor_sync(kAllLanes, sums[c], distance);
    }
  }
}

// Adds up the warps' parts of the row that they share. The whole is the first warp's.
template <typename Shape, int kWarps>
__device__ __forceinline__ void AddUpWarps(uint32_t all_buffers, float (&sums)[Shape::kVector]) {
  const int warp = threadIdx.x / kWarp;
  const auto part = [&](int w, int c) -> float& {
    const int at = c * (kWarp / Shape::kGroups) + Shape::Lane();
    return SharedAt<float>(all_buffers + w * 2 * Shape::kBufferBytes + at * sizeof(float));
  };
  __syncwarp();
  if (Shape::Group() == 0) {
#pragma unroll
    for (int c = 0; c < Shape::kVector; ++c) part(warp, c) = sums[c];
  }
  __syncthreads();
  if (warp == 0) {
    for (int w = 1; w < kWarps; ++w) {
#pragma unroll
      for (int c = 0; c < Shape::kVector; ++c) sums[c] += part(w, c);
    }
  }
  __syncthreads();  // the buffers are read
}

// Writes a lane's part of a row of the result, of which `owned` columns exist.
template <typename M, int kVector>
__device__ __forceinline__ void WriteOwned(const M& m, const SpmmProblem& p, uint32_t at,
                                           uint32_t column, int owned, float (&sums)[kVector]) {
  const int64_t row = m.row_order[at], first = row * p.n + column;
  if (owned == kVector) {
    m.WriteRun(p.activation, row, first, sums);
    return;
  }
#pragma unroll
  for (int c = 0; c < kVector; ++c) {
    if (c < owned) m.Write(p.activation, row, first + c, sums[c]);
  }
}

// kPrefetch: the entries behind those that a warp loads are brought nearer.
template <typename T, typename Out, typename Index, int kLanes, int kRows, int kPanel, int kStages,
          int kWarps, bool kPrefetch, bool kPermuted>
__global__ void __launch_bounds__(kWarps* kWarp, 1)
    SpmmStaged(const __grid_constant__ SpmmProblem p) {
  using Shape = StagedShape<T, kLanes, kRows, kPanel, kStages, kWarps>;
  using M = Matrices<T, Out, Index>;
  using View = PanelView<T, Shape>;
  using Panels = StagedPanels<T, Shape, kPanel>;
  using Ring = PanelRing<T, Shape::kRowBytes, kPanel, kStages, kWarps, Panels>;
  static_assert(Shape::kCountersAt + Ring::kCounterBytes <=
                SpmmStagedBytes(Shape::kRowBytes, kPanel, kStages, kWarps));
  extern __shared__ __align__(128) unsigned char spmm_ring[];
  const Shape shape(p);
  const uint32_t rows = static_cast<uint32_t>(p.pattern.rows);
  const uint32_t tiles = static_cast<uint32_t>(p.batch.count) * shape.across * shape.down;
  const uint32_t mine = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const Panels panels{p, shape};
  Ring ring(panels, spmm_ring, spmm_ring + Shape::kCountersAt, mine * shape.panels);

  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  View view;
  view.ring = AddressOfShared(spmm_ring);
  view.buffers = view.ring + Shape::kBuffersAt + warp * 2 * Shape::kBufferBytes;
  view.n = p.n;
  for (uint32_t t = blockIdx.x; t < tiles; t += gridDim.x) {
    const StagedTile tile = shape.TileAt(t);
    const uint32_t column = tile.first_column + Shape::Lane() * Shape::kVector;
    const int64_t left = p.n - column;
    view.owned =
        static_cast<int>(left < Shape::kVector ? left : Shape::kVector);  // or fewer than 0

    StagedRow<T, Index, kPermuted, kPrefetch, 1> own[kRows];
    StagedRow<T, Index, kPermuted, kPrefetch, kWarps> common;
    RowCursors cursors;  // the common row's are behind those of the warp's own
    bool has_common;
    float sums[kRows][Shape::kVector] = {}, common_sums[Shape::kVector] = {};
    {
      const M m(p, tile.entry);
      const StagedArrays<T, Index, kPermuted> arrays(m);
      view.x = m.x + column;
      const RowBounds first(m.row_offsets, m.row_order[tile.number], p.pattern.nse);
      has_common = first.end - first.begin > MostEntriesOfWarp<kWarps, kRows>(p.pattern);
      cursors = {};
      if (lane < kRows) {
        const uint32_t at = DealtRow<kWarps>(shape.down, tile.number, warp, lane);
        if (at < rows && !(has_common && at == tile.number)) {
          const RowBounds bounds(m.row_offsets, m.row_order[at], p.pattern.nse);
          cursors = {static_cast<int>(bounds.begin), static_cast<int>(bounds.end)};
        }
      } else if (has_common) {
        cursors = {common.FirstFrom(static_cast<int>(first.begin), warp),
                   static_cast<int>(first.end)};
      }
      __syncwarp();
      common.Load(arrays, cursors, kRows);
#pragma unroll
      for (int r = 0; r < kRows; ++r) own[r].Load(arrays, cursors, r);
      common.LoadPermuted(arrays);
#pragma unroll
      for (int r = 0; r < kRows; ++r) own[r].LoadPermuted(arrays);

      for (uint32_t panel = 0; panel < shape.panels; ++panel) {
        view.begin = panel * kPanel;
        // Entries behind the last panel would be columns that x does not have.
        view.end = panel + 1 < shape.panels ? view.begin + kPanel : ~0u;
        view.first_row = view.ring + ring.Enter();
        if (has_common) AddEntries(common, arrays, cursors, kRows, view, common_sums);
#pragma unroll
        for (int r = 0; r < kRows; ++r) AddEntries(own[r], arrays, cursors, r, view, sums[r]);
        ring.Leave();
      }
    }
    const M m(p, tile.entry);
    const int owned = Shape::Group() == 0 ? view.owned : 0;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      AddUpGroups<Shape>(sums[r]);
      const uint32_t at = DealtRow<kWarps>(shape.down, tile.number, warp, r);
      if (at >= rows || (has_common && at == tile.number)) continue;
      WriteOwned(m, p, at, column, owned, sums[r]);
    }
    if (!has_common) continue;
    AddUpGroups<Shape>(common_sums);
    AddUpWarps<Shape, kWarps>(view.ring + Shape::kBuffersAt, common_sums);
    if (warp == 0) WriteOwned(m, p, tile.number, column, owned, common_sums);
  }
}

}  // namespace jaxsparse
