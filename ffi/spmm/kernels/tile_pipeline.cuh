// The roles of a block of the tensor core kernel, and the pipeline (cuda/pipeline.cuh) between
// them: producers write tiles of the sparse matrix to stages, whose tiles of x are copied there,
// and consumers multiply.
#pragma once

#include "cuda/pipeline.cuh"
#include "spmm/kernels/matrix_tiles.cuh"

namespace jaxsparse {

// The consumers are two warpgroups, which multiply every stage; behind them come the producers, who
// write entries, in one team or two, of which each has every other stage.
constexpr int kConsumers = kSpmmTeamThreads;
constexpr int kConsumersMeet = 1;  // the named barrier at which they do
constexpr int kGroups = 2;
static_assert(kConsumers == kGroups * kWarpgroup);

template <typename T, SpmmTensorConfig kConfig>
struct SpmmTensorShape {
  static constexpr int kColumns = kConfig.columns, kCount = kComponents<T>;
  using TileA = MatrixTile<T>;
  static constexpr bool kSplits = kCount > 1;
  using TileX = BlockedTile<kSpmmTileInner, kColumns>;
  static constexpr int kXBytes = kConfig.XBytes(kCount);
  static constexpr int kStageBytes = kConfig.StageBytes(kCount);
  static constexpr int kStages = kConfig.Stages(kCount);
  static constexpr int kBarriersAt = kConfig.BarriersAt(kCount);
  static constexpr int kFlagsAt = kConfig.FlagsAt(kCount);
  static constexpr int kBiasAt = kConfig.BiasAt(kCount);
  static constexpr int kOrdersAt = kConfig.OrdersAt(kCount);
  static constexpr int kTeams = kConfig.Teams(kCount);
  static constexpr int kThreads = kConfig.Threads(kCount);
  static_assert(kXBytes == kCount * TileX::kBytes && kStageBytes == kXBytes + TileA::kBytes);
  static_assert(kStageBytes % 1024 == 0 && kStages >= 3);
  static_assert(kStages % kTeams == 0);  // so that a stage is always filled by the same team
  // Producers leave some to consumers.
  static constexpr int kConsumerRegisters = kTeams == 1 ? 160 : kColumns > 64 ? 96 : 80;
  static constexpr int kProducerRegisters = kTeams == 1 ? 96 : kColumns > 64 ? 72 : 80;
};

// The pipeline and where a warp is in it. By addresses that stay in registers: producers have few
// warps, which wait for each instruction.
template <typename Shape>
class TilePipeline {
  static constexpr int kStages = Shape::kStages;
  static constexpr int kFullAt = Shape::kBarriersAt;
  static constexpr int kEmptyAt = kFullAt + kStages * sizeof(uint64_t);
  using State = PipelineState<kStages>;
  uint32_t stages_;
  State at_;

  __device__ __forceinline__ PipelineStage StageAt(State at) const {
    const uint32_t barriers = stages_ + at.stage * sizeof(uint64_t);
    return {&SharedAt<uint64_t>(barriers + kFullAt), &SharedAt<uint64_t>(barriers + kEmptyAt),
            at.phase};
  }

 public:
  __device__ explicit TilePipeline(const unsigned char* stages) : stages_(AddressOfShared(stages)) {
    if (threadIdx.x == 0) {
      for (uint32_t stage = 0; stage < kStages; ++stage) {
        // A producer arrives once more, the one that has x copied.
        StageAt({stage}).Init(kTeamThreads + 1, kConsumers);
      }
      FenceShared();
    }
    __syncthreads();
  }

  // For warps that have a register left: otherwise it is computed again for each stage.
  __device__ __forceinline__ void KeepAddress() { KeepInRegister(stages_); }

  // Space of the producers.
  __device__ __forceinline__ uint32_t Orders() const { return stages_ + Shape::kOrdersAt; }
  __device__ __forceinline__ uint32_t Stage() const {
    return stages_ + at_.stage * Shape::kStageBytes;
  }
  __device__ __forceinline__ void WaitUntilEmpty() { StageAt(at_).WaitUntilEmpty(); }
  __device__ __forceinline__ void WaitUntilFull() { StageAt(at_).WaitUntilFull(); }
  // By one thread; calls with where x belongs, and the barrier that counts its bytes.
  template <typename Copy>
  __device__ __forceinline__ void CopyX(Copy copy) {
    const PipelineStage stage = StageAt(at_);
    stage.Expect(Shape::kXBytes);
    copy(&SharedAt<char>(Stage()), stage.full);
  }
  __device__ __forceinline__ void Filled() { StageAt(at_).Filled(); }
  __device__ __forceinline__ void Emptied() { StageAt(at_).Emptied(); }
  __device__ __forceinline__ void Next(int stages = 1) { at_.Advance(stages); }
};

// Tells all of a block whether anything went wrong in a tile of the result.
class TileFlags {
  int* flags_;  // of this tile and of the one before or behind it; what consumers tell each other
  int turn_ = 0;

 public:
  __device__ explicit TileFlags(unsigned char* flags) : flags_(reinterpret_cast<int*>(flags)) {
    if (threadIdx.x == 0) flags_[0] = flags_[1] = 0;
    __syncthreads();
  }

  // Called by all threads at the end of a tile, before they meet; between that and their next
  // meeting; and behind that, there.
  __device__ __forceinline__ void Raise(bool wrong) {
    if (wrong) flags_[turn_] = 1;
  }
  __device__ __forceinline__ bool IsRaised() const { return flags_[turn_] != 0; }
  __device__ __forceinline__ void Next() {
    turn_ ^= 1;
    if (threadIdx.x == 0) flags_[turn_] = 0;
  }

  __device__ __forceinline__ void Tell(bool what) { flags_[2] = what; }
  __device__ __forceinline__ bool IsTold() const { return flags_[2] != 0; }
};

}  // namespace jaxsparse
