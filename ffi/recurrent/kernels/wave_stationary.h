// How a layer of a wave is divided among blocks and warpgroups where its weights are the stationary
// rows of wgmma: 64 of a block's products by a part of the batch.
#pragma once

#include "recurrent/kernels/wave.h"

namespace jaxsparse {

// The columns of a matrix in steps of 16, which each of a block's parts takes as many of in a row.
// A slot's columns lie in shared memory as they lie in the exchange buffer.
struct StationaryColumns : WaveMatrix {
  JAXSPARSE_INLINE constexpr StationaryColumns(const WaveMatrix& matrix, const DenseBlock& block)
      : WaveMatrix(matrix),
        columns(CountBits(matrix.states) * block.part),
        steps((columns + 16 * block.parts - 1) / (16 * block.parts)),
        padded(steps * block.parts * 16),
        words(columns / block.states_per_load * block.batch),
        loads((words + block.product_threads - 1) / block.product_threads),
        state_bytes(padded * block.batch * block.state_bytes),
        tiles((steps + 3) / 4),
        weight_bytes(block.rows / 64 * block.parts * tiles * 64 * 128) {}

  int columns;
  int steps;         // of a part
  int padded;        // columns of all steps
  int words;         // of 16 bytes that a block receives
  int loads;         // of a thread
  int state_bytes;   // of a slot in shared memory
  int tiles;         // of 64 columns by 64 rows, of a part's weights
  int weight_bytes;  // in such tiles
};

struct WaveStationaryConfig {
  WaveConfig wave;
  // Portions of the own state that a block waits for and multiplies by, one after another.
  int portions = 1;
};

struct WaveStationarySizes : DenseBlock {
  JAXSPARSE_INLINE explicit constexpr WaveStationarySizes(const WaveStationaryConfig& config)
      : DenseBlock(config.wave.block),
        own(config.wave.own, *this),
        below(config.wave.below, *this),
        skip(config.wave.skip),
        means(config.wave, *this),
        portions(config.portions) {
    first_meetings = 1;       // when all weights are there
    meetings = 1 + portions;  // when the state below is there, and each portion of the own one
  }

  StationaryColumns own, below;
  WaveSkip skip;
  WaveMeans means;  // none, as the plan has it
  int portions;
  // Tiles of 64 rows, a warpgroup for each of them in each part of the columns. Both matrices have
  // all products.
  int row_tiles_of_warpgroups = rows / 64;
  bool has_whole_tiles = rows % 64 == 0 && warps == 4 * row_tiles_of_warpgroups * parts &&
                         (batch == 32 || batch == 64) && CountBits(own.products) == products &&
                         CountBits(below.products) == products;
  // A portion is as many words of each thread, and whole steps of the columns.
  bool has_whole_portions =
      portions == 1 || (parts == 1 && own.loads % portions == 0 &&
                        own.loads / portions * product_threads % (2 * batch) == 0);
  // A thread has a bit for each of its words of a portion.
  bool has_few_words = own.loads <= 32 * portions && below.loads <= 32;
  int below_weights_at = Ceil(weights_at, 1024) * 1024;
  int own_states_at = below_weights_at + below.weight_bytes;
  int below_states_at = own_states_at + own.state_bytes;
  int means_at = below_states_at + below.state_bytes;
  int shared_bytes = means_at;
  // Registers of a product thread: all own weights, sums, and what addresses take.
  int own_registers = own.steps * 4;
  int other_registers = 32 + batch / 2;
};

}  // namespace jaxsparse
