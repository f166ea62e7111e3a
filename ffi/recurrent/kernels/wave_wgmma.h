// How a layer of a wave is divided among blocks and warpgroups where its states are the stationary
// rows of wgmma: 64 batch entries by a block's products.
#pragma once

#include "recurrent/kernels/wave.h"

namespace jaxsparse {

// The columns of a matrix, in chunks of 32 that are dealt to a block's warpgroups in turn. All
// weights lie in shared memory, since wgmma takes one operand of two from there: a line for each
// unit's product that the matrix has, in tiles of 64 columns.
struct WgmmaColumns : WaveMatrix {
  JAXSPARSE_INLINE constexpr WgmmaColumns(const WaveMatrix& matrix, const DenseBlock& block)
      : WaveMatrix(matrix),
        columns(CountBits(matrix.states) * block.part),
        chunks((columns + block.chunk - 1) / block.chunk),
        loads((chunks + block.parts - 1) / block.parts),
        ahead(block.loads_ahead == 0 || block.loads_ahead > loads ? loads : block.loads_ahead),
        lines(CountBits(matrix.products) * block.units),
        tiles((loads * block.parts + 1) / 2),
        shared_bytes(tiles * lines * 128) {}

  int columns;
  int chunks;
  int loads;  // chunks of a warpgroup
  int ahead;  // of them, on their way at once
  int lines;
  int tiles;
  int shared_bytes;
};

struct WaveWgmmaConfig {
  WaveConfig wave;
  // The state below is asked for a step ahead, or else when its product is wanted: that takes fewer
  // registers.
  bool asks_ahead = true;
};

struct WaveWgmmaSizes : DenseBlock {
  JAXSPARSE_INLINE explicit constexpr WaveWgmmaSizes(const WaveWgmmaConfig& config)
      : DenseBlock(config.wave.block),
        own(config.wave.own, *this),
        below(config.wave.below, *this),
        skip(config.wave.skip),
        means(config.wave, *this),
        asks_ahead(config.asks_ahead) {
    first_meetings = 1;  // when all weights are there
  }

  WgmmaColumns own, below;
  WaveSkip skip;
  WaveMeans means;  // none, as the plan has it
  bool asks_ahead;
  // A warpgroup without columns of its own layer has no data to wait for, and would run ahead.
  bool has_idle_warps = own.chunks <= (parts - 1) * own.loads;
  // Chunks that share a tile have to be those of one or of two warpgroups, known when compiling.
  bool has_whole_tiles =
      warps == 4 * row_parts * parts && (parts == 1 || parts % 2 == 0) && units % 8 == 0;
  int tiles_at = Ceil(weights_at, 1024) * 1024;
  int below_tiles_at = tiles_at + own.shared_bytes;
  int means_at = below_tiles_at + below.shared_bytes;
  int shared_bytes = means_at;
  // Registers of a product thread: two rows of each chunk, and sums.
  int most_ahead = own.ahead > below.ahead ? own.ahead : below.ahead;
  int states_under_way = asks_ahead ? own.ahead + below.ahead : most_ahead;
  int other_registers = 36 + states_under_way * 8 + rows / 2;
};

}  // namespace jaxsparse
