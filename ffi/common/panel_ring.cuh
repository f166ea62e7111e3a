// A ring of stages in shared memory, through which rows of a matrix pass panel by panel. A warp
// that is done with a panel goes on to the next; the last warp to leave a stage has it filled again
// by bulk copies. So warps may be kStages - 1 panels apart.
#pragma once

#include "common/packet.cuh"

namespace jaxsparse {

// Where the rows of a panel lie in memory: neighbours are `pitch` elements apart.
template <typename T>
struct MatrixPanel {
  const T* from;
  int64_t pitch;
  int rows, columns;
};

// Source tells by operator() where each of a block's panels lies. Rows are kRowBytes apart in the
// ring, where nothing is written behind a row's last column. A block has kWarps warps.
template <typename T, int kRowBytes, int kPanel, int kStages, int kWarps, typename Source>
class PanelRing {
  const Source& source_;
  unsigned char* stages_;
  uint64_t* full_;  // counts a stage's bytes
  uint32_t* left_;  // counts the warps that left a stage
  uint32_t panels_;
  uint32_t at_ = 0;  // the panel that the warp is in
  uint32_t stage_ = 0, phase_ = 0;

  static constexpr int kStageBytes = kPanel * kRowBytes;

  // Where rows are not aligned, a warp copies them itself.
  __device__ void CopyByElements(T* to, const MatrixPanel<T>& panel) const {
#pragma unroll 4
    for (int r = 0; r < panel.rows; ++r) {
      for (int c = threadIdx.x % kWarp; c < panel.columns; c += kWarp) {
        to[r * (kRowBytes / sizeof(T)) + c] = panel.from[r * panel.pitch + c];
      }
    }
  }

  // Starts the copies of a panel; called by all lanes of a warp.
  __device__ void Fill(uint32_t number, uint32_t stage) {
    using Vector = Packet<T, 16 / sizeof(T)>;
    const MatrixPanel<T> panel = source_(number);
    const uint32_t row_bytes = panel.columns * sizeof(T);
    unsigned char* to = stages_ + stage * kStageBytes;
    const int lane = threadIdx.x % kWarp;
    if (panel.columns == 0 || panel.pitch % (16 / sizeof(T)) != 0 ||
        !IsAligned<Vector>(panel.from)) {
      CopyByElements(reinterpret_cast<T*>(to), panel);
      __syncwarp();
      if (lane == 0) ArriveAndExpect(full_ + stage, 0);
      return;
    }
    if (lane == 0) ArriveAndExpect(full_ + stage, panel.rows * row_bytes);
    __syncwarp();
    if (panel.pitch * sizeof(T) == kRowBytes) {
      if (lane == 0 && panel.rows > 0) {
        BulkCopy(to, panel.from, panel.rows * row_bytes, full_ + stage);
      }
      return;
    }
    for (int r = lane; r < panel.rows; r += kWarp) {
      BulkCopy(to + r * kRowBytes, panel.from + r * panel.pitch, row_bytes, full_ + stage);
    }
  }

 public:
  static constexpr int kCounterBytes = kStages * 12;

  // Called by all threads of a block, who see afterwards what each wrote to shared memory before.
  __device__ PanelRing(const Source& source, unsigned char* stages, unsigned char* counters,
                       uint32_t panels)
      : source_(source),
        stages_(stages),
        full_(reinterpret_cast<uint64_t*>(counters)),
        left_(reinterpret_cast<uint32_t*>(counters + kStages * 8)),
        panels_(panels) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        InitBarrier(full_ + stage, 1);
        left_[stage] = 0;
      }
      FenceBarriers();
    }
    __syncthreads();
    if (threadIdx.x >= kWarp) return;
    for (uint32_t panel = 0; panel < kStages && panel < panels_; ++panel) Fill(panel, panel);
  }

  // Waits for the next panel. Returns where its first row lies, in bytes behind the first stage.
  __device__ __forceinline__ uint32_t Enter() {
    WaitForPhase(full_ + stage_, phase_);
    return stage_ * kStageBytes;
  }

  // Leaves the panel; called by all lanes of a warp.
  __device__ __forceinline__ void Leave() {
    const uint32_t next = at_ + kStages;
    if (next < panels_) {
      uint32_t left = 0;
      __syncwarp();
      if (threadIdx.x % kWarp == 0) left = FetchAndAdd(left_ + stage_, 1);
      left = __shfl_sync(kAllLanes, left, 0);
      __syncwarp();  // what the first lane has acquired, all may overwrite
      if (left % kWarps == kWarps - 1) Fill(next, stage_);
    }
    ++at_;
    if (++stage_ == kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }
};

}  // namespace jaxsparse
