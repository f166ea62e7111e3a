// How words and masks of a range's strips come to shared memory, by a warp that does not multiply,
// and where those that multiply find them.
//
// Each panel has a turn, which brings what the panel reads, x included. It begins as soon as there
// is room for that in the rings of all strips of the range, which are through with panels before
// it. Whatever a pattern says, there is once they are through with the last one of these. Masks of
// some panels, which lie side by side, come at once with the turn of the first one. Turns, and
// places in rings, go on from one tile's panels to those of the next.
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
  static_assert(kConfig.HasRoom());
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
  // words, and so many threads for x.
  __device__ void Init(uint32_t for_x) const {
    for (uint32_t turn = 0; turn < kTurns; ++turn) TurnOf(turn).Init(kStrips + for_x, kStrips);
    for (uint32_t stage = 0; stage < kStages; ++stage) InitBarrier(EmptyX(stage), kStrips);
  }
  __device__ __forceinline__ PipelineStage TurnOf(uint32_t turn) const {
    const auto at = PipelineState<kTurns>::Of(turn);
    return {Barrier(at.stage), Barrier(kTurns + at.stage), at.phase};
  }
  // At which warps arrive that have read a stage of x.
  __device__ __forceinline__ uint64_t* EmptyX(uint32_t stage) const {
    return Barrier(2 * kTurns + stage);
  }
  // Of a strip of the range.
  __device__ __forceinline__ uint32_t Ring(int strip) const {
    return warps_ + strip * kConfig.WarpBytes();
  }
  __device__ __forceinline__ uint32_t Masks(int strip, uint32_t turn) const {
    return Ring(strip) + kConfig.MasksAt() + turn % kTurns * PackedMasksBytes(kConfig.cell);
  }
  // The row of the ring up to which a strip reads in a turn.
  __device__ __forceinline__ uint32_t Needed(int strip, uint32_t turn) const {
    return Ring(strip) + kConfig.NeededAt() + turn % kTurns * 4;
  }
  // Rows, counted from the first tile on, that all streams of a strip have read after a turn.
  __device__ __forceinline__ uint32_t Free(int strip, uint32_t turn) const {
    return Ring(strip) + kConfig.FreeAt() + turn % kTurns * 4;
  }
  __device__ __forceinline__ uint32_t Sums(int strip) const {
    return Ring(strip) + kConfig.SumsAt();
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
  uint32_t panel_ = 0;           // of the piece, the next one
  uint32_t before_ = 0;          // rows of pieces before this one
  uint32_t asked_ = 0;           // rows of the piece
  uint32_t turn_ = 0;            // the next one
  uint32_t through_ = 0;         // turns that all strips are known to have finished
  uint32_t free_ = 0;            // rows read by then, counted over all pieces
  Words2 now_ = {}, next_ = {};  // what the piece says of the next two panels

  __device__ __forceinline__ Words2 Load(uint32_t panel) const {
    return panel < piece_.panel_count ? piece_.panels[panel] : Words2{};
  }

 public:
  __device__ explicit PackedWordProducer(const PackedTurns<kConfig>& turns) : turns_(turns) {}

  // A piece for each lane, behind those before it.
  __device__ __forceinline__ void Begin(const PackedPiece& piece) {
    piece_ = piece;
    panel_ = asked_ = 0;
    now_ = Load(0);
    next_ = Load(1);
  }

  // The turn of the next panel.
  __device__ __forceinline__ PipelineStage Turn() {
    const Words2 after = Load(panel_ + 2);
    const uint32_t end = now_.y;
    uint32_t masks = 0;  // panels whose masks come now, so many that they lie side by side
    if (panel_ == 0 || turn_ % kMasksAtOnce == 0) {
      const uint32_t left = piece_.panel_count - panel_;
      const uint32_t room = kMasksAtOnce - turn_ % kMasksAtOnce;
      masks = left < room ? left : room;
    }
    // Until there is room for the masks, what else is under way, and words.
    const uint32_t least = turn_ + (masks > 0 ? masks : 1);
    const int lane = static_cast<int>(threadIdx.x % kWarp), strip = lane % kConfig.Strips();
#pragma unroll 1
    while (through_ < turn_ &&
           (through_ + kTurns < least || __any_sync(kAllLanes, before_ + end - free_ > kRing))) {
      const PipelineStage earlier = turns_.TurnOf(through_);
      WaitForPhase(earlier.empty, earlier.phase);
      free_ = SharedAt<const uint32_t>(turns_.Free(strip, through_));
      ++through_;
    }
    const bool is_last = panel_ + 1 == piece_.panel_count;
    const PipelineStage turn = turns_.TurnOf(turn_);
    if (lane < kConfig.Strips()) {
      SharedAt<uint32_t>(turns_.Needed(strip, turn_)) = (before_ + end) % kRing;
      SharedAt<uint32_t>(turns_.Free(strip, turn_)) = before_ + (is_last ? end : next_.x);
      const PackedBulkRows<kRing> rows(piece_, asked_, end, before_ + asked_);
      asked_ = rows.End();
      turn.Expect(rows.Bytes() + masks * kMasksBytes);
      rows.Copy(piece_, turns_.Ring(strip), turn.full);
      if (masks > 0) {
        BulkCopy(&SharedAt<char>(turns_.Masks(strip, turn_)),
                 reinterpret_cast<const unsigned char*>(piece_.masks) +
                     static_cast<int64_t>(panel_) * kMasksBytes,
                 masks * kMasksBytes, turn.full);
      }
    }
    __syncwarp();
    if (is_last) before_ += end;
    now_ = next_;
    next_ = after;
    ++panel_;
    ++turn_;
    return turn;
  }
};

}  // namespace jaxsparse
