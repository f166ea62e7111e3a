// The sparse-dense product of rows that all read x from shared memory. A block computes a tile of
// the result, kRows rows for each of its warps, and walks over x panel by panel; the next panels
// are copied meanwhile. A warp owns kRows rows of the tile and adds, of each, the entries that lie
// in the panel. So every load of x takes the same time, whether or not rows walk through the
// columns in step.
//
// Rows are dealt so that warps have about as many entries. Of a tile that has a row for which this
// does not do, the long rows are cut into parts, and each warp has room for kSpares of them besides
// its other rows.
//
// The panels lie in a ring of stages (cuda/pipeline.cuh). Warps may be kStages - 1 panels
// apart, so what counts is how many entries a warp has in all of them, not in the worst one.
//
// Columns of a row may stand in any order and more than once: the walk stops at the first entry
// behind the panel, and entries in front of it read x from memory.
//
// Floors: every entry reads kRowBytes of x from shared memory, 128 bytes a clock and
// multiprocessor, and 8 bytes for its place and value, which is half a clock for kLanes == 32; each
// tile writes its columns of x there once. From memory come the entries, x and the result, once
// each; from L2 x as often as there are tiles down the result.
#include "cuda/pipeline.cuh"
#include "cuda/row_swizzle.cuh"
#include "spmm/matrices.cuh"

namespace jaxsparse {

// Where an entry's row of x lies in the ring, and what it is multiplied by.
struct alignas(8) StagedEntry {
  uint32_t at;
  float value;
};

// A tile of the result: of one batch entry some columns, and rows from all over the order of
// lengths.
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
  const int64_t& nse;

  template <typename M>
  __device__ explicit StagedArrays(const M& m)
      : values(m.values),
        columns(m.column_indices),
        permutation(m.permutation),
        nse(m.pattern.nse) {}
};

// What a warp knows of its rows and parts: lane `slot` of slot `slot`, so that it takes no register
// for each. Of a row, `next` is the entry to go on with. Of a part it counts the part's entries:
// these are the runs of 32 from `begin` on of which each is `parts` behind another.
struct StagedSlots {
  int next = 0, end = 0;
  int row = kNone;  // of the result, if the warp is to write it: of parts the first one's warp is
  int begin = 0, parts = 0;

  static constexpr int kNone = -1;
};

// The next 32 entries of a row or part, one a lane, loaded while the warp multiplies others.
template <typename T, typename Index, bool kPermuted, bool kPrefetch>
struct StagedRow {
  static constexpr uint32_t kNone = ~0u;  // no column
  uint32_t column = kNone;
  uint32_t place = 0;
  T value = {};

