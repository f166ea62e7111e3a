// Products of a layer in a wave on the tensor cores of warpgroups, with the weights as the operand
// A: 64 of a block's rows, which are products of units, by 16 columns. The own weights never leave
// the registers, those of the layer below lie in shared memory. States are the operand B, 32 or 64
// entries of the batch, also there: a slot of the exchange buffer lies as tensor cores read it, 8
// numbers of 8 entries side by side. So a batch can be cut into parts of 32, each with all weights,
// where wave_wgmma, whose weights all lie in shared memory, has no room for the second part.
//
// Copies to shared memory take no registers while they are on their way. Each thread waits for its
// own, looks whether what came is written, and repeats what is not; then product warps meet.
//
// Floors of a step of an LSTM of 4 x 512 units, 64 batch entries in two parts, 16 blocks of 32
// units for a layer and part, of one multiprocessor:
//
//   bytes: 32 KB of the own state and as much of the layer below, half of what blocks of 16 units
//     with all 64 entries receive. At 42 bytes a nanosecond, which the L2 cache sends where all
//     multiprocessors read at once, 1.6 us; 0.87 where blocks only exchange these. In shared memory
//     416 KB, 1.7 us: these states four times, by copies, by the threads that look at them and by
//     each of two warpgroups, the weights of the layer below once, and sums twice
//   operations: 128 x 512 x 32, twice; from registers 0.70 us, from shared memory 0.87. The first
//     is in the way between receiving a state and publishing the next one, with 0.6 us of the
//     exchange's latency, 0.13 us for looking at 32 KB and about 0.4 for sums and cells
#pragma once

#include "cuda/warpgroup.cuh"
#include "persistent/exchange.cuh"
#include "recurrent/kernels/wave_matrix.cuh"
#include "recurrent/kernels/wave_stationary.h"

namespace jaxsparse {

// A layer's state, or that of the layer below, on its way to shared memory.
template <typename Plan, bool kBelow>
class SharedStates {
  using State = typename Plan::State;
  using Matrix = MatrixOfWave<Plan, kBelow>;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr auto kMatrix = kBelow ? kSizes.below : kSizes.own;
  static constexpr int kThreads = kSizes.product_threads, kWords = kMatrix.words;
  static constexpr int kPortions = kBelow ? 1 : kSizes.portions;
  static constexpr int kLoads = kMatrix.loads / kPortions;  // of a thread, in a portion
  static_assert(kSizes.exchange_batch == kSizes.batch);

 public:
  // Clears what no slot has, for products by weights that are 0.
  __device__ __forceinline__ explicit SharedStates(uint32_t address) : address_(address) {
    for (int i = kWords + threadIdx.x; i < kMatrix.state_bytes / 16; i += kThreads) {
      StoreShared(address_ + i * 16, Words4{0, 0, 0, 0});
    }
  }

  // Asks for a slot, once no product reads the last one.
  __device__ __forceinline__ void Ask(const State* slot) const {
#pragma unroll
    for (int i = 0; i < kMatrix.loads; ++i) {
      if (IsWord(i)) AsyncCopy(At(i), From(slot, i));
      if ((i + 1) % kLoads == 0) CommitCopies();
    }
  }

  // Waits for what this thread has asked for of a portion, when those before have come. A warp that
  // times out leaves something else.
  template <int kPortion>
  __device__ __forceinline__ void Await(const State* slot, Watchdog* watchdog) const {
    watchdog->Begin();
    WaitForCopyGroups<kPortions - 1 - kPortion>();
    for (;;) {
      const uint32_t missing = Missing(kPortion * kLoads);
      if (!__any_sync(kAllLanes, missing != 0)) break;
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int i = kPortion * kLoads + j;
        if ((missing >> j & 1) != 0) AsyncCopy(At(i), From(slot, i));
      }
      WaitForCopies();
      if (__any_sync(kAllLanes, watchdog->TimesOut())) break;
    }
  }

  // The columns of a step of some part of the columns, as the operand B.
  __device__ __forceinline__ uint64_t Operand(int part) const {
    uint32_t first = address_ + part * kMatrix.steps * kStepBytes;
    KeepInRegister(first);  // and no registers for what follows from it
    return SharedMatrixOfChunks(first, kChunkBytes);
  }
  __device__ __forceinline__ static uint64_t OfStep(uint64_t operand, int step) {
    return Behind(operand, step * kStepBytes);
  }

 private:
  static constexpr int kChunkBytes = kSizes.batch * 16;  // of 8 columns
  static constexpr int kStepBytes = 2 * kChunkBytes;

