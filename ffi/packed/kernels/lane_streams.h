// Sizes of what streams of lanes pass through in shared memory (packed/kernels/lane_streams.cuh),
// for host and device.
#pragma once

#include "packed/problem.h"

namespace jaxsparse {

constexpr int kPackedTurns = 4;       // of bulk copies, that may be under way
constexpr int kPackedRingRows = 128;  // of words, at least: more than any panel reads, and some

// Behind the end of the ring stand copies of its first rows, which four fragments may read there.
constexpr int kPackedMirroredRows = 16;

// Of a warp, in bytes: a ring; the masks of a panel; sums; barriers for bulk copies.
constexpr int PackedRingBytes(int rows = kPackedRingRows) {
  return (rows + kPackedMirroredRows) * kPackedRowBytes;
}
constexpr int PackedMasksBytes(int cell) { return kPackedPanelMasks / cell * kPackedRowBytes; }
constexpr int kPackedSumsBytes = kWarp * 16;  // of 8 columns
constexpr int PackedBarriersBytes(bool bulk) { return bulk ? kPackedTurns * 8 : 0; }

}  // namespace jaxsparse
