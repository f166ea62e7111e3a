// How words and masks of a block's strips come to shared memory, by warps that do nothing else, and
// how those that multiply wait for them.
//
// They come in turns. Turn 0 asks for what the first panels read, turn t for what there is room for
// once all strips are through with panel t - 1, and for masks of a panel that is kTurns - 1 ahead.
// Whatever a pattern says, panel t needs no more than turns up to t.
#pragma once

#include "cuda/pipeline.cuh"
#include "packed/kernels/lane_streams.cuh"
#include "packed/kernels/packed_wgmma.h"

namespace jaxsparse {

// Where turns leave what, and their barriers.
template <PackedWgmmaConfig kConfig>
class PackedTurns {
  static constexpr int kMasksBytes = PackedMasksBytes(kConfig.cell);
  unsigned char* shared_;
  uint32_t address_ = AddressOfShared(shared_);

 public:
  static constexpr uint32_t kTurns = kConfig.kTurns;
  static constexpr int kProducers = kConfig.kWordProducers * kWarp;  // threads

  __device__ explicit PackedTurns(unsigned char* shared) : shared_(shared) {}

  // By one thread, before FenceShared and a barrier of the block.
  __device__ void Init() const {
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      StageOf(turn).Init(kProducers + kConfig.warps, kConfig.warps);
    }
  }
  __device__ __forceinline__ PipelineStage StageOf(uint32_t turn) const {
    auto* barriers = reinterpret_cast<uint64_t*>(shared_ + kConfig.BarriersAt());
    const auto at = PipelineState<kTurns>::Of(turn);
    return {barriers + at.stage, barriers + kTurns + at.stage, at.phase};
  }
  __device__ __forceinline__ uint32_t Ring(int warp) const {
    return address_ + warp * PackedRingBytes(kConfig.RingRows());
  }
  __device__ __forceinline__ uint32_t Masks(int warp, uint32_t panel) const {
    return address_ + kConfig.MasksAt() + (warp * kTurns + panel % kTurns) * kMasksBytes;
  }
  // The row of words up to which a strip has asked in a turn, and up to which it reads in a panel.
  __device__ __forceinline__ uint32_t Asked(int warp, uint32_t turn) const {
    return address_ + kConfig.NotesAt() + (turn % kTurns * kConfig.warps + warp) * 8;
  }
  __device__ __forceinline__ uint32_t Needed(int warp, uint32_t panel) const {
    return Asked(warp, panel) + 4;
  }
};

// A warp that has words and masks copied, of some strips; lanes have one each for words.
template <PackedWgmmaConfig kConfig>
class PackedWordProducer {
  using Turns = PackedTurns<kConfig>;
  static constexpr int kStrips = kConfig.warps / kConfig.kWordProducers;
  static constexpr int kMasksBytes = PackedMasksBytes(kConfig.cell);
  const Turns& turns_;
  int first_warp_, lane_;
  bool has_strip_;
  PackedPiece piece_;  // of the lane's strip
  uint32_t asked_ = 0;

  // Of panel `panel`, if there is one: masks, and how many rows it needs.
  __device__ __forceinline__ void AskForMasks(uint32_t panel, uint32_t panels) const {
    constexpr int kVectors = kMasksBytes / 16;
    static_assert(kWarp % kVectors == 0);
    if (panel >= panels) return;
#pragma unroll
    for (int strip = 0; strip < kStrips; strip += kWarp / kVectors) {
      const int of_lane = strip + lane_ / kVectors;
      const auto masks = __shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(piece_.masks), of_lane);
      AsyncCopy(turns_.Masks(first_warp_ + of_lane, panel) + lane_ % kVectors * 16,
                reinterpret_cast<const unsigned char*>(masks) +
                    static_cast<int64_t>(panel) * kMasksBytes + lane_ % kVectors * 16);
    }
    if (has_strip_) {
      AsyncCopyWordOrZero(turns_.Needed(first_warp_ + lane_, panel), &piece_.panels[panel].y, true);
    }
  }

 public:
  __device__ PackedWordProducer(const Turns& turns, int first_warp, const PackedPiece& piece)
      : turns_(turns),
        first_warp_(first_warp),
        lane_(threadIdx.x % kWarp),
        has_strip_(lane_ < kStrips),
        piece_(piece) {}

  static __device__ int StripOfLane(int first_warp) {
    return first_warp + static_cast<int>(threadIdx.x) % kStrips;
  }

  __device__ void Run() {
    const uint32_t panels = piece_.panel_count;
    uint32_t free = 0;
#pragma unroll 1
    for (uint32_t turn = 0; turn < panels; ++turn) {
      const uint32_t next_free = turn + 1 < panels ? piece_.panels[turn + 1].x : 0;
      if (turn > 0) {
        const PipelineStage before = turns_.StageOf(turn - 1);
        WaitForPhase(before.empty, before.phase);
      }
      const PipelineStage stage = turns_.StageOf(turn);
      if (has_strip_) {
        const int warp = first_warp_ + lane_;
        constexpr int kRing = kConfig.RingRows();
        const PackedBulkRows<kRing> rows(piece_, asked_, free + kRing);
        asked_ = rows.End();
        SharedAt<uint32_t>(turns_.Asked(warp, turn)) = asked_;
        stage.Expect(rows.Bytes());
        rows.Copy(piece_, turns_.Ring(warp), stage.full);
      }
      __syncwarp();
      if (turn == 0) {
        for (uint32_t panel = 0; panel < Turns::kTurns - 1; ++panel) AskForMasks(panel, panels);
      }
      AskForMasks(turn + Turns::kTurns - 1, panels);
      ArriveWhenCopied(stage.full);
      free = next_free;
    }
  }
};

// What a warp that multiplies knows of turns.
template <PackedWgmmaConfig kConfig>
class PackedTurnsConsumer {
  const PackedTurns<kConfig>& turns_;
  int warp_;
  uint32_t panels_, panel_ = 0;
  uint32_t waited_ = 0;  // for so many turns
  uint32_t asked_ = 0;   // rows, in these

  __device__ __forceinline__ void Wait() {
    turns_.StageOf(waited_).WaitUntilFull();
    asked_ = SharedAt<const uint32_t>(turns_.Asked(warp_, waited_));
    ++waited_;
  }

 public:
  __device__ PackedTurnsConsumer(const PackedTurns<kConfig>& turns, int warp, uint32_t panels)
      : turns_(turns), warp_(warp), panels_(panels) {}

  // Waits for what the next panel reads. Returns how many rows have been read when it ends.
  __device__ __forceinline__ uint32_t Enter() {
    // Masks come with that turn.
    if (panel_ == 0 || waited_ + kConfig.kTurns < panel_ + 2) Wait();
    const uint32_t needed = SharedAt<const uint32_t>(turns_.Needed(warp_, panel_));
#pragma unroll 1
    while (asked_ < needed && waited_ <= panel_) Wait();
    return needed;
  }
  __device__ __forceinline__ uint32_t Mask(int step) const {
    return SharedAt<const uint32_t>(turns_.Masks(warp_, panel_) + step * kPackedRowBytes +
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
