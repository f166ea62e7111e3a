// Types that host and device code share. NVRTC has no standard headers, so this file includes none
// for it.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#define JAXSPARSE_INLINE __host__ __device__ __forceinline__
#else
#include <cstdint>
// Internal linkage in effect: an out-of-line copy made for one instruction set must never be the
// one that the linker picks for another.
#define JAXSPARSE_INLINE [[gnu::always_inline]] inline
#endif

namespace jaxsparse {

enum class DType : int { kFloat32, kFloat64, kBFloat16, kFloat16 };
enum class IndexType : int { kInt32, kUint16 };

JAXSPARSE_INLINE int64_t SizeOf(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

constexpr int kWarp = 32;  // lanes

// Of a PanelRing: for each stage its counters, and for all of them the rows.
constexpr int kRingCounterBytes = 20;
constexpr int kRingBytes = 192 << 10;

// The GPU that a kernel is chosen for: an H200 unless a call says otherwise.
struct Gpu {
  int compute_capability = 90;  // 9.0
  int multiprocessors = 132;
  int64_t shared_bytes = 232448;  // that a block can have
};

// The least power of 2 that is no less than `size`, at most a warp: lanes that share a unit of
// work.
JAXSPARSE_INLINE int LanesFor(int64_t size) {
  int lanes = 1;
  while (lanes < size && lanes < kWarp) lanes *= 2;
  return lanes;
}

JAXSPARSE_INLINE int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows of a panel, of which a ring has room for `most`: as many as are useful for a matrix of so
// many rows.
JAXSPARSE_INLINE int PanelRows(int64_t rows, int most) {
  int panel = 16;
  while (panel < rows && panel * 2 <= most) panel *= 2;
  return panel < rows && panel / 2 * 3 <= most ? panel / 2 * 3 : panel;
}

// What a driver says of matrices whose tiles a kernel copies by one instruction each: a CUtensorMap
// (nvrtc/tensor_map.h).
struct alignas(64) TensorMap {
  uint64_t opaque[16] = {};
};

// Leading (batch) dimensions of an operation's outputs. An operand may have size 1 where the output
// has more; its stride is 0 there.
constexpr int kMaxBatchRank = 8;

struct Batch {
  int rank = 0;
  int64_t count = 1;
  int64_t sizes[kMaxBatchRank] = {};
};

// One operand or result: the first element of its first batch entry, and the distance in elements
// between neighbours along each batch dimension.
struct Array {
  void* data = nullptr;
  int64_t strides[kMaxBatchRank] = {};

  template <typename T>
  JAXSPARSE_INLINE T* At(const Batch& batch, int64_t index) const {
    int64_t offset = 0;
#ifdef __CUDACC_RTC__
#pragma unroll 1  // divisions, which would be most of a kernel's code
#endif
    for (int d = batch.rank - 1; d >= 0; --d) {
      offset += (index % batch.sizes[d]) * strides[d];
      index /= batch.sizes[d];
    }
    return static_cast<T*>(data) + offset;
  }
};

// How many of a batch's entries an operand has: 1 along dimensions in which it is broadcast.
JAXSPARSE_INLINE int64_t OwnEntries(const Batch& batch, const Array& array) {
  int64_t entries = 1;
  for (int d = 0; d < batch.rank; ++d) entries *= array.strides[d] == 0 ? 1 : batch.sizes[d];
  return entries;
}

// Which of them a batch entry reads.
JAXSPARSE_INLINE int64_t OwnEntry(const Batch& batch, const Array& array, int64_t index) {
  int64_t own = 0, distance = 1;
#ifdef __CUDACC_RTC__
#pragma unroll 1  // as in Array::At
#endif
  for (int d = batch.rank - 1; d >= 0; --d) {
    if (array.strides[d] != 0) {
      own += index % batch.sizes[d] * distance;
      distance *= batch.sizes[d];
    }
    index /= batch.sizes[d];
  }
  return own;
}

// Matrices of 16 bits that stand for one of this type on tensor cores (common/tensor_cores.cuh).
JAXSPARSE_INLINE int PlanesOf(DType dtype) { return dtype == DType::kFloat32 ? 3 : 1; }

// On tensor cores a sparse matrix is cut into tiles of so many rows and columns, as the dense
// operand it meets into tiles of so many lines. A kernel before prepares them, in blocks of so many
// threads.
constexpr int kTileSize = 64, kPrepareThreads = 256;
constexpr int kPrepareBlocks = 8;  // of a multiprocessor, so that rows are waited for at once
constexpr int kPrepareRows = kPrepareThreads / kWarp;  // of which a block finds out the starts
constexpr int kMostTiles = 2;  // times 32, whose starts a warp looks for at once
constexpr int kPrepareBytes = kMostTiles * kPrepareThreads * 4;  // of shared memory

// The planes of a dense operand in a workspace: of each of its own batch entries, and of so many
// columns at a time, tiles of kTileSize lines one behind the other, as they are copied to shared
// memory.
struct PlaneTiles {
  int64_t down, across;  // tiles
  int64_t tile_bytes;

  JAXSPARSE_INLINE PlaneTiles(int64_t lines, int64_t width, int columns, int planes)
      : down(CeilDivide(lines, kTileSize)),
        across(CeilDivide(width, columns)),
        tile_bytes(static_cast<int64_t>(planes) * kTileSize * columns * 2) {}
  JAXSPARSE_INLINE int64_t Bytes() const { return down * across * tile_bytes; }  // of an entry
};

// Where in a pattern the entries of each row in each tile begin, int32, given with the pattern or
// at the begin of a workspace: of each of the pattern's own batch entries and of kTileSize rows at
// a time, for each tile across, and for the end, one number for each row. A row whose columns do
// not rise has no entries in any tile, and in the end stands the complement.
struct TileStarts {
  int64_t down, across;  // tiles

  JAXSPARSE_INLINE TileStarts(int64_t rows, int64_t columns)
      : down(CeilDivide(rows, kTileSize)), across(CeilDivide(columns, kTileSize)) {}
  // The first number of some rows.
  JAXSPARSE_INLINE int64_t At(int64_t own_entry, int64_t tile_down) const {
    return (own_entry * down + tile_down) * (across + 1) * kTileSize;
  }
  JAXSPARSE_INLINE int64_t Bytes() const { return At(1, 0) * 4; }  // of an entry
};

// Memory for what a call's kernels leave for one another, aligned as XLA's buffers are.
struct Workspace {
  char* data = nullptr;
  int64_t bytes = 0;
};

// The pattern that a kernel walks. Rows of a transposed product are the columns of the stored
// matrix: then `permutation` says where in the stored order each value lies, and is null otherwise.
struct Pattern {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t nse = 0;  // stored entries, padding behind row_offsets[rows] included
  IndexType index_type = IndexType::kInt32;
  Array row_offsets;     // int32 (rows + 1,)
  Array column_indices;  // index_type (nse,)
  Array row_order;       // int32 (rows,), by falling length
  Array permutation;     // int32 (nse,) or null
  Array tile_starts;     // int32, as TileStarts says, or null
};

// Whether batch entries have offsets and columns of their own along the same dimensions. Without
// stored entries there are no columns.
JAXSPARSE_INLINE bool IsBatchedAsOne(const Batch& batch, const Pattern& pattern) {
  for (int d = 0; d < batch.rank && pattern.nse > 0; ++d) {
    const bool own_offsets = pattern.row_offsets.strides[d] != 0;
    if (own_offsets != (pattern.column_indices.strides[d] != 0)) return false;
  }
  return true;
}

// Lines of so many numbers, which are split into so many planes, that a block prepares at once:
// few, so that they take few registers, which the search for starts does not need.
JAXSPARSE_INLINE constexpr int LinesToPrepare(int columns, int split) {
  constexpr int kBytes = 8 << 10;
  const int line = columns * (split > 1 ? 4 : 2);
  return line * kTileSize <= kBytes ? kTileSize : kBytes / line;
}

// What a kernel before prepares for a product on tensor cores of a pattern and a dense operand of
// so many lines.
struct Preparation {
  int64_t lines, width;
  PlaneTiles planes;
  int lines_at_once;
  TileStarts starts;
  int64_t own_planes, own_starts;  // batch entries, of starts if they are not given

  // `columns` and `split`: those of the dense operand at a time, and into how many planes.
  JAXSPARSE_INLINE Preparation(const Batch& batch, const Pattern& pattern, int64_t operand_lines,
                               const Array& operand, int64_t operand_width, int columns, int split)
      : lines(operand_lines),
        width(operand_width),
        planes(lines, width, columns, split),
        lines_at_once(LinesToPrepare(columns, split)),
        starts(pattern.rows, pattern.columns),
        own_planes(OwnEntries(batch, operand)),
        own_starts(pattern.tile_starts.data == nullptr ? OwnEntries(batch, pattern.row_offsets)
                                                       : 0) {}

  JAXSPARSE_INLINE int64_t PlanesBytes() const { return own_planes * planes.Bytes(); }
  JAXSPARSE_INLINE int64_t StartsBytes() const { return own_starts * starts.Bytes(); }
  JAXSPARSE_INLINE int64_t Bytes() const { return StartsBytes() + PlanesBytes(); }
  JAXSPARSE_INLINE int32_t* StartsIn(const Workspace& workspace) const {
    return reinterpret_cast<int32_t*>(workspace.data);
  }
  // Of a batch entry, given or found.
  JAXSPARSE_INLINE const int32_t* StartsOf(const Batch& batch, const Pattern& pattern,
                                           const Workspace& workspace, int64_t entry) const {
    if (own_starts == 0) return pattern.tile_starts.At<const int32_t>(batch, entry);
    return StartsIn(workspace) + starts.At(OwnEntry(batch, pattern.row_offsets, entry), 0);
  }
  JAXSPARSE_INLINE char* PlanesIn(const Workspace& workspace) const {
    return workspace.data + StartsBytes();
  }
  // Units of work for a block: some rows each, then some lines of a tile of planes. Rows take
  // longer, and fewer instructions to find.
  JAXSPARSE_INLINE int64_t RowUnits() const {
    return own_starts * starts.down * (kTileSize / kPrepareRows);
  }
  JAXSPARSE_INLINE int64_t Units() const {
    return RowUnits() + own_planes * planes.down * planes.across * (kTileSize / lines_at_once);
  }
};

}  // namespace jaxsparse
