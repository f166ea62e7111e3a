// How the tiled kernel of the sampled dense-dense product is configured, by the host, for the
// device.
#pragma once

#include "sddmm/problem.h"

namespace jaxsparse {

constexpr int kSddmmTiledThreads = 128;  // of a block

struct SddmmTiledConfig {
  int lanes = 1;          // of a group, which takes an entry
  int vector = 1;         // elements of a vector access, up to 16 bytes
  int vectors = 1;        // of a lane, at a time
  int chunks = 1;         // of 32 entries of a warp
  int sharing = 1;        // warps that share 32 entries
  bool own_rows = false;  // each entry loads its own row of x
  bool whole = false;     // all of a row is loaded at a time
  bool scaled = false;    // sums are multiplied by scale_by
  bool balanced = true;   // warps own equally many entries, whatever rows they are of
  bool batched = false;

  constexpr int PartSize() const { return lanes * vector * vectors; }  // of a row, at a time
  // Entries of a group that a warp takes.
  constexpr int EntriesOfGroup() const { return lanes / sharing; }
  // Registers of a lane's vectors.
  constexpr int Registers(int element_bytes) const {
    const int vector_bytes = vector * element_bytes;
    return vectors * (vector_bytes < 4 ? 1 : vector_bytes / 4);
  }
  // Occupancy: blocks that a multiprocessor runs at once.
  constexpr int BlocksPerSm(int element_bytes) const {
    const int registers = Registers(element_bytes);
    return registers > 8 ? 6 : registers > 4 ? 7 : 9;
  }
  // Entries of a group that are loaded at once: their rows of y, and as many of x if each entry
  // loads its own.
  constexpr int EntriesInFlight(int element_bytes) const {
    constexpr int kRegistersInFlight = 32;
    const int registers = Registers(element_bytes) * (own_rows ? 2 : 1);
    int entries = 1;  // a power of 2, as the entries of a group are
    while (2 * entries * registers <= kRegistersInFlight) entries *= 2;
    return entries;
  }
};

}  // namespace jaxsparse