  using Arrays = StagedArrays<T, Index, kPermuted>;
  template <bool kPart>
  __device__ __forceinline__ void Load(const Arrays& from, const StagedSlots& slots, int slot) {
    int i = __shfl_sync(kAllLanes, slots.next, slot) + static_cast<int>(threadIdx.x % kWarp);
    const int end = __shfl_sync(kAllLanes, slots.end, slot);
    int behind = i + kWarp;
    if constexpr (kPart) {
      const int parts = __shfl_sync(kAllLanes, slots.parts, slot);
      i = __shfl_sync(kAllLanes, slots.begin, slot) + i / kWarp * (parts * kWarp) + i % kWarp;
      behind = i + parts * kWarp;
    }
    if constexpr (kPrefetch) {
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
      place = stored ? static_cast<uint32_t>(from.permutation[i]) : 0;
    } else {
      if (stored) value = from.values[i];
    }
  }
  // What has to wait for the first load, and is waited for when the warp has multiplied.
  __device__ __forceinline__ void LoadPermuted(const Arrays& from) {
    if constexpr (kPermuted) {
      value = column != kNone ? from.values[Within(place, from.nse)] : T{};
    }
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

  using RowVector = Vector<T, Shape::kVector>;

  __device__ __forceinline__ uint32_t NextBuffer() {
    last ^= Shape::kBufferBytes;
    return buffers + last;
  }
  __device__ __forceinline__ static RowVector ReadRow(uint32_t row) {
    return SharedAt<const RowVector>(row + Shape::Lane() * 16);
  }
  __device__ __forceinline__ static void Add(float value, const RowVector& of_x,
                                             float (&sums)[Shape::kVector]) {
#pragma unroll
    for (int c = 0; c < Shape::kVector; ++c) sums[c] += value * ToAccumulator(of_x.elements[c]);
  }

  __device__ __forceinline__ StagedEntry Entry(uint32_t column, float value) const {
    return {first_row + (column - begin) * Shape::kRowBytes, value};
  }

  // Adds the first `count` entries of a buffer: of each 2 * kGroups every group takes two. Half of
  // the time later `meanwhile` is called.
  template <typename Meanwhile>
  __device__ __forceinline__ void AddFromRing(uint32_t buffer, int count,
                                              float (&sums)[Shape::kVector],
                                              Meanwhile meanwhile) const {
    using Pair = Vector<StagedEntry, 2>;
    constexpr int kPairs = 2;  // of a group, at a time
    constexpr uint32_t kStep = Shape::kGroups * sizeof(Pair);
    const uint32_t ahead = Shape::Group() * sizeof(Pair);
    const uint32_t end = buffer + ahead + count * sizeof(StagedEntry);
    uint32_t at = buffer + ahead;
    const uint32_t half = at + count / (4 * kPairs * Shape::kGroups) * (kPairs * kStep);
#pragma unroll 1
    for (const uint32_t last = end - kPairs * kStep; at <= last; at += kPairs * kStep) {
      if (at == half) meanwhile();
      Pair pairs[kPairs];
      RowVector of_x[2 * kPairs];
#pragma unroll
      for (int k = 0; k < kPairs; ++k) pairs[k] = SharedAt<const Pair>(at + k * kStep);
#pragma unroll
      for (int k = 0; k < 2 * kPairs; ++k) of_x[k] = ReadRow(pairs[k / 2].elements[k % 2].at);
#pragma unroll
      for (int k = 0; k < 2 * kPairs; ++k) {
        Add(pairs[k / 2].elements[k % 2].value, of_x[k], sums);
      }
    }
    if (at <= half) meanwhile();
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
      RowVector of_x = {};
#pragma unroll
      for (int c = 0; c < Shape::kVector; ++c) {
        if (c < owned) of_x.elements[c] = row[c];
      }
      Add(entry.value, of_x, sums);
    }
  }
};

