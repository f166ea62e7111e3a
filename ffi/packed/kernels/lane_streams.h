// Sizes of what streams of lanes pass through in shared memory (packed/kernels/lane_streams.cuh),
// for host and device.
#pragma once

#include "packed/problem.h"

namespace jaxsparse {

constexpr int kPackedTurns = 4;       // of bulk copies, that may be under way
constexpr int kPackedRingRows = 128;  // of words, at least: more than any panel reads, and some

// So many fragments are made at once. Behind the end of the ring stand copies of its first rows,
// which they may read there.
constexpr int kPackedFragments = 4;
constexpr int kPackedMirroredRows = 4 * kPackedFragments;

// Of a warp, in bytes: a ring; the masks of a panel; barriers for bulk copies.
constexpr int PackedRingBytes(int rows = kPackedRingRows) {
  return (rows + kPackedMirroredRows) * kPackedRowBytes;
}
constexpr int PackedMasksBytes(int cell) { return kPackedPanelMasks / cell * kPackedRowBytes; }
constexpr int PackedBarriersBytes(bool bulk) { return bulk ? kPackedTurns * 8 : 0; }

}  // namespace jaxsparse
