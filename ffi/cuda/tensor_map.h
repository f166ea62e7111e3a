// What a driver says of matrices whose tiles a kernel copies by one instruction each.
#pragma once

#include "types.h"

namespace jaxsparse {

// A CUtensorMap (nvrtc/tensor_map.h).
struct alignas(64) TensorMap {
  uint64_t opaque[16] = {};
};

}  // namespace jaxsparse
