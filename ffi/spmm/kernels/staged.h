// How the staged kernel of the sparse-dense product is configured, by the host, for the device.
#pragma once

#include "cuda/panel_pipeline.h"

namespace jaxsparse {

struct SpmmStagedConfig {
  int lanes = 8;  // that read a row of x, 16 bytes each
  int rows = 1;   // of a warp, at most
  int panel = 0;  // rows of x
  int stages = 3;
  int warps = 16;
  bool prefetched = false;  // entries are brought nearer before they are loaded
  bool permuted = false;    // a permutation tells where values stand

  constexpr int RowBytes() const { return lanes * 16; }  // of x, for a tile
  constexpr int TileRows() const { return warps * rows; }
  // Of shared memory: the pipeline of panels of x, then two buffers of entries for each warp, then
  // the counters of each stage.
  constexpr int BuffersAt() const { return stages * panel * RowBytes(); }
  static constexpr int BufferBytes() { return kWarp * 8; }
  constexpr int CountersAt() const { return BuffersAt() + warps * 2 * BufferBytes(); }
  constexpr int SharedBytes() const { return CountersAt() + stages * kPanelCounterBytes; }
};

}  // namespace jaxsparse
