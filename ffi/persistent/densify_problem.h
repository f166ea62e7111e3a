// What the host tells the kernel that writes a sparse matrix out as a dense one.
#pragma once

#include "types.h"

namespace jaxsparse {

// A CSR matrix and where it is wanted as a dense one.
struct DensifyProblem {
  const void* values = nullptr;
  const int32_t* row_offsets = nullptr;
  const void* column_indices = nullptr;
  void* dense = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t nse = 0;
};
constexpr int kDensifyThreads = 256;

}  // namespace jaxsparse
