// How words and masks of a range's strips come to shared memory, by a warp that does not multiply,
// and how those that multiply wait for them.
//
// They come in turns. Turn 0 asks for what the first panels read, turn t for what there is room for
// once all strips of the range are through with panel t - 1, and for masks of a panel that is
// kTurns - 1 ahead. Whatever a pattern says, panel t needs no more than turns up to t.
#pragma once

#include "cuda/pipeline.cuh"
#include "packed/kernels/lane_streams.cuh"
#include "packed/kernels/packed_wgmma.h"

namespace jaxsparse {

// Where turns of a range leave what, and their barriers; and those of its panels of x.
template <PackedWgmmaConfig kConfig>
class PackedTurns {
  static constexpr int kMasksBytes = PackedMasksBytes(kConfig.cell), kStrips = kConfig.Strips();
  static constexpr uint32_t kStages = kConfig.Stages();
  uint32_t address_;
  int first_warp_;
  uint64_t* barriers_;

 public:
  static constexpr uint32_t kTurns = kConfig.kTurns;
  static_assert(kConfig.RingRows() >= kPackedPanelPairs + kPackedDrift);

  __device__ PackedTurns(unsigned char* shared, int range)
      : address_(AddressOfShared(shared)),
        first_warp_(range * kStrips),
        barriers_(reinterpret_cast<uint64_t*>(shared + kConfig.BarriersAt()) +
                  range * 2 * (kTurns + kStages)) {}

  // By one thread, before FenceShared and a barrier of the range.
  __device__ void Init() const {
    for (uint32_t turn = 0; turn < kTurns; ++turn) StageOf(turn).Init(kStrips, kStrips);
    for (uint32_t panel = 0; panel < kStages; ++panel) StageOfX(panel).Init(1, kStrips);
  }
  __device__ __forceinline__ PipelineStage StageOf(uint32_t turn) const {
    const auto at = PipelineState<kTurns>::Of(turn);
    return {barriers_ + at.stage, barriers_ + kTurns + at.stage, at.phase};
  }
  __device__ __forceinline__ PipelineStage StageOfX(uint32_t panel) const {
    const auto at = PipelineState<kStages>::Of(panel);
    uint64_t* const barriers = barriers_ + 2 * kTurns;
    return {barriers + at.stage, barriers + kStages + at.stage, at.phase};
  }
  // Of a strip of the range.
  __device__ __forceinline__ uint32_t Ring(int strip) const {
    return address_ + (first_warp_ + strip) * PackedRingBytes(kConfig.RingRows());
  }
  __device__ __forceinline__ uint32_t Masks(int strip, uint32_t panel) const {
    return address_ + kConfig.MasksAt() +
           ((first_warp_ + strip) * kTurns + panel % kTurns) * kMasksBytes;
  }
  // The row of words up to which a strip has asked in a turn, and up to which it reads in a panel.
  __device__ __forceinline__ uint32_t Asked(int strip, uint32_t turn) const {
    return address_ + kConfig.NotesAt() + (turn % kTurns * kConfig.warps + first_warp_ + strip) * 8;
  }
  __device__ __forceinline__ uint32_t Needed(int strip, uint32_t panel) const {
    return Asked(strip, panel) + 4;
  }
};

// A lane that has words and masks of its strip copied.
template <PackedWgmmaConfig kConfig>
class PackedWordProducer {
  using Turns = PackedTurns<kConfig>;
  static constexpr uint32_t kAhead = Turns::kTurns - 1;  // panels, for masks
  const Turns& turns_;
  int strip_;
  PackedPiece piece_;
  uint32_t asked_ = 0;
  uint32_t free_ = 0, needed_;  // for the next turn: rows, and those of the panel ahead

  // How many rows a panel needs, if there is one.
  __device__ __forceinline__ uint32_t NeededOf(uint32_t panel) const {
    return panel < piece_.panel_count ? piece_.panels[panel].y : 0;
  }

