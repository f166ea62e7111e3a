// Sizes of what streams of lanes pass through in shared memory (packed/kernels/lane_streams.cuh),
// for host and device.
#pragma once

#include "packed/problem.h"

namespace jaxsparse {

constexpr int kPackedTurns = 4;       // of bulk copies, that may be under way
constexpr int kPackedRingRows = 128;  // of words: more than any panel reads, and what comes next

// Of a warp, in bytes: the ring, behind whose end copies of its first rows stand, which a step may
// read there; the masks of a panel; barriers for bulk copies.
constexpr int PackedMirroredRows(int cell) { return 16 * cell; }
constexpr int PackedRingBytes(int cell) {
  return (kPackedRingRows + PackedMirroredRows(cell)) * kPackedRowBytes;
}
constexpr int PackedMasksBytes(int cell) { return kPackedPanelMasks / cell * kPackedRowBytes; }
constexpr int PackedBarriersBytes(bool bulk) { return bulk ? kPackedTurns * 8 : 0; }

}  // namespace jaxsparse
