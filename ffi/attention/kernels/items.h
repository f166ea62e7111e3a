// Items of work of attention's kernels, and their order.
#pragma once

#include "types.h"

namespace jaxsparse {

// Each item is a row of a mask's tiles of one head. They come in this order: long rows first, heads
// inside, so many at once that what these read stays in the L2 cache.
struct AttentionItems {
  uint32_t heads = 1;  // of all batch entries
  uint32_t rows = 1;   // of tiles
  uint32_t heads_at_once = 1;

  JAXSPARSE_INLINE uint32_t Count() const { return heads * rows; }

  // The head of an item, and which of the rows in the mask's order it is.
  struct Place {
    uint32_t head, row;
  };
  JAXSPARSE_INLINE Place At(uint32_t number) const {
    const uint32_t at_once = heads_at_once * rows;
    const uint32_t first = number / at_once * heads_at_once;
    const uint32_t left = heads - first, together = left < heads_at_once ? left : heads_at_once;
    const uint32_t rest = number % at_once;
    return {first + rest % together, rest / together};
  }
};

}  // namespace jaxsparse
