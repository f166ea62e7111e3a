// What is prepared for products on tensor cores: components of the dense operand, and where the
// entries of the sparse matrix's tiles begin if that is not given.
#pragma once

#include "cuda/tile_starts.cuh"
#include "cuda/warpgroup.cuh"

namespace jaxsparse {

// Writes both to a workspace, by blocks of kPrepareThreads; of `operand`, kColumns columns at a
// time. The next kernel begins meanwhile, and waits for what it needs of it.
template <typename T, typename Index, int kColumns>
__device__ __forceinline__ void Prepare(const Preparation& of, const Batch& batch,
                                        const Pattern& pattern, const Array& operand,
                                        const Workspace& to) {
  LetNextKernelBegin();
  const ComponentTiles& components = of.components;
#pragma unroll 1
  for (int64_t unit = blockIdx.x; unit < of.Units(); unit += gridDim.x) {
    if (unit < of.RowUnits()) {
      WriteStartsOfRows<Index>(pattern, static_cast<uint32_t>(unit), of.StartsIn(to));
      continue;
    }
    const int64_t part = unit - of.RowUnits();
    constexpr int kLines = LinesToPrepare(kColumns, kComponents<T>), kParts = kTileSize / kLines;
    using To = BlockedTile<kTileSize, kColumns>;
    const int64_t number = part / kParts, own = number / components.down / components.across;
    const int first = static_cast<int>(part % kParts) * kLines;
    const T* matrix = static_cast<const T*>(operand.data) + own * of.lines * of.width;
    TileInRegisters<T, kLines, kColumns, kPrepareThreads, To> tile;
    tile.Load(matrix, of.lines, of.width, number % components.down * kTileSize + first,
              number / components.down % components.across * kColumns,
              tile.IsWide(matrix, of.width), threadIdx.x);
    static_assert(kLines % 8 == 0);  // after which the places in a component repeat
    tile.Store(reinterpret_cast<unsigned char*>(of.ComponentsIn(to)) +
                   number * components.tile_bytes + To::At(first, 0),
               threadIdx.x);
  }
}

}  // namespace jaxsparse