// Adds those of a row's or part's next entries that lie in a panel, or in front of it.
template <bool kPart, typename Row, typename View, int kVector>
__device__ __forceinline__ void AddEntries(Row& row, const typename Row::Arrays& arrays,
                                           StagedSlots& slots, int slot, View& view,
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
    if (lane == slot) slots.next += count;
    row.template Load<kPart>(arrays, slots, slot);
    __syncwarp();
    if (in_front) {
      view.AddFromMemory(buffer, count, sums);
      row.LoadPermuted(arrays);
    } else {
      view.AddFromRing(buffer, count, sums, [&] { row.LoadPermuted(arrays); });
    }
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

// A row of a tile, and where its entries are.
struct TileRow {
  int row = StagedSlots::kNone;
  int begin = 0, end = 0;

  __device__ int Entries() const { return end > begin ? end - begin : 0; }
  __device__ TileRow Of(int lane) const {
    return {__shfl_sync(kAllLanes, row, lane), __shfl_sync(kAllLanes, begin, lane),
            __shfl_sync(kAllLanes, end, lane)};
  }
};

// Which rows a tile has: each turn deals one to every tile, in the order of lengths, forth and
// back. Where the matrix has long rows, lengths differ most in the first turn, often by as much as
// in many others together: there it goes forth, some turns back, and others forth and back again.
template <int kTileRows>
struct SwizzledTurns {
  uint32_t tiles, tile;

  __device__ static bool IsBack(int turn, int turns_back) {
    return turn > turns_back ? (turn - turns_back) % 2 == 0 : turn > 0;
  }

  // Rows that tell how many turns go back, and whether rows are cut: the tile's longest one, the
  // longest of all, and the last ones of the first turn, of an eighth of the turns, a quarter, a
  // half, all.
  static constexpr int kSamples = 7;
  __device__ uint32_t PlaceOfSample(int sample) const {
    if (sample < 2) return sample == 0 ? tile : 0;
    return (sample == 2 ? 1 : kTileRows >> (kSamples - 1 - sample)) * tiles - 1;
  }
  // After as many turns back as lengths take to fall by what they fell in the first one, the first
  // tile has as much as the last one.
  __device__ static int TurnsBack(int entries, int first_sample) {
    const int longest = __shfl_sync(kAllLanes, entries, first_sample + 1);
    const int last = __shfl_sync(kAllLanes, entries, first_sample + 2);
    const int sample = static_cast<int>(threadIdx.x % kWarp) - first_sample;
    const int above = __popc(__ballot_sync(
        kAllLanes, sample > 2 && sample < kSamples && entries > last - (longest - last)));
    return above == 0 ? 1 : kTileRows >> (kSamples - 3 - above);
  }
};

// How a tile's longest rows are cut into parts, of which each warp has one, then some a second one.
template <int kWarps, int kRows, int kSpares>
struct CutRows {
  int rows;   // so many are cut
  int parts;  // of all

  // Lane i knows the tile's row i. Gives the warp's parts to lanes behind those of its rows.
  __device__ __forceinline__ CutRows(const Pattern& pattern, const TileRow& row, int warp,
                                     StagedSlots& slots) {
    constexpr int kLongest = 1 << 25;   // a sum of so many for each row is a number of 32 bits
    constexpr int kLeast = 8 * kWarps;  // entries: less is not worth a visit
    constexpr int kMostRows =
        kWarps * 3 / 4;  // so that warps whose rows are cut have parts instead
    const int lane = threadIdx.x % kWarp;
    // Of a quarter of a warp's rows, or of one.
    const int64_t mean = pattern.nse / pattern.rows * (kRows > 4 ? kRows / 4 : 1);
    const int entries = row.Entries() < kLongest ? row.Entries() : kLongest;
    const unsigned are_long = __ballot_sync(kAllLanes, lane < kMostRows && entries > mean + kLeast);
    rows = __ffs(static_cast<int>(~are_long)) - 1;
    const bool is_cut = lane < rows;
    const int all = SumOverLanes(is_cut ? entries : 0, kWarp);
    // With at least so many entries there are no more parts than warps have room for.
    int least = (all + kSpares * kWarps - 1 - rows) / (kSpares * kWarps - rows);
    if (least < mean) least = static_cast<int>(mean);
    if (least < kLeast) least = kLeast;
    const int of_row = is_cut ? (entries - 1) / least + 1 : 0;
    int behind = of_row;
#pragma unroll
    for (int distance = 1; distance < kMostRows; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, behind, distance);
      if (lane >= distance) behind += before;
    }
    parts = __shfl_sync(kAllLanes, behind, kMostRows - 1);
#pragma unroll
    for (int spare = 0; spare < kSpares; ++spare) {
      const int number = spare * kWarps + warp;
      const int from = __popc(__ballot_sync(kAllLanes, lane < kMostRows && behind <= number));
      const TileRow its = row.Of(from);
      const int its_parts = __shfl_sync(kAllLanes, of_row, from);
      const int part = number - (__shfl_sync(kAllLanes, behind, from) - its_parts);
      if (number >= parts || lane != kRows + spare) continue;
      slots.row = part == 0 ? its.row : StagedSlots::kNone;
      slots.begin = its.begin + part * kWarp;
      slots.end = its.end;
      slots.parts = its_parts;
    }
  }
};

