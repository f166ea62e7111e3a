// What drivers say of matrices in memory, for copies of their tiles.
#pragma once

#include <string>

#include "cuda/preparation.h"
#include "cuda/tensor_map.h"

namespace jaxsparse {

// Matrices of 16-bit numbers, row-major, one behind the other. The first row begins at a multiple
// of 16 bytes. Rows are multiples of 16 bytes long, unless there is only one, of a single matrix.
struct MatricesOfHalves {
  const void* data;
  int64_t count, lines, width;
};

struct TileOfHalves {
  int lines = kTileSize;
  int width = kTileSize;  // 8, 16, 32 or 64
};

// Of tiles of so many lines, which shared memory gets as a SwizzledTile (cuda/tensor_cores.cuh);
// what lies beyond the matrix is 0. Returns the reason of a failure, or an empty string.
std::string EncodeTensorMap(const MatricesOfHalves& matrices, TensorMap* map,
                            const TileOfHalves& tile = {});

// An array of 16-bit numbers of four dimensions, the innermost first, whose neighbours along the
// others are so many numbers apart: multiples of 16 bytes, as the array's place is.
struct ArrayOfHalves {
  const void* data;
  int64_t sizes[4];
  int64_t strides[3];
};

// Of boxes of kTileSize numbers of the innermost dimension by so many along the third one, of one
// place along the others: `lines` rows that shared memory gets as a SwizzledTile. What lies beyond
// the array is 0. Returns the reason of a failure, or an empty string.
std::string EncodeTensorMap(const ArrayOfHalves& array, int lines, TensorMap* map);

}  // namespace jaxsparse
