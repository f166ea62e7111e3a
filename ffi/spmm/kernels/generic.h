// What the generic kernels of the sparse-dense product share with the host.
#pragma once

namespace jaxsparse {

// Columns of the result that one lane owns.
constexpr int kSpmmColumnsPerLane = 4;

}  // namespace jaxsparse
