// Operands of attention's kernels by warpgroups, as an emulated GPU copies their tiles.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention/kernels/tensor_maps.h"
#include "cuda/instructions.cuh"

namespace jaxsparse {

// Of so many positions of heads, copied `lines` at once.
inline TensorMap EmulatedMapOf(const Batch& batch, const Array& array, int64_t positions,
                               int64_t heads, int64_t size, int lines) {
  const ArrayOfHalves of = HeadsOf(batch, array, positions, heads, size);
  EmulatedArrayMap map{static_cast<const uint16_t*>(of.data), {}, {}, lines};
  std::copy_n(of.sizes, 4, map.sizes);
  std::copy_n(of.strides, 3, map.strides);
  TensorMap opaque;
  std::memcpy(&opaque, &map, sizeof(map));
  return opaque;
}

}  // namespace jaxsparse
