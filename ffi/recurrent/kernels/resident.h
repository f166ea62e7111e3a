// How a recurrent scan that one block makes, or a few, is divided among warps and lanes: for the
// plan and for the kernel (resident.cu).
#pragma once

#include "types.h"

namespace jaxsparse {

struct ResidentConfig {
  int products = 1;                  // of the step
  int state_parts = 1;               // of the step
  int state_bytes = 2;               // of an element
  int hidden = 1;                    // h
  int batch = 1;                     // of a block
  int unit_groups = 1;               // of a warp, 8 units each
  int steps_ahead = 4;               // that inputs are asked for; an even number
  int blocks = 1;                    // of a scan, each with its share of the units
  int register_chunks = kAllChunks;  // chunks of columns whose weights stay in registers; the
                                     // others' are read from shared memory in every step
  int resident = 1;                  // blocks that share a multiprocessor

  static constexpr int kAllChunks = 1 << 20;
};

struct ResidentSizes : ResidentConfig {
  JAXSPARSE_INLINE explicit constexpr ResidentSizes(const ResidentConfig& config)
      : ResidentConfig(config) {}

  int warp_units = 8 * unit_groups;
  int block_units = Ceil(Ceil(hidden, blocks), warp_units) * warp_units;
  int part = blocks * block_units;  // of the state
  int columns = state_parts * part;
  int warps = block_units / warp_units;
  int threads = warps * kWarp;

  // A warp has its units with all gates of each. They come in groups of 8 rows, all gates of 8
  // units and then all of 8 others; a tensor core's tile is two such groups. So lane g * 4 + q
  // has all products of units g, for columns 2 q and 2 q + 1 of the tensor core's 8.
  int row_tiles = Ceil(unit_groups * products, 2);
  int batch_tiles = Ceil(batch, 8);
  // Up to 4 batch entries lie in even columns, so that lanes have one column each; 1 or 2 of them
  // several times, so that lanes share out the units.
  bool spread = batch <= 4;
  int entry_slots = !spread ? batch_tiles * 8 : batch > 2 ? 4 : batch;
  int spread_groups = spread ? 4 / entry_slots : 1;
  int cells =
      spread ? Ceil(unit_groups, spread_groups) : unit_groups * batch_tiles * 2;  // of a lane
  int chunks = Ceil(columns, 32);  // two k16 steps each
  // Independent sums hide the latency of an mma.
  int tiles = row_tiles * batch_tiles;
  int chains = tiles >= 4 ? 1 : tiles >= 2 ? 2 : chunks > 1 ? 4 : 2;

  // A slot of the state in shared memory is [column / 8][b][column % 8]. The distance between
  // groups of columns makes the lanes of a load read different banks.
  int group_distance =
      entry_slots < 4 ? entry_slots : entry_slots + (spread ? 1 : 2);  // of 16 bytes
  int slot = chunks * 4 * group_distance;                              // of 16 bytes
  int weights_at = 2 * slot;  // one is read while the other is written; of 16 bytes
  int register_part = register_chunks < chunks ? register_chunks : chunks;
  int shared_weights = (chunks - register_part) * 2 * row_tiles * threads;  // of 16 bytes
  int stop_at = weights_at + shared_weights;                                // of 16 bytes
  int shared_bytes = (stop_at + (blocks > 1 ? 1 : 0)) * 16;

  // A slot of the exchange buffer is the same without gaps, of the real batch entries.
  int exchange_slot = blocks > 1 ? columns / 8 * batch : 0;  // of 16 bytes

  // Of a thread: of what it multiplies, beside weights that stay; and for all else but cells.
  int operand_registers =
      4 * batch_tiles * (chunks < 4 ? chunks : 4) + (register_part < chunks ? 8 * row_tiles : 0);
  int other_registers = 40 + 4 * tiles * chains + (blocks > 1 ? 32 : 0);

  // Unit g of group u of a warp is the warp's unit g * unit_groups + u. So the cells that a lane
  // has in all groups, of one batch entry, are neighbouring units, which it reads and writes
  // together.
  int near = !spread && hidden % unit_groups == 0 ? unit_groups : 1;

  // Where a lane's cells lie, from its first one on: neighbouring units one after the other.
  JAXSPARSE_INLINE constexpr int ColumnFromFirst(int cell) const {
    return spread ? 0 : cell / unit_groups;
  }
  JAXSPARSE_INLINE constexpr int EntryFromFirst(int cell) const {
    return ColumnFromFirst(cell) / 2 * 8 + ColumnFromFirst(cell) % 2;
  }
  JAXSPARSE_INLINE constexpr int UnitFromFirst(int cell) const {
    return spread ? cell * spread_groups : cell % unit_groups;
  }

 private:
  JAXSPARSE_INLINE static constexpr int Ceil(int a, int b) { return (a + b - 1) / b; }
};

}  // namespace jaxsparse
