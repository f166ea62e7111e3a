// How a team of blocks, each on a multiprocessor of its own, divides one copy of the weights. Block
// j owns `units` units: all rows of the matrix that lead to these, of each kind's matrix, so that
// what belongs to a unit stays with its block. The host plans with what is here, and the kernels
// take their sizes from it.
#pragma once

#include "types.h"

namespace jaxsparse {

// What a kernel is compiled for, beside the types of the state and the weights.
struct TeamConfig {
  int row_parts = 1;        // of the matrix: products of a cell, or slots of its children
  int column_parts = 1;     // of the matrix, the other way round
  int kinds = 1;            // of rows, which have a matrix each
  int state_bytes = 2;      // of an element
  int hidden = 8;           // h
  int units = 8;            // of a block, a multiple of 8
  int warps = 8;            // that make products; the columns are split over them
  int pointwise_warps = 4;  // that make the pointwise step
  int sets = 1;             // of pointwise warps, which take tiles in turn
  int carries = 0;          // of a row: where rows gather
  int sum_warps = 0;  // that sum the parts of products, if pointwise warps don't: where rows emit
  int beside_warps = 0;  // of the launch, that have no part in this pass
  int passed = 0;        // values of a unit that pointwise warps pass to these: carries for sources
  int window = 0;        // tiles whose carries or sums lie in shared memory: a power of 2, or 0
  // Bytes from the window to what else the pass has in shared memory, if it takes the place of what
  // another pass is done with.
  int window_before = 0;
  int stages = 4;               // of the ring between warps
  int register_chunks = 0;      // chunks of columns of a warp whose weights, of every kind, stay in
                                // registers; the others' are read from shared memory for every tile
  bool asks_ahead = false;      // for a tile's states before the products of the last one
  int product_registers = 0;    // of a product thread, or 0 for an equal share; if not 0, all
                                // numbers of warps have to be multiples of 4
  int pointwise_registers = 0;  // the same of the others
  int sum_registers = 0;
};

struct TeamSizes : TeamConfig {
  JAXSPARSE_INLINE explicit constexpr TeamSizes(const TeamConfig& config) : TeamConfig(config) {}

  int blocks = Ceil(hidden, units);  // of a team
  int rows = row_parts * units;      // of the matrix, of a block
  int part = hidden;                 // columns of the matrix that belong together
  int columns = column_parts * part;

  // A load of a lane is 16 bytes of a row of states; four lanes share a row.
  bool tensor_cores = state_bytes == 2;  // or FMA
  int states_per_load = 16 / state_bytes;
  int load_columns = 4 * states_per_load;
  int chunks = Ceil(columns, load_columns);
  int loads = Ceil(chunks, warps);  // of a lane

  // Tensor cores take rows in tiles of 16, and what a load brings as two k16 steps.
  int row_tiles = Ceil(rows, 16);
  int chains = row_tiles >= 4 ? 1 : 2;  // independent sums, which hide the latency of an mma

  // FMA: groups of lanes that share a warp's columns, each with its own rows; rows of a tile that
  // are multiplied together. A warp's states lie in shared memory, 16 bytes for each row of the
  // tile and group of columns.
  int row_groups = 4, batch_tile = 2;
  int group_lanes = kWarp / row_groups;
  int lane_rows = Ceil(rows, row_groups);
  int group_distance = 8 | 1;
  int warp_states = tensor_cores ? 0 : loads * 4 * group_distance;

  int product_threads = warps * kWarp;
  int pointwise_threads = pointwise_warps * kWarp;
  int set_warps = pointwise_warps / sets;
  int set_threads = set_warps * kWarp;
  int sum_threads = sum_warps * kWarp;
  int threads = product_threads + pointwise_threads + sum_threads;
  int items = Ceil(units * 8, set_threads);  // units and rows of a tile, of a thread
  // Of a thread that sums: a unit and a slot, each for two rows of a tile.
  int sum_turns = sum_warps > 0 ? Ceil(units, (row_parts > 1 ? 4 : 8) * sum_warps) : 0;
  int sum_items = sum_turns * Ceil(row_parts, 2);

  // Shared memory: the ring's parts of products, of each warp (row of the matrix, row of the tile),
  // and what is passed beside them; two barriers for each stage; barriers of tiles whose carries
  // are there; a flag; weights; states of warps; carries of the nearest tiles, or what has come to
  // their rows.
  int warp_part = row_tiles * 16 * 8;
  int passed_at = warps * warp_part;
  int partials = passed_at + passed * units * 8;
  int barriers_at = stages * partials * 4;
  int made_at = barriers_at + stages * 16;
  int made = carries > 0 ? PowerOfTwo(Unproven() + stages) : 0;
  int flag_at = made_at + made * 8;
  int weights_at = Ceil(flag_at + 4, 16) * 16;
  // Of a lane, for the weights of a chunk: a load's columns, or a group of lanes' for FMA.
  int weight_chunks = tensor_cores ? loads : Ceil(loads * 4, group_lanes);
  int chunk_registers = tensor_cores ? row_tiles * 8 : lane_rows * 4;
  int chunk_bytes = chunk_registers * 4 * product_threads;
  int kind_bytes = (weight_chunks - register_chunks) * chunk_bytes;
  int states_at = weights_at + kinds * kind_bytes;
  int own_bytes = states_at + warps * warp_states * 16;
  int window_at = window_before > 0 ? -window_before : own_bytes;
  int tile_values = (sum_warps > 0 ? 1 + passed / row_parts : carries) * units * 8;
  int window_bytes = window * tile_values * 4;
  int shared_bytes = own_bytes + (window_before > 0 ? 0 : window_bytes);

  // Registers of a product thread for all but the weights that it keeps. Where rows emit and it
  // asks ahead, what it needs, and else more.
  int other_registers = (sum_warps > 0 ? asks_ahead ? 16 : 28
                         : asks_ahead  ? 52
                                       : 48) +
                        (asks_ahead ? 8 : 4) * loads +
                        (tensor_cores ? 4 * row_tiles * chains : (lane_rows + 4) * batch_tile);

  // The same for all threads: each quarter of a multiprocessor has 512 for every lane of its warps.
  int all_warps = warps + pointwise_warps + sum_warps + beside_warps;
  int all_threads = all_warps * kWarp;
  int thread_registers = 512 / ((all_warps + 3) / 4) / 8 * 8;

  // Where rows gather: how many tiles before its own one may be whose carries are not proved to be
  // written when a set begins with its tile (carry_window.cuh).
  JAXSPARSE_INLINE constexpr int Unproven() const { return stages + 2 * sets - 1; }
  // The smallest window by which either pass is right (carry_window.cuh, sum_window.cuh).
  JAXSPARSE_INLINE constexpr int LeastWindow() const {
    return PowerOfTwo(sum_warps > 0 ? stages + sets + 1 : Unproven() + sets + stages);
  }

 private:
  JAXSPARSE_INLINE static constexpr int PowerOfTwo(int least) {
    int power = 1;
    while (power < least) power *= 2;
    return power;
  }
  JAXSPARSE_INLINE static constexpr int Ceil(int a, int b) { return (a + b - 1) / b; }
};

}  // namespace jaxsparse
