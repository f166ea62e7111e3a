// How a layer of a wave is divided among blocks, warps and lanes: as a dense scan is (dense.h), but
// its product warps take columns of two matrices.
#pragma once

#include "recurrent/kernels/dense.h"

namespace jaxsparse {

// A dense matrix from some states to some products: bit i stands for the i-th one.
struct WaveMatrix {
  int products = 1;
  int states = 1;
  int register_chunks = 0;  // of a warp; the others' weights lie in shared memory
};

struct WaveConfig {
  DenseConfig block;  // without register_chunks
  WaveMatrix own;     // from a layer's last step
  WaveMatrix below;   // from the layer below, in the same step
};

JAXSPARSE_INLINE constexpr int CountBits(int mask) {
  int count = 0;
  for (; mask != 0; mask &= mask - 1) ++count;
  return count;
}

// The columns of a matrix, in chunks that are dealt to a block's product warps in turn.
struct WaveColumns : WaveMatrix {
  JAXSPARSE_INLINE constexpr WaveColumns(const WaveMatrix& matrix, const DenseBlock& block)
      : WaveMatrix(matrix),
        columns(CountBits(matrix.states) * block.part),
        chunks((columns + block.chunk - 1) / block.chunk),
        loads((chunks + block.warps - 1) / block.warps),
        ahead(block.loads_ahead == 0 || block.loads_ahead > loads ? loads : block.loads_ahead),
        row_tiles(CountBits(matrix.products) == block.products
                      ? block.row_tiles
                      : CountBits(matrix.products) * block.units / 16),
        chunk_registers(row_tiles * 8),
        shared_bytes((loads - matrix.register_chunks) * chunk_registers * 4 *
                     block.product_threads) {}

  int columns;
  int chunks;
  int loads;            // chunks of a warp
  int ahead;            // of them, on their way at once
  int row_tiles;        // a block's units have to be multiples of 16 where products are left out
  int chunk_registers;  // of a lane
  int shared_bytes;
};

struct WaveSizes : DenseBlock {
  JAXSPARSE_INLINE explicit constexpr WaveSizes(const WaveConfig& config)
      : DenseBlock(config.block), own(config.own, *this), below(config.below, *this) {}

  WaveColumns own, below;
  bool has_whole_tiles =
      (own.row_tiles == row_tiles && below.row_tiles == row_tiles) || units % 16 == 0;
  // A warp without columns of its own layer has no data to wait for, and would run ahead.
  bool has_idle_warps = own.chunks <= (warps - 1) * own.loads;
  int below_weights_at = weights_at + own.shared_bytes;
  int shared_bytes = below_weights_at + below.shared_bytes;
  // States on their way at once, of either matrix.
  int ahead = own.ahead > below.ahead ? own.ahead : below.ahead;
  bool all_ahead = own.ahead == own.loads && below.ahead == below.loads;
  // Registers of a product thread for all but weights, so that the compiler spills none in a step.
  int other_registers = 28 + (state_parts > 1 ? 16 : 0) + ahead * (4 * batch_tiles + 1) +
                        4 * row_tiles * batch_tiles * chains + (all_ahead ? 0 : chunk_registers);
};

}  // namespace jaxsparse
