// How the staged kernel of the sampled dense-dense product is configured, by the host, for the
// device.
#pragma once

#include "cuda/panel_pipeline.h"
#include "sddmm/problem.h"

namespace jaxsparse {

constexpr int kSddmmStagedWarps = 16;  // of a block
constexpr int kSddmmStagedThreads = kSddmmStagedWarps * kWarp;

struct SddmmStagedConfig {
  int lanes = 2;    // of a group, which takes an entry
  int vectors = 4;  // of 16 bytes, of a lane
  int rows = 1;     // of a warp
  int panel = 0;    // rows of y
  int stages = 3;
  int parts = 1;  // of the columns

  constexpr int Groups() const { return kWarp / lanes; }
  constexpr int RowBytes() const { return lanes * vectors * 16; }
  constexpr int TileRows() const { return kSddmmStagedWarps * rows; }
  // Of shared memory: the pipeline of panels of y, then the tile's rows of x, then the counters of
  // each stage.
  constexpr int RowsAt() const { return stages * panel * RowBytes(); }
  constexpr int CountersAt() const { return RowsAt() + TileRows() * RowBytes(); }
  constexpr int SharedBytes() const { return CountersAt() + stages * kPanelCounterBytes; }
};

}  // namespace jaxsparse