 public:
  __device__ PackedWordProducer(const Turns& turns, int strip, const PackedPiece& piece)
      : turns_(turns), strip_(strip), piece_(piece), needed_(NeededOf(kAhead)) {}

  __device__ __forceinline__ void Turn(uint32_t turn) {
    constexpr int kRing = kConfig.RingRows(), kMasksBytes = PackedMasksBytes(kConfig.cell);
    const uint32_t next = turn + 1, panels = piece_.panel_count;
    const uint32_t next_free = next < panels ? piece_.panels[next].x : 0;
    const uint32_t next_needed = NeededOf(next + kAhead);
    if (turn > 0) {
      const PipelineStage before = turns_.StageOf(turn - 1);
      WaitForPhase(before.empty, before.phase);
    }
    const PackedBulkRows<kRing> rows(piece_, asked_, free_ + kRing);
    asked_ = rows.End();
    SharedAt<uint32_t>(turns_.Asked(strip_, turn)) = asked_;
    if (turn == 0) {
#pragma unroll
      for (uint32_t panel = 0; panel < kAhead; ++panel) {
        SharedAt<uint32_t>(turns_.Needed(strip_, panel)) = NeededOf(panel);
      }
    }
    SharedAt<uint32_t>(turns_.Needed(strip_, turn + kAhead)) = needed_;
    // Turn 0 asks for masks of all panels up to the one ahead, which lie side by side.
    const uint32_t first = turn == 0 ? 0 : turn + kAhead, end = turn + kAhead + 1;
    const uint32_t masks = first < panels ? (end < panels ? end : panels) - first : 0;
    const PipelineStage stage = turns_.StageOf(turn);
    stage.Expect(rows.Bytes() + masks * kMasksBytes);
    if (masks > 0) {
      BulkCopy(&SharedAt<char>(turns_.Masks(strip_, first)),
               reinterpret_cast<const unsigned char*>(piece_.masks) +
                   static_cast<int64_t>(first) * kMasksBytes,
               masks * kMasksBytes, stage.full);
    }
    rows.Copy(piece_, turns_.Ring(strip_), stage.full);
    free_ = next_free;
    needed_ = next_needed;
  }
};

// What a warp that multiplies knows of turns.
template <PackedWgmmaConfig kConfig>
class PackedTurnsConsumer {
  const PackedTurns<kConfig>& turns_;
  int strip_;
  uint32_t panels_, panel_ = 0;
  uint32_t waited_ = 0;  // for so many turns
  uint32_t asked_ = 0;   // rows, in these

  __device__ __forceinline__ void Wait() {
    turns_.StageOf(waited_).WaitUntilFull();
    asked_ = SharedAt<const uint32_t>(turns_.Asked(strip_, waited_));
    ++waited_;
  }

 public:
  __device__ PackedTurnsConsumer(const PackedTurns<kConfig>& turns, int strip, uint32_t panels)
      : turns_(turns), strip_(strip), panels_(panels) {}

  // Waits for what the next panel reads. Returns how many rows have been read when it ends.
  __device__ __forceinline__ uint32_t Enter() {
    // Masks come with that turn.
    if (panel_ == 0 || waited_ + kConfig.kTurns < panel_ + 2) Wait();
    const uint32_t needed = SharedAt<const uint32_t>(turns_.Needed(strip_, panel_));
#pragma unroll 1
    while (asked_ < needed && waited_ <= panel_) Wait();
    return needed;
  }
  __device__ __forceinline__ uint32_t Mask(int step) const {
    return SharedAt<const uint32_t>(turns_.Masks(strip_, panel_) + step * kPackedRowBytes +
                                    threadIdx.x % kWarp * 4);
  }
  __device__ __forceinline__ void Leave() {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) turns_.StageOf(panel_).Emptied();
    ++panel_;
  }
  // Behind the last panel: nothing is under way any more.
  __device__ __forceinline__ void WaitForAll() {
#pragma unroll 1
    while (waited_ < panels_) Wait();
  }
};

}  // namespace jaxsparse
