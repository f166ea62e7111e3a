// How a dense recurrent scan is divided among blocks, warps and lanes. The host plans with what is
// here, and the kernels take their sizes from it. All are known at compile time, because what lies
// in registers has to.
#pragma once

#include "types.h"

namespace jaxsparse {

// What a kernel is compiled for, beside the types of the state and the weights.
struct DenseConfig {
  int products = 1;             // of the step, as many as gates in a forward pass
  int state_parts = 1;          // of the step
  int state_bytes = 4;          // of an element
  int hidden = 1;               // h
  int batch = 1;                // B
  int units = 4;                // of a block, all gates of each; even where states have 16 bits
  int warps = 1;                // that make products; the columns (s, k) are split over them
  int pointwise_warps = 1;      // that sum the warps' parts and make the pointwise step
  bool tensor_cores = false;    // mma.sync (16 bits only), or FMA
  bool warpgroups = false;      // tensor cores of whole warpgroups, wgmma, instead of mma.sync
  int column_parts = 0;         // that the columns are split into, or 0: one for each warp, or as
                                // many as warpgroups leave of the batch
  int register_chunks = 0;      // chunks of columns of a warp whose weights stay in registers; the
                                // others' are read from shared memory in every step
  int loads_ahead = 0;          // tensor cores: loads of a warp that are on their way at once, or 0
                                // for all of a step; fewer leave registers to weights
  int product_registers = 0;    // of a product thread, or 0 for an equal share; if not 0, both
                                // numbers of warps have to be multiples of 4
  int pointwise_registers = 0;  // the same of a pointwise thread
  int groups_beside = 1;  // groups of states_per_load units that a pointwise warp takes side by
                          // side, so that it writes results in longer pieces
  int row_groups = 4;  // FMA: groups of lanes that share a warp's columns, each with its own rows
  int batch_tile = 1;  // FMA: batch entries that are summed at a time
  int resident = 1;    // blocks that share a multiprocessor
};

// Registers that each of a block's threads gets if all get the same. Each quarter of a
// multiprocessor has 512 for every lane of its warps.
JAXSPARSE_INLINE constexpr int EqualRegisters(int warps, int resident) {
  return 512 / (resident * ((warps + 3) / 4)) / 8 * 8;
}

// What does not depend on which columns a block's product warps take.
struct DenseBlock : DenseConfig {
  JAXSPARSE_INLINE explicit constexpr DenseBlock(const DenseConfig& config) : DenseConfig(config) {}

  int rows = products * units;
  int states_per_load = 16 / state_bytes;

  // The batch in tiles of a tensor core's 8 columns.
  int tile_batch = batch > 4 ? 8 : batch > 2 ? 4 : 2;
  int batch_tiles = Ceil(batch, 8);
  int batch_slots = batch_tiles * tile_batch;

  // A slot of the exchange buffer is [column / states_per_load][b][column % states_per_load]: what
  // a block publishes lies together, so that its stores cover whole sectors and few cache lines.
  // Stores of parts of sectors to lines that all blocks poll are slow. A state part is padded to
  // whole groups; the last block publishes zeros there.
  int part = Ceil(hidden, states_per_load) * states_per_load;
  int columns = state_parts * part;
  int blocks = Ceil(part, units);
  int exchange_batch = ExchangeBatch();
  int slot = exchange_batch * columns;

  // Parts of products in shared memory: [part][b][unit][gate], the gates of a unit in one vector.
  // A warp makes one of its columns, a warpgroup the rows of one for 64 batch entries. Four gates
  // are rotated by half the batch entry, so that a tensor core's tile, 8 units by 4 pairs of batch
  // entries, is written to different banks. Batch entries are a vector further apart than their
  // units, so that threads with several units each read different banks, too.
  int gate_slots = products == 3 ? 4 : products;
  int row_parts = Ceil(batch, 64);  // warpgroups: 64 batch entries each
  int parts = column_parts > 0 ? column_parts : warpgroups ? warps / (4 * row_parts) : warps;
  bool rotated = gate_slots == 4 && !warpgroups;
  int row_slots = (rotated      ? Ceil(units, 8) * 32
                   : warpgroups ? Ceil(units * gate_slots, 32) * 32
                                : Ceil(units * gate_slots, 16) * 16) +
                  4;
  int warp_part = batch_slots * row_slots;
  int partials = parts * warp_part;

  int product_threads = warps * kWarp;
  int pointwise_threads = pointwise_warps * kWarp;
  int threads = product_threads + pointwise_threads;
  // How often the product warps meet by themselves, before the first step and in each.
  int first_meetings = 0, meetings = 0;

