// How the product by a packed matrix on tensor cores of warpgroups is configured, by the host, for
// the device.
#pragma once

#include "cuda/pipeline.h"
#include "cuda/tensor_map.h"
#include "packed/kernels/lane_streams.h"

namespace jaxsparse {

// As many blocks as a cluster may have on every GPU.
constexpr int kMostBlocksOfCluster = 8;

struct PackedWgmmaConfig {
  PackedNumbers numbers = PackedNumbers::kPlain;
  int cell = 1;
  int columns = 8;  // of x, of a tile: 8, 16, 32 or 64
  int ranges = 1;   // of columns of the matrix that a block multiplies, a part each: 1, 2 or 4
  bool x_on_left = false;

  static constexpr int warps = 16;  // that multiply, a strip of a range each

  constexpr int Strips() const { return warps / ranges; }
  // Whether warps that copy leave registers to those that multiply, for most sums: 16 warps
  // of 104 and 4 of 64 have as many as 20 of 96.
  constexpr bool SharesRegisters() const { return columns > 32; }
  static constexpr int kRegisters = 96, kConsumerRegisters = 104, kProducerRegisters = 64;
  static constexpr int kSharing = warps * (kConsumerRegisters - kRegisters) /
                                  (kRegisters - kProducerRegisters);  // warps that leave some
  // That copy, one for each range; others only leave registers.
  constexpr int Producers() const { return SharesRegisters() ? kSharing : ranges; }
  constexpr int Threads() const { return (warps + Producers()) * kWarp; }
  constexpr int TileRows() const { return Strips() * kPackedStripRows; }
  // Whether blocks that are no clusters make one tile after another, while words of the next one
  // come.
  constexpr bool MakesMoreTiles() const { return columns <= 32; }
  // Fragments that are made while tensor cores read as many others: all that registers have room
  // for.
  constexpr int Fragments() const { return columns <= 16 ? 4 : 2; }
  // Panels whose words and masks may be under way or in use, and whose x may; and rows of words of
  // a strip, as many as there is room for.
  constexpr int Turns() const { return cell == 1 ? 4 : columns <= 16 ? 8 : 6; }
  constexpr int Stages() const {
    return ranges * columns <= 32 ? 4 : ranges * columns <= 64 ? 3 : 2;
  }
  constexpr int RingRows() const {
    return ((kSharedBytes - XBytes() - BarriersBytes()) / warps - TurnsBytes() - SumsBytes()) /
               kPackedRowBytes -
           kPackedMirroredRows;
  }
  // Whether a ring has room for what a panel may need: a stream may be as many rows behind, and
  // PadTo counts modulo the ring.
  constexpr bool HasRoom() const { return RingRows() > kPackedPanelPairs + kPackedDrift; }

  // Of shared memory, in bytes: panels of x of each range; of each warp a ring, masks, rows that
  // panels need and leave free, and sums; barriers.
  static constexpr int kSharedBytes = 227 << 10;  // that a block may have
  constexpr int PanelBytes() const { return columns * kPackedPanelColumns * 2; }
  // Tiles of x, of which a panel has one or two: lines of so many numbers. Those of few numbers
  // take long to be copied as tiles, so lanes copy vectors of them.
  constexpr bool IsForTiles() const { return XWidth() >= 32; }
  constexpr int XLines() const { return x_on_left ? columns : kPackedPanelColumns; }
  constexpr int XWidth() const { return x_on_left ? 64 : columns; }
  constexpr int XBytes() const { return ranges * Stages() * PanelBytes(); }
  constexpr int MasksAt() const { return PackedRingBytes(RingRows()); }
  constexpr int NeededAt() const { return MasksAt() + Turns() * PackedMasksBytes(cell); }
  constexpr int FreeAt() const { return NeededAt() + Turns() * 4; }
  constexpr int TurnsBytes() const { return Turns() * (PackedMasksBytes(cell) + 8); }
  // Sums, which have room of their own unless a block has one tile alone and is through with words.
  constexpr int SumsBytes() const { return MakesMoreTiles() ? columns / 8 * kPackedSumsBytes : 0; }
  constexpr int SumsAt() const { return MakesMoreTiles() ? MasksAt() + TurnsBytes() : 0; }
  constexpr int WarpBytes() const { return MasksAt() + TurnsBytes() + SumsBytes(); }
  constexpr int BarriersAt() const { return XBytes() + warps * WarpBytes(); }
  constexpr int BarriersBytesOfRange() const {
    return (Turns() + Stages()) * kPipelineBarrierBytes;
  }
  constexpr int BarriersBytes() const { return ranges * BarriersBytesOfRange(); }
  constexpr int SharedBytes() const { return BarriersAt() + BarriersBytes(); }
};

struct PackedWgmmaProblem : PackedProblem {
  TensorMap tiles_of_x = {};  // where x is copied by tiles (CopiesTiles)
};

// Whether tiles of x are copied by one instruction each. Else lanes copy numbers one by one, if the
// kernel is for tiles. A single column is one line; it needs no multiple of 16 bytes.
JAXSPARSE_INLINE bool CopiesTiles(const PackedProblem& p, const PackedWgmmaConfig& config) {
  constexpr int kChunk = 16;  // bytes
  const int64_t pitch = config.x_on_left ? p.k : p.n;
  return config.IsForTiles() && p.k > 0 && (p.n == 1 || pitch * 2 % kChunk == 0) &&
         reinterpret_cast<uint64_t>(p.x.data) % kChunk == 0;
}

}  // namespace jaxsparse
