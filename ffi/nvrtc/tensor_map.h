// What drivers say of matrices in memory, for copies of their tiles.
#pragma once

#include <string>

#include "cuda/preparation.h"
#include "cuda/tensor_map.h"

namespace jaxsparse {

// Matrices of 16-bit numbers, row-major, one behind the other: rows that are a multiple of 16 bytes
// long, of which the first one is as aligned.
struct MatricesOfHalves {
  const void* data;
  int64_t count, lines, width;
};

// Of tiles of kTileSize lines of as many numbers, which shared memory gets as a SwizzledTile
// (cuda/tensor_cores.cuh); what lies beyond the matrix is 0. Returns the reason of a failure, or
// an empty string.
std::string EncodeTensorMap(const MatricesOfHalves& matrices, TensorMap* map);

}  // namespace jaxsparse
