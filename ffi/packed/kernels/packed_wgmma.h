// How the product by a packed matrix on tensor cores of warpgroups is configured, by the host, for
// the device.
#pragma once

#include "cuda/pipeline.h"
#include "packed/kernels/lane_streams.h"

namespace jaxsparse {

// As many parts as a cluster may have blocks on every GPU.
constexpr int kMostPartsOfCluster = 8;

struct PackedWgmmaConfig {
  int cell = 1;
  int columns = 8;  // of x, of a tile: 8, 16, 32, 64 or 128
  int warps = 16;   // that multiply, a strip each: 8 or 16
  bool x_on_left = false;

  static constexpr int kWordProducers = 2;  // warps that have words and masks copied
  static constexpr int kXProducers = 2;     // warps that copy x, panels in turn
  static constexpr int kTurns = 4;          // of words and masks under way

  // Panels of x, and rows of words: as many as there is room for.
  constexpr int Stages() const { return columns <= (warps == 8 ? 64 : 16) ? 4 : 2; }
  constexpr int RingRows() const { return warps == 8 ? 128 : columns <= 32 ? 80 : 72; }

  // Fragments that are made while tensor cores read as many others: all that registers have room
  // for.
  constexpr int Fragments() const { return warps == 16 && columns > 32 ? 2 : 4; }
  // Of a thread: where there are most sums, producers leave some to those that multiply. Together
  // all have what the block begins with, so many each.
  constexpr bool SharesRegisters() const { return columns > 64; }
  static constexpr int kRegisters = 168, kConsumerRegisters = 208, kProducerRegisters = 88;

  constexpr int Threads() const { return (warps + kWordProducers + kXProducers) * kWarp; }
  constexpr int TileRows() const { return warps * kPackedStripRows; }

  // Of shared memory, in bytes: rings and masks of each warp, stages of x, what producers say of
  // words, barriers.
  constexpr int MasksAt() const { return warps * PackedRingBytes(RingRows()); }
  constexpr int XAt() const { return MasksAt() + warps * kTurns * PackedMasksBytes(cell); }
  constexpr int XBytes() const { return columns * kPackedPanelColumns * 2; }
  constexpr int NotesAt() const { return XAt() + Stages() * XBytes(); }
  constexpr int BarriersAt() const { return NotesAt() + kTurns * warps * 8; }
  constexpr int SharedBytes() const {
    return BarriersAt() + (kTurns + Stages()) * kPipelineBarrierBytes;
  }
};

}  // namespace jaxsparse
