// How the kernel that writes a packed matrix out is configured, by the host, for the device.
#pragma once

#include "packed/kernels/lane_streams.h"

namespace jaxsparse {

struct PackedUnpackConfig {
  PackedNumbers numbers = PackedNumbers::kPlain;
  int cell = 1;
  int warps = 4;
  bool bulk = false;

  static constexpr int kStages = 2;  // of masks
  // A row of a strip's panel, behind which the next one begins in other banks.
  static constexpr int kLineBytes = 2 * kPackedPanelColumns + 16;

  // Of shared memory, in bytes: rings, masks and a panel of each warp's strip, barriers.
  constexpr int MasksAt() const { return warps * PackedRingBytes(); }
  constexpr int PanelsAt() const { return MasksAt() + warps * kStages * PackedMasksBytes(cell); }
  constexpr int PanelBytes() const { return kPackedStripRows * kLineBytes; }
  constexpr int BarriersAt() const { return PanelsAt() + warps * PanelBytes(); }
  constexpr int SharedBytes() const { return BarriersAt() + warps * PackedBarriersBytes(bulk); }
};

// Of matrices packed by gaps: warps of a block, each of which has a panel of so many columns of its
// strip in shared memory, and behind each row so many bytes that lanes of others have other banks.
struct UnpackGapsConfig {
  static constexpr int kWarps = 4, kPanelColumns = 512, kLineBytes = 2 * kPanelColumns + 16;
  static constexpr int kPanelBytes = kGapStripRows * kLineBytes;
  static constexpr int kSharedBytes = kWarps * kPanelBytes;
};

}  // namespace jaxsparse