// Adds up the parts of long rows, in order. The whole is the sum of a row's first part.
template <typename Shape, int kWarps, int kSpares, int kVector>
__device__ __forceinline__ void AddUpParts(const StagedSlots& slots, int first_slot, int parts,
                                           uint32_t all_buffers, float (*sums)[kVector]) {
  const int warp = threadIdx.x / kWarp;
  const auto element = [&](int part, int c) -> float& {
    const int at = c * (kWarp / Shape::kGroups) + Shape::Lane();
    return SharedAt<float>(all_buffers + part % kWarps * (2 * Shape::kBufferBytes) +
                           at * sizeof(float));
  };
#pragma unroll
  for (int spare = 0; spare < kSpares; ++spare) {
    if (spare * kWarps >= parts) break;
    __syncthreads();  // buffers are read
    if (__shfl_sync(kAllLanes, slots.row, first_slot + spare) == StagedSlots::kNone &&
        Shape::Group() == 0) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) element(warp, c) = sums[spare][c];
    }
    __syncthreads();
#pragma unroll
    for (int whole = 0; whole <= spare; ++whole) {
      if (__shfl_sync(kAllLanes, slots.row, first_slot + whole) == StagedSlots::kNone) continue;
      const int number = whole * kWarps + warp, from = spare * kWarps;
      int end = number + __shfl_sync(kAllLanes, slots.parts, first_slot + whole);
      if (end > from + kWarps) end = from + kWarps;
#pragma unroll 1
      for (int part = number + 1 > from ? number + 1 : from; part < end; ++part) {
#pragma unroll
        for (int c = 0; c < kVector; ++c) sums[whole][c] += element(part, c);
      }
    }
  }
  __syncthreads();
}

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

// kPrefetch: the entries behind those that a warp loads are brought nearer.
template <typename T, typename Out, typename Index, int kLanes, int kRows, int kPanel, int kStages,
          int kWarps, bool kPrefetch, bool kPermuted>
__global__ void __launch_bounds__(kWarps* kWarp, 1)
    SpmmStaged(const __grid_constant__ SpmmProblem p) {
  using Shape = StagedShape<T, kLanes, kRows, kPanel, kStages, kWarps>;
  using M = Matrices<T, Out, Index>;
  using View = PanelView<T, Shape>;
  using Panels = StagedPanels<T, Shape, kPanel>;
  using Ring = PanelPipeline<T, Shape::kRowBytes, kPanel, kStages, kWarps, Panels>;
  static_assert(Shape::kCountersAt + Ring::kCounterBytes <=
                SpmmStagedBytes(Shape::kRowBytes, kPanel, kStages, kWarps));
  extern __shared__ __align__(128) unsigned char spmm_ring[];
  const Shape shape(p);
  const uint32_t rows = static_cast<uint32_t>(p.pattern.rows);
  const uint32_t tiles = static_cast<uint32_t>(p.batch.count) * shape.across * shape.down;
  const uint32_t mine = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const Panels panels{p, shape};
  Ring ring(panels, spmm_ring, spmm_ring + Shape::kCountersAt, mine * shape.panels);

  using Turns = SwizzledTurns<Shape::kTileRows>;
  constexpr int kSpares = kRows * Shape::kVector > 16 ? 1 : 2;  // as many as fit into registers
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

    constexpr int kSlots = kRows + kSpares;
    StagedRow<T, Index, kPermuted, kPrefetch> own[kSlots];
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
          TileRow* rows_of_tile = reinterpret_cast<TileRow*>(spmm_ring + Shape::kBuffersAt);
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
        view.first_row = view.ring + ring.Enter();
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          AddEntries<false>(own[r], arrays, slots, r, view, sums[r]);
        }
#pragma unroll
        for (int r = kRows; r < kSlots; ++r) {
          if (parts <= (r - kRows) * kWarps) break;
          AddEntries<true>(own[r], arrays, slots, r, view, sums[r]);
        }
        ring.Leave();
      }
    }
#pragma unroll
    for (int r = 0; r < kSlots; ++r) AddUpGroups<Shape>(sums[r]);
    if (parts > 0) {
      AddUpParts<Shape, kWarps, kSpares>(slots, kRows, parts, view.ring + Shape::kBuffersAt,
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
