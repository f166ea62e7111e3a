// How words and masks of a range's strips come to shared memory, by a warp that does not multiply,
// and where those that multiply find them.
//
// Each panel has a turn, which brings what the panel reads, x included. It begins as soon as there
// is room for that in the rings of all strips of the range, which are through with panels before
// it. Whatever a pattern says, there is once they are through with the last one of these. Masks of
// some panels, which lie side by side, come at once with the turn of the first one.
#pragma once

#include "cuda/pipeline.cuh"
#include "packed/kernels/lane_streams.cuh"
#include "packed/kernels/packed_wgmma.h"

namespace jaxsparse {

// Where turns of a range leave what, and their barriers.
template <PackedWgmmaConfig kConfig>
class PackedTurns {
  static constexpr int kStrips = kConfig.Strips();
  static constexpr uint32_t kTurns = kConfig.Turns(), kStages = kConfig.Stages();
  // A stream may be as many rows behind as that, and PadTo counts modulo the ring.
  static_assert(kConfig.RingRows() > kPackedPanelPairs + kPackedDrift);
  static_assert(kConfig.WarpBytes() % 16 == 0);
  uint32_t warps_, barriers_;  // addresses

  __device__ __forceinline__ uint64_t* Barrier(uint32_t number) const {
    return &SharedAt<uint64_t>(barriers_ + number * 8);
  }

 public:
  __device__ PackedTurns(uint32_t shared, int range)
      : warps_(shared + kConfig.XBytes() + range * kStrips * kConfig.WarpBytes()),
        barriers_(shared + kConfig.BarriersAt() + range * kConfig.BarriersBytesOfRange()) {}

  // By one thread, before FenceShared and a barrier of the range. Of each strip a lane asks for
  // words, and one for x.
  __device__ void Init() const {
    for (uint32_t panel = 0; panel < kTurns; ++panel) TurnOf(panel).Init(kStrips + 1, kStrips);
    for (uint32_t stage = 0; stage < kStages; ++stage) InitBarrier(EmptyX(stage), kStrips);
  }
  __device__ __forceinline__ PipelineStage TurnOf(uint32_t panel) const {
    const auto at = PipelineState<kTurns>::Of(panel);
    return {Barrier(at.stage), Barrier(kTurns + at.stage), at.phase};
  }
  // Where it is known that a stage of x has been read.
  __device__ __forceinline__ uint64_t* EmptyX(uint32_t stage) const {
    return Barrier(2 * kTurns + stage);
  }
  // Of a strip of the range.
  __device__ __forceinline__ uint32_t Ring(int strip) const {
    return warps_ + strip * kConfig.WarpBytes();
  }
  __device__ __forceinline__ uint32_t Masks(int strip, uint32_t panel) const {
    return Ring(strip) + kConfig.MasksAt() + panel % kTurns * PackedMasksBytes(kConfig.cell);
  }
  // The row of words up to which a strip reads in a panel.
  __device__ __forceinline__ uint32_t Needed(int strip, uint32_t panel) const {
    return Ring(strip) + kConfig.NeededAt() + panel % kTurns * 4;
  }
};

// A warp that has words and masks copied, of a strip for each lane; where there are fewer strips,
// lanes beyond these know of one, too.
template <PackedWgmmaConfig kConfig>
class PackedWordProducer {
  static constexpr int kRing = kConfig.RingRows(), kMasksBytes = PackedMasksBytes(kConfig.cell);
  static constexpr uint32_t kTurns = kConfig.Turns(), kMasksAtOnce = kTurns / 2;  // of panels
  const PackedTurns<kConfig>& turns_;
  PackedPiece piece_;
  uint32_t asked_ = 0;                   // rows
  uint32_t through_ = 0;                 // so many panels all strips are known to be
  uint32_t free_ = 0, next_free_, end_;  // rows that are then free, and those of the next turn

  __device__ __forceinline__ uint32_t FreeBehind(uint32_t panels) const {
    return panels < piece_.panel_count ? piece_.panels[panels].x : 0;
  }
  __device__ __forceinline__ uint32_t EndOf(uint32_t panel) const {
    return panel < piece_.panel_count ? piece_.panels[panel].y : 0;
  }

 public:
  __device__ PackedWordProducer(const PackedTurns<kConfig>& turns, const PackedPiece& piece)
      : turns_(turns), piece_(piece), next_free_(FreeBehind(1)), end_(EndOf(0)) {}

  __device__ __forceinline__ void Turn(uint32_t panel) {
    const uint32_t next_end = EndOf(panel + 1);
    uint32_t masks = 0;  // of so many panels
    if (panel % kMasksAtOnce == 0) {
      const uint32_t left = piece_.panel_count - panel;
      masks = left < kMasksAtOnce ? left : kMasksAtOnce;
    }
    // Until there is room for the masks, what else is under way, and words.
    const uint32_t least = panel + (masks > 0 ? masks : 1);
#pragma unroll 1
    while (through_ < panel &&
           (through_ + kTurns < least || __any_sync(kAllLanes, end_ > free_ + kRing))) {
      const PipelineStage before = turns_.TurnOf(through_);
      WaitForPhase(before.empty, before.phase);
      free_ = next_free_;
      next_free_ = FreeBehind(++through_ + 1);
    }
    const int strip = static_cast<int>(threadIdx.x % kWarp);
    if (strip < kConfig.Strips()) {
      const PackedBulkRows<kRing> rows(piece_, asked_, end_);
      asked_ = rows.End();
      SharedAt<uint32_t>(turns_.Needed(strip, panel)) = end_;
      const PipelineStage turn = turns_.TurnOf(panel);
      turn.Expect(rows.Bytes() + masks * kMasksBytes);
      rows.Copy(piece_, turns_.Ring(strip), turn.full);
      if (masks > 0) {
        BulkCopy(&SharedAt<char>(turns_.Masks(strip, panel)),
                 reinterpret_cast<const unsigned char*>(piece_.masks) +
                     static_cast<int64_t>(panel) * kMasksBytes,
                 masks * kMasksBytes, turn.full);
      }
    }
    __syncwarp();
    end_ = next_end;
  }
};

}  // namespace jaxsparse
