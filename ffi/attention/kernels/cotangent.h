// What both kernels of the transpose of attention's derivative are given, by the host, for the
// device.
#pragma once

#include "attention/kernels/items.h"
#include "attention/problem.h"
#include "cuda/tensor_map.h"

namespace jaxsparse {

// A block has two consumer warpgroups, which multiply, each for one of two neighbouring cells; and
// a producer warpgroup, whose first warps take items and have tiles copied.
constexpr int kCotangentGroups = 2;
constexpr int kCotangentThreads = (kCotangentGroups + 1) * 128;
constexpr int kCotangentConsumerRegisters = 240, kCotangentProducerRegisters = 24;
constexpr int kCotangentControlBytes = 1024;

// Of 64 rows, in shared memory: a number of lse and one of ct_sums.
constexpr int kShiftsBytes = 2 * kMaskCell * 4;

// What kernels of both kinds of tensor cores are given. Where blocks take items by a counter in the
// workspace, that is 0 before.
struct AttentionCotangentWork : AttentionCotangentOfTiles {
  AttentionItems items = {};
  float log2_scale = 1;  // scale * log2(e)
};

struct AttentionCotangentTiles : AttentionCotangentWork {
  // Of query and ct_out, key and value, in boxes of as many lines as the kernel copies at once.
  TensorMap query_tiles = {}, ct_out_tiles = {}, key_tiles = {}, value_tiles = {};
};

// The workspace has a counter for each kernel, 0 before the first one.
constexpr int kCotangentRowsCounter = 0, kCotangentKeysCounter = 1;
constexpr int kCotangentWorkspaceBytes = 16;

}  // namespace jaxsparse