  // A bit for each of the thread's places of 16 bytes in a portion that is not written yet. Some
  // are looked at at once, as many as there are registers for.
  __device__ __forceinline__ uint32_t Missing(int first) const {
    constexpr int kAtOnce = 4;
    uint32_t missing = 0;
#pragma unroll
    for (int start = 0; start < kLoads; start += kAtOnce) {
      uint32_t x[kAtOnce][4] = {};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + start + j;
        if (start + j < kLoads && IsWord(i)) LoadShared(At(i), x[j]);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (!IsWritten({x[j][0], x[j][1], x[j][2], x[j][3]})) missing |= 1u << (start + j);
      }
    }
    return missing;
  }

  __device__ __forceinline__ static int Word(int i) {
    return i * kThreads + static_cast<int>(threadIdx.x);
  }
  __device__ __forceinline__ static bool IsWord(int i) {
    return (i + 1) * kThreads <= kWords || Word(i) < kWords;
  }
  __device__ __forceinline__ uint32_t At(int i) const { return address_ + Word(i) * 16; }
  __device__ __forceinline__ static const Words4* From(const State* slot, int i) {
    const auto* words = reinterpret_cast<const Words4*>(slot);
    if constexpr (HasFirst(kMatrix.states)) {
      return words + Word(i);
    } else {
      const int b = Word(i) % kSizes.batch, column = Word(i) / kSizes.batch * 8;
      return words + SlotOffset<Plan>(b, Matrix::SlotColumn(column)) / kSizes.states_per_load;
    }
  }

  const uint32_t address_;
};

// What the product warps of a layer do in a step, as WaveMma.
template <typename Plan>
class WaveStationary {
  using State = typename Plan::State;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kTileRows = 64, kTileWidth = 64, kTiles = kSizes.row_tiles_of_warpgroups;
  static constexpr int kOwnSteps = kSizes.own.steps, kBelowSteps = kSizes.below.steps;
  static constexpr int kBelowTiles = kSizes.below.tiles;
  static constexpr int kStepsOfPortion =
      kSizes.own.loads / kSizes.portions * kSizes.product_threads / (2 * kSizes.batch);
  using Tile = SwizzledTile<kTileRows, kTileWidth>;
  static_assert(kSizes.has_whole_tiles && kSizes.has_whole_portions && kSizes.has_few_words);

 public:
  // Of a warpgroup: a tile of rows by the batch.
  struct Sums {
    float tiles[1][kSizes.batch / 2] = {};
  };

  __device__ __forceinline__ WaveStationary(const RecurrentWaveLayer& p, Words4* shared)
      : tile_(WarpgroupOfBlock() % kTiles),
        part_(WarpgroupOfBlock() / kTiles),
        has_below_(p.below_exchange != nullptr),
        below_weights_(AddressOfShared(shared) + kSizes.below_weights_at),
        own_(AddressOfShared(shared) + kSizes.own_states_at),
        below_(AddressOfShared(shared) + kSizes.below_states_at) {
    LoadOwnWeights(p);
    if (has_below_) LoadBelowWeights(p);
    FenceShared();
    MeetOtherProductWarps<Plan>();
  }

  __device__ __forceinline__ void AskBelow(const State* slot) const { below_.Ask(slot); }
  __device__ __forceinline__ void MultiplyBelow(const State* slot, Watchdog* watchdog, Sums& sums) {
    below_.template Await<0>(slot, watchdog);
    FenceShared();
    MeetOtherProductWarps<Plan>();
    uint32_t first = below_weights_ + (tile_ * kSizes.parts + part_) * kBelowTiles * Tile::kBytes;
    KeepInRegister(first);  // and no registers for what follows from it
    const uint64_t weights = SharedMatrix<kTileWidth>(first), states = below_.Operand(part_);
    BeginProducts(sums.tiles);
#pragma unroll
    for (int step = 0; step < kBelowSteps; ++step) {
      MultiplyShared<true>(State(), sums.tiles[0],
                           Behind(weights, step / 4 * Tile::kBytes + step % 4 * 32),
                           below_.OfStep(states, step));
    }
    CommitProducts();
  }

  // While the tensor cores are busy with the layer below. Products of the last step have left the
  // place of the own state: all warps met since for the layer below, or else they meet here.
  __device__ __forceinline__ void AskOwn(const State* slot) const {
    if (!has_below_) MeetOtherProductWarps<Plan>();
    own_.Ask(slot);
  }
  // Asks for the next state of the layer below, too, when all have come for the own one and none
  // reads that of the layer below. `next_below`: may be null. True: the warp timed out, here or
  // below, and what it would overwrite may still be read.
  __device__ __forceinline__ bool MultiplyOwn(const State* slot, const State* next_below,
                                              float* partials, Watchdog* watchdog, Sums& sums) {
    MultiplyPortions<0>(slot, own_.Operand(part_), watchdog, sums);
    if (next_below != nullptr) AskBelow(next_below);  // while the tensor cores are busy
    WaitForGroups<0>();
    KeepInRegisters(sums.tiles[0]);
    const bool timed_out = __any_sync(kAllLanes, watchdog->timed_out());
    if (!timed_out) Write(sums, partials + part_ * kSizes.warp_part);
    return timed_out;
  }

