// What both kernels of the transpose of attention's derivative are given, by the host, for the
// device.
#pragma once

#include "attention/problem.h"
#include "cuda/tensor_map.h"

namespace jaxsparse {

// A block has two consumer warpgroups, which multiply, each for one of two neighbouring cells; and
// a producer warpgroup, one of whose warps has tiles copied.
constexpr int kCotangentGroups = 2;
constexpr int kCotangentThreads = (kCotangentGroups + 1) * 128;
constexpr int kCotangentConsumerRegisters = 240, kCotangentProducerRegisters = 24;
constexpr int kCotangentControlBytes = 1024;

// Of 64 rows, in shared memory: a number of lse and one of ct_sums.
constexpr int kShiftsBytes = 2 * kMaskCell * 4;

// Items of work, of which each is a row of a mask's tiles of one head. Blocks take them in their
// order, by a counter in the workspace: long rows first, heads inside, so many at once that what
// these read stays in the L2 cache.
struct CotangentItems {
  uint32_t heads = 1;  // of all batch entries
  uint32_t rows = 1;   // of tiles
  uint32_t heads_at_once = 1;

  JAXSPARSE_INLINE uint32_t Count() const { return heads * rows; }
};

struct AttentionCotangentTiles : AttentionCotangentProblem {
  // Of query and ct_out, key and value, in boxes of as many lines as the kernel copies at once.
  TensorMap query_tiles = {}, ct_out_tiles = {}, key_tiles = {}, value_tiles = {};
  CotangentItems items = {};
  float log2_scale = 1;  // scale * log2(e)
};

// The workspace has a counter for each kernel, 0 before the first one.
constexpr int kCotangentRowsCounter = 0, kCotangentKeysCounter = 1;
constexpr int kCotangentWorkspaceBytes = 16;

}  // namespace jaxsparse
