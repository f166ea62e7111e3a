// How attention by the rows of a pattern is configured, by the host, for the device.
#pragma once

#include "attention/kernels/logarithms.h"
#include "attention/problem.h"

namespace jaxsparse {

constexpr int kCsrThreads = 128;                        // of a block
constexpr int kCsrTensorLanes = 8, kCsrTensorStep = 4;  // of groups and steps on tensor cores

// Rows of more entries are cut wherever the number of an entry is a multiple of it.
constexpr uint32_t kCsrPart = 1024;

struct AttentionCsrConfig {
  int lanes = 8;  // of a group, which has a row: each has a part of the row's vectors
  int step = 4;   // entries that a group reads at once, at most its lanes
  // Numbers of an access and accesses of a lane, of vectors of queries and keys, and of values.
  int head_vector = 8, head_vectors = 1;
  int value_vector = 8, value_vectors = 1;
  // Whether all lanes have something of each vector.
  bool whole_heads = true, whole_values = true;
  // Vectors of queries and keys are short: a lane has the whole of one entry's, none a part of all.
  bool own_scores = false;
  // Products are those of csr_products.cuh: numbers have 16 bits, and vectors that
  // are not short 64 numbers for each access of a lane.
  bool on_tensor_cores = false;
  // Then: steps whose tiles a warp has room for, and thread blocks per multiprocessor that
  // registers are limited for. With two stages a step is copied while the one before it is
  // multiplied; with one, other warps multiply meanwhile. The shared memory of a block is 32 KB at
  // most.
  int stages = 2, blocks = 4;
  // Of cotangents: the two numbers of a query, which entries of keys read, lie side by side.
  bool in_pairs = false;

  // Of the tiles of a stage, of 16 entries, where products are on tensor cores.
  constexpr int HeadTileBytes() const { return own_scores ? 0 : head_vectors * 16 * 128; }
  constexpr int ValueTileBytes() const { return value_vectors * 16 * 128; }
  constexpr int StageBytes() const {
    return on_tensor_cores ? HeadTileBytes() + ValueTileBytes() : 0;
  }
  constexpr int Groups() const { return kWarp / lanes; }  // of a warp
  constexpr int HeadLanes() const { return own_scores ? 1 : lanes; }
  constexpr int HeadsAtOnce() const { return own_scores ? 1 : step; }
  // From so many entries on, all groups of a warp share a row.
  constexpr uint32_t LongRow() const { return 4 * Groups() * step; }
  // That a multiprocessor shall have registers for in the kernel of cotangents.
  constexpr int BlocksAtOnce(int64_t number_bytes) const {
    if (on_tensor_cores) return blocks;
    const int numbers = head_vector * head_vectors + value_vector * value_vectors;
    return step <= 4 && numbers * number_bytes <= 64 ? 4 : 1;
  }
};

// One pass over all rows of the patterns of all heads. Blocks of a head follow one another: what a
// head gathers stays in the L2 cache.
struct CsrPass {
  uint32_t heads = 0;        // of all batch entries
  uint32_t blocks = 0;       // of each
  uint32_t parts = 0;        // of a pattern's entries; 0: no row is cut
  uint32_t numbers = 0;      // of a part's sums
  uint32_t* done = nullptr;  // (heads, parts): how many are done of the row that begins there
  void* sums = nullptr;      // (heads, parts, 2, numbers), as accumulators
};

struct AttentionCsrProblem : AttentionProblem {
  CsrPass pass = {};
  double log2_scale = 1;  // scale * log2(e)
};

struct AttentionCsrCotangentProblem : AttentionCotangentProblem {
  CsrPass of_queries = {}, of_keys = {};  // the counters of both follow one another
  double log2_scale = 1;
  void* queries_in_pairs = nullptr;  // CsrQuery of each, as lse
  int64_t counters = 0;              // that the prologue clears
};

}  // namespace jaxsparse
