// Warps that are held up, for tests of the exchange between blocks: a sanitizer does not see what
// passes between them.
#pragma once

#include "persistent/backoff.cuh"

namespace jaxsparse {

// Holds a warp up now and then, by up to kMostCycles clock cycles, differently in every block, warp
// and step.
template <unsigned kMostCycles>
__device__ __forceinline__ void Delay(int64_t step) {
  if constexpr (kMostCycles > 0) {
    uint32_t x = static_cast<uint32_t>(step) * 0x9e3779b9u ^ blockIdx.x * 0x85ebca6bu ^
                 threadIdx.x / kWarp * 0xc2b2ae35u;
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0x735a2d97u;
    x ^= x >> 15;
    if (x % 4 == 0) WaitCycles(static_cast<uint32_t>(clock()), __umulhi(x, kMostCycles));
  }
}

}  // namespace jaxsparse