 private:
  // From one portion of the own state on; products of the one before go on while the next one
  // comes.
  template <int kPortion>
  __device__ __forceinline__ void MultiplyPortions(const State* slot, uint64_t states,
                                                   Watchdog* watchdog, Sums& sums) {
    own_.template Await<kPortion>(slot, watchdog);
    if constexpr (kPortion == 0) WaitForGroups<0>();  // none reads the layer below any more
    FenceShared();
    MeetOtherProductWarps<Plan>();
    constexpr bool kLast = kPortion + 1 == kSizes.portions;
    constexpr int kFirst = kPortion * kStepsOfPortion;
    constexpr int kEnd = kLast ? kOwnSteps : kFirst + kStepsOfPortion;
    if constexpr (kPortion == 0) BeginProducts(sums.tiles);
    else FenceProducts();
#pragma unroll
    for (int step = kFirst; step < kEnd; ++step) {
      MultiplyAdd<false>(State(), sums.tiles[0], weights_[step], own_.OfStep(states, step));
    }
    CommitProducts();
    if constexpr (!kLast) MultiplyPortions<kPortion + 1>(slot, states, watchdog, sums);
  }
  // The first of this lane's two rows of its warpgroup's tile.
  __device__ __forceinline__ int FirstRow() const {
    return tile_ * kTileRows + WarpOfBlock() % 4 * 16 + static_cast<int>(threadIdx.x % kWarp / 4);
  }

  // A lane's part of the operand A: two rows, eight lines apart, by two pairs of columns.
  __device__ __forceinline__ void LoadOwnWeights(const RecurrentWaveLayer& p) {
    using Row = DenseRow<Plan, MatrixOfWave<Plan, false>>;
    const Row upper(p, FirstRow()), lower(p, FirstRow() + 8);
    const int first = part_ * kOwnSteps * 16 + static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int i = 0; i < kOwnSteps; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        typename Plan::Weight a[2], b[2];
        upper.Load(first + i * 16 + half * 8, a);
        lower.Load(first + i * 16 + half * 8, b);
        weights_[i][half * 2] = Pair(a[0], a[1]);
        weights_[i][half * 2 + 1] = Pair(b[0], b[1]);
      }
    }
  }

  // A thread takes four columns of a row at a time, neighbouring threads neighbouring units.
  __device__ __forceinline__ void LoadBelowWeights(const RecurrentWaveLayer& p) const {
    constexpr int kFours = kBelowSteps * 4;  // of a part
#pragma unroll 8                             // loads on their way at once
    for (int i = threadIdx.x; i < kSizes.rows * kSizes.parts * kFours;
         i += kSizes.product_threads) {
      const int row = i % kSizes.rows, four = i / kSizes.rows;
      const int part = four / kFours, column = four % kFours * 4;
      typename Plan::Weight w[4];
      DenseRow<Plan, MatrixOfWave<Plan, true>>(p, row).Load(four * 4, w);
      const int tile = (row / kTileRows * kSizes.parts + part) * kBelowTiles + column / kTileWidth;
      StoreShared(
          below_weights_ + tile * Tile::kBytes + Tile::At(row % kTileRows, column % kTileWidth),
          Pair(w[0], w[1]), Pair(w[2], w[3]));
    }
  }
  __device__ __forceinline__ static uint32_t Pair(State low, State high) {
    return static_cast<uint32_t>(low.bits) | static_cast<uint32_t>(high.bits) << 16;
  }

  __device__ __forceinline__ void Write(const Sums& sums, float* part) const {
    const int b = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* to = part + b * kSizes.row_slots + SlotOfRow<Plan>(FirstRow() + half * 8, b);
#pragma unroll
      for (int n = 0; n < kSizes.batch_tiles; ++n) {
        to[n * 8 * kSizes.row_slots] = sums.tiles[0][n * 4 + half * 2];
        to[(n * 8 + 1) * kSizes.row_slots] = sums.tiles[0][n * 4 + half * 2 + 1];
      }
    }
  }

  const int tile_, part_;
  const bool has_below_;
  const uint32_t below_weights_;
  const SharedStates<Plan, false> own_;
  const SharedStates<Plan, true> below_;
  uint32_t weights_[kOwnSteps][4];
};

}  // namespace jaxsparse
