// A pipeline (cuda/pipeline.cuh) through which rows of a matrix pass panel by panel. All warps are
// consumers. One that is done with a panel goes on to the next; the first one to leave a panel
// becomes the producer that fills the stage of the panel before again, once all have left that. So
// warps may be kStages - 1 panels apart, and those that are ahead do the work.
//
// Where the panel is one piece of memory, one bulk copy fills a stage. A bulk copy for each row
// took 60 clocks a row, whatever its length (measured on an H200): there the lanes copy 16 bytes
// each.
#pragma once

#include "cuda/panel_pipeline.h"
#include "cuda/pipeline.cuh"
#include "cuda/vector_access.cuh"

namespace jaxsparse {

// Where the rows of a panel lie in memory: neighbours are `pitch` elements apart. If these are as
// many bytes as in the pipeline, the panel has all columns.
template <typename T>
struct MatrixPanel {
  const T* from;
  int64_t pitch;
  int rows, columns;
};

// Source tells by operator() where each of a block's panels lies. Rows are kRowBytes apart in the
// pipeline, where nothing is written behind a row's last column. A block has kWarps warps.
template <typename T, int kRowBytes, int kPanel, int kStages, int kWarps, typename Source>
class PanelPipeline {
  using State = PipelineState<kStages>;
  const Source& source_;
  unsigned char* stages_;
  uint64_t* full_;  // barriers of stages
  uint64_t* empty_;
  uint32_t* turns_;  // counts the warps that left a stage, to tell who is first
  uint32_t panels_;
  uint32_t number_ = 0;  // of the panel that the warp is in
  State at_;

  static constexpr int kStageBytes = kPanel * kRowBytes;
  static constexpr int kVector = 16 / sizeof(T);

  __device__ __forceinline__ PipelineStage StageAt(State at) const {
    return {full_ + at.stage, empty_ + at.stage, at.phase};
  }
  // Where the warp was in the panel before.
  __device__ __forceinline__ State Before() const {
    return {at_.stage > 0 ? at_.stage - 1 : kStages - 1, at_.stage > 0 ? at_.phase : at_.phase ^ 1};
  }

  // Where rows are not aligned.
  __device__ static void CopyByElements(unsigned char* to, const MatrixPanel<T>& panel) {
#pragma unroll 4
    for (int r = 0; r < panel.rows; ++r) {
      T* row = reinterpret_cast<T*>(to + r * kRowBytes);
      for (int c = threadIdx.x % kWarp; c < panel.columns; c += kWarp) {
        row[c] = panel.from[r * panel.pitch + c];
      }
    }
  }

  // Starts copies by which lanes copy 16 bytes each.
  __device__ static void CopyByPieces(uint32_t to, const MatrixPanel<T>& panel) {
    constexpr int kAcross = kRowBytes < 128 ? kRowBytes / 16 : 8;
    constexpr int kDown = kWarp / kAcross, kTurns = kRowBytes / (16 * kAcross);
    static_assert(kRowBytes % (16 * kAcross) == 0);
    const int lane = threadIdx.x % kWarp, column = lane % kAcross * kVector;
    int r = lane / kAcross;
    const T* from = panel.from + r * panel.pitch + column;
    to += r * kRowBytes + lane % kAcross * 16;
#pragma unroll 4
    for (; r < panel.rows; r += kDown) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        constexpr int kStep = kAcross * kVector;
        if (column + turn * kStep < panel.columns) {
          AsyncCopy(to + turn * kStep * sizeof(T), from + turn * kStep);
        }
      }
      from += kDown * panel.pitch;
      to += kDown * kRowBytes;
    }
  }

  // Starts the copies of a panel; called by all lanes of a warp.
  __device__ void Fill(uint32_t number, State at) {
    const MatrixPanel<T> panel = source_(number);
    unsigned char* to = stages_ + at.stage * kStageBytes;
    const PipelineStage stage = StageAt(at);
    if (panel.pitch % kVector != 0 || !IsAligned<Vector<T, kVector>>(panel.from)) {
      CopyByElements(to, panel);
      stage.Filled();
    } else if (panel.pitch * sizeof(T) != kRowBytes) {
      CopyByPieces(AddressOfShared(to), panel);
      ArriveWhenCopied(stage.full);
    } else if (threadIdx.x % kWarp == 0 && panel.rows > 0) {
      const uint32_t bytes = panel.rows * kRowBytes;
      stage.Expect(bytes);
      BulkCopy(to, panel.from, bytes, stage.full);
    } else {
      stage.Filled();
    }
  }

 public:
  static constexpr int kCounterBytes = kStages * kPanelCounterBytes;

  // Called by all threads of a block, who see afterwards what each wrote to shared memory before.
  __device__ PanelPipeline(const Source& source, unsigned char* stages, unsigned char* counters,
                           uint32_t panels)
      : source_(source),
        stages_(stages),
        full_(reinterpret_cast<uint64_t*>(counters)),
        empty_(full_ + kStages),
        turns_(reinterpret_cast<uint32_t*>(empty_ + kStages)),
        panels_(panels) {
    if (threadIdx.x == 0) {
      for (uint32_t stage = 0; stage < kStages; ++stage) {
        StageAt({stage}).Init(kWarp, kWarps);  // lanes of the warp that fills it, and all warps
        turns_[stage] = 0;
      }
      FenceShared();
    }
    __syncthreads();
    const uint32_t warp = threadIdx.x / kWarp;
    if (warp < kStages && warp < panels_) Fill(warp, {warp});
  }

  // Waits for the next panel. Returns where its first row lies, in bytes behind the first stage.
  __device__ __forceinline__ uint32_t Enter() {
    StageAt(at_).WaitUntilFull();
    return at_.stage * kStageBytes;
  }

  // Leaves the panel; called by all lanes of a warp.
  __device__ __forceinline__ void Leave() {
    __syncwarp();
    uint32_t turn = 0;
    if (threadIdx.x % kWarp == 0) {
      turn = FetchAndAdd(turns_ + at_.stage, 1);  // before another panel is counted there
      StageAt(at_).Emptied();
    }
    const bool first = __shfl_sync(kAllLanes, turn, 0) % kWarps == 0;
    const uint32_t next = number_ + kStages - 1;
    if (first && number_ > 0 && next < panels_) {
      State to = Before();
      to.phase ^= 1;  // that stage, a round later
      StageAt(to).WaitUntilEmpty();
      Fill(next, to);
    }
    ++number_;
    at_.Advance();
  }
};

}  // namespace jaxsparse
