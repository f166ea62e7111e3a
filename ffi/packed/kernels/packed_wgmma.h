// How the product by a packed matrix on tensor cores of warpgroups is configured, by the host, for
// the device.
#pragma once

#include "cuda/pipeline.h"
#include "packed/kernels/lane_streams.h"

namespace jaxsparse {

// As many parts as a cluster may have blocks on every GPU.
constexpr int kMostPartsOfCluster = 8;

struct PackedWgmmaConfig {
  PackedNumbers numbers = PackedNumbers::kPlain;
  int cell = 1;
  int columns = 8;  // of x, of a tile: 8, 16, 32 or 64
  bool x_on_left = false;

  static constexpr int warps = 8;           // that multiply, a strip each
  static constexpr int kWordProducers = 2;  // warps that have words and masks copied
  static constexpr int kXProducers = 2;     // warps that copy x, panels in turn
  static constexpr int kTurns = 4;          // of words and masks under way

  constexpr int Threads() const { return (warps + kWordProducers + kXProducers) * kWarp; }
  constexpr int TileRows() const { return warps * kPackedStripRows; }
  // Panels of x, and rows of words: as many as there is room for.
  constexpr int Stages() const { return columns <= 16 ? 4 : columns == 32 ? 3 : 2; }
  constexpr int RingRows() const {
    return columns <= 8 ? 176 : columns == 16 ? 160 : columns == 32 ? 144 : 128;
  }

  // Of shared memory, in bytes: rings and masks of each warp, panels of x, what producers say of
  // words, barriers.
  constexpr int MasksAt() const { return warps * PackedRingBytes(RingRows()); }
  constexpr int PanelsAt() const { return MasksAt() + warps * kTurns * PackedMasksBytes(cell); }
  constexpr int PanelBytes() const { return columns * kPackedPanelColumns * 2; }
  constexpr int NotesAt() const { return PanelsAt() + Stages() * PanelBytes(); }
  constexpr int BarriersAt() const { return NotesAt() + kTurns * warps * 8; }
  constexpr int SharedBytes() const {
    return BarriersAt() + (kTurns + Stages()) * kPipelineBarrierBytes;
  }
};

}  // namespace jaxsparse