  // A pointwise thread with several items takes neighbouring units of a batch entry together: its
  // loads and stores are wider then, so that fewer of them are in the way of the product's.
  int near = Near();
  int items = Ceil(Ceil(units * batch_slots, near), pointwise_threads) * near;  // of a thread
  // Batch entries in a row for which neighbouring lanes take one group of units.
  int entries_beside =
      groups_beside == 1 ? batch_slots : kWarp * near / (states_per_load * groups_beside);
  bool has_whole_groups =
      groups_beside == 1 || (units % (states_per_load * groups_beside) == 0 && entries_beside > 0 &&
                             batch_slots % entries_beside == 0);

  // A warp's columns come in chunks, each of one load of a lane.
  int group_lanes = kWarp / row_groups;
  int chunk = tensor_cores ? 32 : group_lanes * states_per_load;  // tensor cores: two k16 steps

  // Tensor cores: tiles of 16 rows. Independent sums hide the latency of an mma.
  int row_tiles = Ceil(rows, 16);
  int chains = row_tiles * batch_tiles >= 4 ? 1 : 2;

  // FMA: the weights of a lane in a chunk, in vectors of 4, and its sums.
  int lane_rows = Ceil(rows, row_groups);
  int vectors = Ceil(lane_rows * states_per_load, 4);
  int sums = lane_rows * batch_tile;
  int chunk_words = tensor_cores ? row_tiles * 2 : vectors;  // of 16 bytes, for a lane
  int chunk_registers = chunk_words * 4;
  int chunk_bytes = chunk_words * product_threads * 16;

  // Shared memory: two buffers of partials (a step's are read while the next one's come), a flag,
  // weights.
  int flag_at = 2 * partials * 4;
  int weights_at = Ceil(flag_at + 4, 16) * 16;

  // A block can redistribute its registers, but not get more: that would wait for ever.
  bool gets_its_registers =
      product_registers == 0 ||
      (warps % 4 == 0 && pointwise_warps % 4 == 0 &&
       warps * product_registers + pointwise_warps * pointwise_registers <=
           (warps + pointwise_warps) * EqualRegisters(warps + pointwise_warps, resident));

 protected:
  JAXSPARSE_INLINE static constexpr int Ceil(int a, int b) { return (a + b - 1) / b; }

 private:
  JAXSPARSE_INLINE constexpr int Near() const {
    const int most = state_bytes == 2 && units % states_per_load == 0 ? states_per_load : 1;
    int near = 1;
    while (2 * near <= most && hidden % (2 * near) == 0 &&
           2 * near <= Ceil(units * batch_slots, pointwise_threads)) {
      near *= 2;
    }
    return near;
  }

  // Batch entries of a slot: padded so that a block's part is whole sectors of 32 bytes.
  JAXSPARSE_INLINE constexpr int ExchangeBatch() const {
    for (int b = batch; tensor_cores && b <= batch_slots; ++b) {
      if (units * b * state_bytes % 32 == 0) return b;
    }
    return batch;
  }
};

// A block of a scan, whose columns are those of its own state.
struct DenseSizes : DenseBlock {
  JAXSPARSE_INLINE explicit constexpr DenseSizes(const DenseConfig& config) : DenseBlock(config) {}

  // A warp without columns has no data to wait for, and would run ahead of the others.
  int chunks = Ceil(columns, chunk);
  int loads = Ceil(chunks, warps);  // chunks of a warp
  bool has_idle_warps = chunks <= (warps - 1) * loads;

  // Tensor cores: loads of a warp that are on their way at once. It multiplies by what has come and
  // asks for more in its place.
  bool all_ahead = loads_ahead == 0 || loads_ahead >= loads;
  int ahead = all_ahead ? loads : loads_ahead;

  // FMA: a warp's part of the state in shared memory, 16 bytes for each group of columns and batch
  // entry. The distance between groups is odd, so that lanes with neighbouring groups read
  // different banks.
  int column_groups = loads * group_lanes;
  int group_distance = exchange_batch | 1;
  int state_words = column_groups * group_distance;

  // Behind the weights lie, of FMA, the warps' parts of the state.
  int weights_bytes = (loads - register_chunks) * chunk_bytes;
  int warp_states_bytes = tensor_cores ? 0 : warps * state_words * 16;
  int shared_bytes = weights_at + weights_bytes + warp_states_bytes;

  // Registers of a product thread for all but the weights that it keeps.
  int other_registers = tensor_cores
                            ? 20 + ahead * 4 * batch_tiles + 4 * row_tiles * batch_tiles * chains +
                                  (all_ahead ? 0 : chunk_registers)
                            : 40 + sums + chunk_registers;
};

}  // namespace jaxsparse
