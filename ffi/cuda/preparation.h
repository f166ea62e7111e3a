// What a prologue kernel prepares for a product on tensor cores: the dense operand, split into
// components and cut into tiles, and where the entries of the sparse matrix's tiles begin. Host and
// device compute the sizes by these functions.
#pragma once

#include "types.h"

namespace jaxsparse {

// Matrices of 16 bits that stand for one of this type on tensor cores (cuda/tensor_cores.cuh).
JAXSPARSE_INLINE int ComponentsOf(DType dtype) { return dtype == DType::kFloat32 ? 3 : 1; }

// On tensor cores a sparse matrix is cut into tiles of so many rows and columns, as the dense
// operand it meets into tiles of so many lines. A prologue kernel prepares them, in blocks of so
// many threads.
constexpr int kTileSize = 64, kPrepareThreads = 256;
constexpr int kPrepareBlocks = 8;  // of a multiprocessor, so that rows are waited for at once
constexpr int kPrepareRows = kPrepareThreads / kWarp;  // of which a block finds out the starts
constexpr int kMostTiles = 2;  // times 32, whose starts a warp looks for at once
constexpr int kPrepareBytes = kMostTiles * kPrepareThreads * 4;  // of shared memory

// The components of a dense operand in a workspace: of each of its own batch entries, and of so
// many columns at a time, tiles of kTileSize lines one behind the other, as they are copied to
// shared memory.
struct ComponentTiles {
  int64_t down, across;  // tiles
  int64_t tile_bytes;

  JAXSPARSE_INLINE ComponentTiles(int64_t lines, int64_t width, int columns, int components)
      : down(CeilDivide(lines, kTileSize)),
        across(CeilDivide(width, columns)),
        tile_bytes(static_cast<int64_t>(components) * kTileSize * columns * 2) {}
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

// Lines of so many numbers, which are split into so many components, that a block prepares at once:
// few, so that they take few registers, which the search for starts does not need.
JAXSPARSE_INLINE constexpr int LinesToPrepare(int columns, int split) {
  constexpr int kBytes = 8 << 10;
  const int line = columns * (split > 1 ? 4 : 2);
  return line * kTileSize <= kBytes ? kTileSize : kBytes / line;
}

// What the prologue kernel prepares for a product on tensor cores of a pattern and a dense operand
// of so many lines.
struct Preparation {
  int64_t lines, width;
  ComponentTiles components;
  int lines_at_once;
  TileStarts starts;
  int64_t own_components, own_starts;  // batch entries, of starts if they are not given

  // `columns` and `split`: those of the dense operand at a time, and into how many components.
  JAXSPARSE_INLINE Preparation(const Batch& batch, const Pattern& pattern, int64_t operand_lines,
                               const Array& operand, int64_t operand_width, int columns, int split)
      : lines(operand_lines),
        width(operand_width),
        components(lines, width, columns, split),
        lines_at_once(LinesToPrepare(columns, split)),
        starts(pattern.rows, pattern.columns),
        own_components(OwnEntries(batch, operand)),
        own_starts(pattern.tile_starts.data == nullptr ? OwnEntries(batch, pattern.row_offsets)
                                                       : 0) {}

  JAXSPARSE_INLINE int64_t ComponentsBytes() const { return own_components * components.Bytes(); }
  JAXSPARSE_INLINE int64_t StartsBytes() const { return own_starts * starts.Bytes(); }
  JAXSPARSE_INLINE int64_t Bytes() const { return StartsBytes() + ComponentsBytes(); }
  JAXSPARSE_INLINE int32_t* StartsIn(const Workspace& workspace) const {
    return reinterpret_cast<int32_t*>(workspace.data);
  }
  // Of a batch entry, given or found.
  JAXSPARSE_INLINE const int32_t* StartsOf(const Batch& batch, const Pattern& pattern,
                                           const Workspace& workspace, int64_t entry) const {
    if (own_starts == 0) return pattern.tile_starts.At<const int32_t>(batch, entry);
    return StartsIn(workspace) + starts.At(OwnEntry(batch, pattern.row_offsets, entry), 0);
  }
  JAXSPARSE_INLINE char* ComponentsIn(const Workspace& workspace) const {
    return workspace.data + StartsBytes();
  }
  // Units of work for a block: some rows each, then some lines of a tile of components. Rows take
  // longer, and fewer instructions to find.
  JAXSPARSE_INLINE int64_t RowUnits() const {
    return own_starts * starts.down * (kTileSize / kPrepareRows);
  }
  JAXSPARSE_INLINE int64_t Units() const {
    return RowUnits() +
           own_components * components.down * components.across * (kTileSize / lines_at_once);
  }
};

}  // namespace jaxsparse
