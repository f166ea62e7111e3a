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

// A product that is a state of a lower layer, unit by unit.
struct WaveSkip {
  int product = -1;  // none
  int state = 0;
};

// A product that is a mean over the units of the layer below: of a state, or of its square.
struct WaveMean {
  int product = -1;  // none
  int state = 0;
  bool squared = false;
};
constexpr int kMaxWaveMeans = 2;

struct WaveConfig {
  DenseConfig block;  // without register_chunks; its products are those of matrices, the first ones
  WaveMatrix own;     // from a layer's last step
  WaveMatrix below;   // from the layer below, in the same step
  WaveSkip skip;
  WaveMean means[kMaxWaveMeans];  // those that there are come first
  // The products of the layer below are divided by the standard deviation, or by the root of the
  // mean square if that is the only mean, before those of the own state are added to them.
  bool scales = false;
};

JAXSPARSE_INLINE constexpr int CountBits(int mask) {
  int count = 0;
  for (; mask != 0; mask &= mask - 1) ++count;
  return count;
}

// Products up to the last one that a matrix leads to.
JAXSPARSE_INLINE constexpr int MatrixProducts(const WaveMatrix& own, const WaveMatrix& below) {
  int count = 0;
  for (int mask = own.products | below.products; mask != 0; mask >>= 1) ++count;
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

// The means that a layer takes of the one below. Product warps add the states up when they multiply
// them, or receive them for that if no matrix takes them.
struct WaveMeans {
  JAXSPARSE_INLINE constexpr WaveMeans(const WaveConfig& config, const DenseBlock& block)
      : scales(config.scales) {
    for (const WaveMean& mean : config.means) {
      if (mean.product < 0) continue;
      mean_of[count++] = mean;
      states |= 1 << mean.state;
    }
    of_products = (states & ~config.below.states) == 0;
    columns = of_products ? 0 : CountBits(states) * block.part;
    loads = (columns + block.chunk * block.warps - 1) / (block.chunk * block.warps);
    warp_floats = count * block.batch_slots;
    buffer = (block.warps + (scales ? 1 : 0)) * warp_floats;
  }

  WaveMean mean_of[kMaxWaveMeans];
  int count = 0;
  int states = 0;  // a set of bits
  bool of_products = false;
  bool scales = false;
  // Buffers of sums, of steps in turn. Two are enough for what is written when a step's own state
  // has come. What scales products is written before, while a step two before may be under way.
  int buffers = scales ? 4 : 2;
  int columns = 0;      // that are received for the sums alone
  int loads = 0;        // of a warp
  int warp_floats = 0;  // of a warp's sums in shared memory: [mean][b]
  int buffer = 0;       // of all warps', and behind them the means if these scale products
};

struct WaveSizes : DenseBlock {
  JAXSPARSE_INLINE explicit constexpr WaveSizes(const WaveConfig& config)
      : DenseBlock(config.block),
        own(config.own, *this),
        below(config.below, *this),
        skip(config.skip),
        means(config, *this) {}

  WaveColumns own, below;
  WaveSkip skip;
  WaveMeans means;
  bool has_whole_tiles =
      (own.row_tiles == row_tiles && below.row_tiles == row_tiles) || units % 16 == 0;
  // A warp without columns of its own layer has no data to wait for, and would run ahead.
  bool has_idle_warps = own.chunks <= (warps - 1) * own.loads;
  int below_weights_at = weights_at + own.shared_bytes;
  int means_at = below_weights_at + below.shared_bytes;
  int shared_bytes = means_at + means.buffers * means.buffer * 4;
  // States on their way at once, of either matrix.
  int ahead = own.ahead > below.ahead ? own.ahead : below.ahead;
  bool all_ahead = own.ahead == own.loads && below.ahead == below.loads;
  bool has_several_states = CountBits(own.states) > 1 || CountBits(below.states) > 1;
  // Registers of a product thread for all but weights, so that the compiler spills none in a step.
  int other_registers = 28 + (has_several_states ? 16 : 0) +
                        (ahead + means.loads) * (4 * batch_tiles + 1) + means.count * batch_tiles +
                        (means.scales && chains > 1 ? 8 : 0) +
                        4 * row_tiles * batch_tiles * chains + (all_ahead ? 0 : chunk_registers);
};

}  // namespace jaxsparse
