// How the product by a packed matrix on tensor cores of single warps is configured, by the host,
// for the device.
#pragma once

#include "packed/kernels/lane_streams.h"

namespace jaxsparse {

struct PackedMmaConfig {
  PackedNumbers numbers = PackedNumbers::kPlain;
  int cell = 1;
  int columns = 8;  // of x, of a tile
  int warps = 8;
  int stages = 3;  // panels of x and of masks
  bool x_on_left = false;
  bool bulk = false;  // words and masks come by bulk copies, which take few instructions

  // Of shared memory, in bytes: rings and masks of each warp, panels of x, barriers.
  constexpr int MasksAt() const { return warps * PackedRingBytes(); }
  constexpr int PanelsAt() const { return MasksAt() + warps * stages * PackedMasksBytes(cell); }
  // A line of x on the left, behind which the next one begins in other banks; else a row.
  constexpr int LineBytes() const { return x_on_left ? 2 * kPackedPanelColumns + 16 : 16; }
  // Rows of 8 columns, behind which those of the next ones begin in other banks.
  constexpr int PlaneBytes() const { return (kPackedPanelColumns + 1) * LineBytes(); }
  constexpr int PanelBytes() const {
    return x_on_left ? columns * LineBytes() : columns / 8 * PlaneBytes();
  }
  constexpr int BarriersAt() const { return PanelsAt() + stages * PanelBytes(); }
  constexpr int SharedBytes() const { return BarriersAt() + warps * PackedBarriersBytes(bulk); }
  constexpr int TileRows() const { return warps * kPackedStripRows; }
};

}  // namespace jaxsparse
