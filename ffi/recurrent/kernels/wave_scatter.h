// How a layer of a wave is divided among blocks and warps where blocks exchange sums of products
// instead of states (wave_scatter.cuh).
#pragma once

#include "recurrent/kernels/wave.h"

namespace jaxsparse {

// A matrix from the states of a block's own units to all units of a layer: tiles of 16 of these
// units are dealt to the block's product warps in turn. `register_chunks`: of a warp's tiles.
struct ScatterColumns : WaveMatrix {
  JAXSPARSE_INLINE constexpr ScatterColumns(const WaveMatrix& matrix, const DenseBlock& block)
      : WaveMatrix(matrix),
        steps(CountBits(matrix.states) * block.units / 16),
        loads((block.blocks * block.units / 16 + block.warps - 1) / block.warps),
        tile_registers(steps * 4),
        shared_bytes((loads - matrix.register_chunks) * tile_registers * 4 *
                     block.product_threads) {}

  int steps;           // of 16 states
  int loads;           // tiles of a warp
  int tile_registers;  // of a lane
  int shared_bytes;
};

struct WaveScatterConfig {
  WaveConfig wave;  // its block's loads_ahead are those of a pointwise thread
};

struct WaveScatterSizes : DenseBlock {
  JAXSPARSE_INLINE explicit constexpr WaveScatterSizes(const WaveScatterConfig& config)
      : DenseBlock(config.wave.block),
        own(config.wave.own, *this),
        below(config.wave.below, *this),
        skip(config.wave.skip),
        means(config.wave, *this) {}

  ScatterColumns own, below;
  WaveSkip skip;    // none, as the plan has it
  WaveMeans means;  // the same

  int unit_tiles = units / 16;
  int all_tiles = blocks * unit_tiles;  // of a layer
  // 16 bytes hold sums of 2 units for 4 batch entries. A warp takes those of a tile of units and
  // of such a quarter of two tiles of the batch at a time: each lane receives every fourth block's.
  int together = batch > 8 ? 2 : 1;  // tiles of the batch
  int pairs = Ceil(batch, 16);
  int quarters = Ceil(batch, 4);
  int mailbox_loads = Ceil(blocks, 4);  // of a lane
  int portions = unit_tiles * quarters;
  // From round to round all pointwise warps go on by as many tiles of units, and then by as many
  // quarters.
  int tiles_beside = TilesBeside();  // that warps take in a round
  int quarters_beside = pointwise_warps / tiles_beside;
  int tile_rounds = unit_tiles / tiles_beside;
  int rounds = RoundsBy(tiles_beside);
  // Cells of a lane: in each round two neighbouring units of a batch entry, read and written
  // together if their number divides that of the layer's.
  int cells = 2 * rounds;
  int near = hidden % 2 == 0 ? 2 : 1;
  bool has_all_units = hidden % units == 0;  // all cells' units and batch entries are real ones
  bool has_all_entries =
      batch % 4 == 0 && (quarters < quarters_beside || quarters % quarters_beside == 0);
  JAXSPARSE_INLINE constexpr int EntryFromFirst(int cell) const {
    return cell / 2 / tile_rounds * quarters_beside * 4;
  }
  JAXSPARSE_INLINE constexpr int UnitFromFirst(int cell) const {
    return cell / 2 % tile_rounds * tiles_beside * 16 + cell % 2;
  }
  // A pointwise warp without a portion has no data to wait for, and would run ahead: it leaves.
  int meeting_threads =
      product_threads +
      tiles_beside * (quarters < quarters_beside ? quarters : quarters_beside) * kWarp;
  int mailbox_ahead = loads_ahead == 0 || loads_ahead > rounds* mailbox_loads
                          ? rounds * mailbox_loads
                          : loads_ahead;
  // A warp without tiles of its own layer's sums has nothing that keeps it from falling behind.
  bool has_idle_warps = all_tiles < warps;
  bool has_whole_tiles = units % 16 == 0 && own.loads <= kWarp;

  // The exchange buffer of a scan: slots for sums of the layer itself, slots for those of the layer
  // below, and how far each block has come. [tile of units][quarter][from block][2 units]
  static constexpr int kOwnSlots = 2, kBelowSlots = 4;
  int slot_words = all_tiles * quarters * blocks * 8;  // of 16 bytes
  int below_at = kOwnSlots * slot_words;
  int progress_at = below_at + kBelowSlots * slot_words;
  int64_t exchange_bytes = int64_t{16} * progress_at + 4 * Ceil(blocks, 4) * 4;

  // Shared memory: a flag, states of a few steps, weights.
  static constexpr int kStateBuffers = 4;
  int state_size = state_parts * units * pairs * 16;  // elements of a step
  int states_at = 16;
  int weights_at = states_at + kStateBuffers * state_size * state_bytes;
  int below_weights_at = weights_at + own.shared_bytes;
  int shared_bytes = below_weights_at + below.shared_bytes;

  // Registers of a product thread for all but weights, and of a pointwise one for what it receives.
  int most_steps = own.steps > below.steps ? own.steps : below.steps;
  int other_registers = 44 + 8 * together + 2 * together * most_steps;
  int mailbox_registers = 4 * mailbox_ahead + 8 * rounds;

 private:
  JAXSPARSE_INLINE constexpr int RoundsBy(int tiles) const {
    return unit_tiles / tiles * Ceil(quarters, pointwise_warps / tiles);
  }
  JAXSPARSE_INLINE constexpr int TilesBeside() const {
    int best = 1;
    for (int tiles = 2; tiles <= unit_tiles && tiles <= pointwise_warps; ++tiles) {
      if (unit_tiles % tiles == 0 && RoundsBy(tiles) <= RoundsBy(best)) best = tiles;
    }
    return best;
  }
};

}  // namespace jaxsparse
