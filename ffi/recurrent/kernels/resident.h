// How a recurrent scan that one block makes is divided among its warps and lanes, for the plan and
// for the kernel (resident.cu).
#pragma once

#include "types.h"

namespace jaxsparse {

struct ResidentConfig {
  int products = 1;     // of the step
  int state_parts = 1;  // of the step
  int state_bytes = 2;  // of an element
  int hidden = 1;       // h
  int batch = 1;        // of a block
};

struct ResidentSizes : ResidentConfig {
  JAXSPARSE_INLINE explicit constexpr ResidentSizes(const ResidentConfig& config)
      : ResidentConfig(config) {}

  int blocks = 1;                  // of a scan
  int part = Ceil(hidden, 8) * 8;  // of the state
  int columns = state_parts * part;

  // A warp has 8 units with all gates of each: row u of a tile is a gate of unit u, row u + 8 the
  // next gate. So a lane has all products of a unit, for 2 batch entries of each tile of 8. Of up
  // to 4 batch entries lanes hand on the second one, since the cell's special functions take as
  // long for a few lanes as for all.
  int warps = part / 8;
  int threads = warps * kWarp;
  int row_tiles = Ceil(products, 2);
  int batch_tiles = Ceil(batch, 8);
  bool handed_on = batch <= 4;
  int cells = handed_on ? 1 : batch_tiles * 2;  // of a lane
  int chunks = Ceil(columns, 32);               // two k16 steps each
  // Independent sums hide the latency of an mma.
  int tiles = row_tiles * batch_tiles;
  int chains = tiles >= 4 ? 1 : tiles >= 2 ? 2 : chunks > 1 ? 4 : 2;

  // A slot of the state in shared memory is [column / 8][b][column % 8]. The distance between
  // groups of columns makes the lanes of a load read different banks.
  int group_distance = batch_tiles * 8 + 2;  // of 16 bytes
  int slot = chunks * 4 * group_distance;    // of 16 bytes
  int shared_bytes = 2 * slot * 16;          // one is read while the other is written

  // Of a thread.
  int weight_registers = chunks * 2 * row_tiles * 4;
  int other_registers = 40 + 4 * tiles * chains + 4 * batch_tiles * (chunks < 4 ? chunks : 4);

 private:
  JAXSPARSE_INLINE static constexpr int Ceil(int a, int b) { return (a + b - 1) / b; }
};

}  // namespace jaxsparse
