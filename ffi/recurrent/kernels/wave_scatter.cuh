// Sums that the blocks of a wave send each other instead of states. A block owns some units of a
// layer. It multiplies their states, as soon as it has them, by its columns of the layer's matrix
// and of the matrix of the layer above: these are parts of the products of all units there. It
// sends each block its parts, and adds up those that it receives: a reduction that is scattered,
// where other waves gather states. The arithmetic and the weights on chip are the same. What is
// exchanged is one number for each product instead of one for each state: a quarter for the adjoint
// of an LSTM, which has four states and one product.
//
// Weights are the operand A of mma.sync, 16 units of the receiving layer by 16 own states, and
// the batch is the N = 8 of B, two tiles at a time if there are as many. The order of rows, columns
// and batch entries within a tile is free. It is chosen so that a lane's sums of two tiles are 2
// neighbouring units for 4 batch entries, 16 bytes that it stores at once; a warp stores whole
// cache lines. Four lanes of a receiving warp load such 16 bytes from every fourth block each,
// lines again, and tensor cores add them up, after which each lane has two units of one entry.
//
// Parts are rounded to the states' type, and one of the eight in 16 bytes to a bit less: that bit
// tells whether these are of this lap of the slot or of the last one, so that slots are used again
// without being cleared. All 16 bytes are stored and loaded at once. Rounding P parts of about the
// same size, each by a relative error e, costs a sum as much as rounding the states that it is made
// of by e does, since errors of P parts and of h states average alike. With one part of eight
// rounded twice as coarsely the error of a product becomes 1.5 times that of other waves, by root
// mean square: sqrt(1 + (7 + 4) / 8). Float32 parts would not add to it, but take twice the bytes.
//
// Slots: a block that has all parts of its own layer's step t knows that every block has received
// those of step t - 2, so two are enough. The layer below may be ahead. Its blocks read how far the
// receiving ones have come, which these say in a word each, before they use a slot again.
//
// Floors of a step of the adjoint of an LSTM, of one multiprocessor: bytes received, as many are
// sent, 42 bytes a ns; and products of 16 x 16 x 8, 9.5 clock cycles each on four tensor cores, in
// a probe at 1.9 GHz. Half of both is in the way from one state to the next; the rest can hide.
//
//   layers, batch, shares | received | that takes | products | those take | by states
//   4 x 512, 16 in 2       16 KB      0.4 us       512        0.6 us       64 KB
//   4 x 512, 64 in 2       64 KB      1.5 us       2048       2.6 us       256 KB
//   8 x 512, 64            128 KB     3.0 us       4096       5.1 us       512 KB
//   2 x 1024, 4            16 KB      0.4 us       512        0.6 us       64 KB
//   2 x 1024, 64           256 KB     6.1 us       4096       5.1 us       1 MB
//
// All blocks together send 1.8 MB in the first case, and 7 MB in the second one. To these come 0.7
// us for a trip through the L2 cache and 0.2 us for the pointwise step. Measured on an H200, the
// first case takes about 2.3 us a step and the second one 7.4, which is neither floor
// (docs/persistent_scans.md). 16 units of 4 batch entries that a pointwise warp receives at a time
// are some 500 instructions, and a tile of 16 units by 16 rows 45, 16 of which are products.
#pragma once

#include "persistent/delay.cuh"
#include "persistent/watchdog.cuh"
#include "recurrent/kernels/wave_matrix.cuh"
#include "recurrent/kernels/wave_scatter.h"

namespace jaxsparse {

// The exchange buffer of a layer for this block's part of the batch: a mailbox for each block
// there.
template <typename Plan>
__device__ __forceinline__ Words4* MailboxOf(const RecurrentWaveLayer& p) {
  return static_cast<Words4*>(ExchangeOf<Plan>(p));
}
// Where a mailbox has what blocks of the layer itself, or of the one below, send for a step; and
// the bit that tells laps of a slot apart. Memory that was cleared looks like that of a lap before
// the first one.
template <typename Plan, bool kBelow>
__device__ __forceinline__ int SlotOfMailbox(int64_t step) {
  constexpr auto kSizes = Plan::kSizes;
  constexpr int kSlots = kBelow ? kSizes.kBelowSlots : kSizes.kOwnSlots;
  return (kBelow ? kSizes.below_at : 0) + static_cast<int>(step & (kSlots - 1)) * kSizes.slot_words;
}
template <typename Plan, bool kBelow>
__device__ __forceinline__ uint32_t LapOf(int64_t step) {
  constexpr int kSlots = kBelow ? Plan::kSizes.kBelowSlots : Plan::kSizes.kOwnSlots;
  return static_cast<uint32_t>(step / kSlots) & 1;
}
// Of a tile of units, for a quarter of the batch: 8 times 16 bytes from each block.
template <typename Plan>
__device__ __forceinline__ int MailboxOffset(int tile, int quarter, int from) {
  constexpr auto kSizes = Plan::kSizes;
  return ((tile * kSizes.quarters + quarter) * kSizes.blocks + from) * 8;
}
// For each block the last step for which it has received all parts.
template <typename Plan>
__device__ __forceinline__ uint32_t* ProgressOf(const RecurrentWaveLayer& p) {
  return reinterpret_cast<uint32_t*>(MailboxOf<Plan>(p) + Plan::kSizes.progress_at);
}

constexpr uint32_t kLapBit = 1;  // of the first word of 16 bytes

// Two of eight sums as they are sent: of the first two the lower one is rounded to an even number,
// in whose place is a lap's bit.
__device__ __forceinline__ constexpr int DroppedBits(bfloat16) { return 17; }
__device__ __forceinline__ constexpr int DroppedBits(float16) { return 14; }
template <typename State>
__device__ __forceinline__ uint32_t SumsOfLap(float low, float high, bool is_first, uint32_t lap) {
  constexpr uint32_t kDropped = (1u << DroppedBits(State())) - 1;
  const uint32_t bits = __float_as_uint(low);
  const uint32_t rounded = (bits + kDropped / 2 + (bits >> DroppedBits(State()) & 1)) & ~kDropped;
  // Rounding would carry the bits of a NaN into its sign.
  const float even = is_first && low == low ? __uint_as_float(rounded) : low;
  return (PairOf(State(), even, high) & (is_first ? ~kLapBit : ~0u)) | (is_first ? lap : 0);
}
__device__ __forceinline__ bool IsOfLap(const Words4& x, uint32_t lap) {
  return ((x.x ^ lap) & kLapBit) == 0;
}

// The states of a block's units after a step, in shared memory: [state][tile of units][pair of
// tiles of the batch][place in it][16 units]. The places are in the order in which lanes take them.
template <typename Plan>
__device__ __forceinline__ int StateOffset(int state_tile, int b) {
  const int in_tile = Plan::kSizes.together == 1 ? b : b % 4 / 2 * 8 + b % 16 / 4 * 2 + b % 2;
  return ((state_tile * Plan::kSizes.pairs + b / 16) * 16 + in_tile) * 16;
}
template <typename Plan>
__device__ __forceinline__ typename Plan::State* StatesBefore(Words4* shared, int64_t step) {
  constexpr auto kSizes = Plan::kSizes;
  auto* states = reinterpret_cast<typename Plan::State*>(shared + kSizes.states_at / 16);
  return states + static_cast<int>(step & (kSizes.kStateBuffers - 1)) * kSizes.state_size;
}

// A product warp's tiles of a matrix from the block's own states: to the layer itself, or to the
// one for which this layer is below.
template <typename Plan, bool kBelow>
class ScatteredMatrix {
  using State = typename Plan::State;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr auto kMatrix = kBelow ? kSizes.below : kSizes.own;
  static constexpr int kLoads = kMatrix.loads, kSteps = kMatrix.steps,
                       kRegisterTiles = kMatrix.register_chunks;
  static constexpr int kTogether = 2;             // tiles whose sums are independent
  static constexpr int kTiles = kSizes.together;  // of the batch

 public:
  __device__ __forceinline__ ScatteredMatrix(const DenseWeights& weights, Words4* shared)
      : g_(threadIdx.x % kWarp / 4),
        q_(threadIdx.x % 4),
        own_(kTiles == 2 ? 0 : q_ % 2),
        shared_(shared + threadIdx.x) {
#pragma unroll
    for (int j = 0; j < kRegisterTiles; ++j) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) weights_[j][k] = Fragment(weights, j, k);
    }
#pragma unroll 1  // which the compiler takes less time for
    for (int j = kRegisterTiles; j < kLoads; ++j) {
#pragma unroll 1
      for (int k = 0; k < kSteps; ++k) SharedWeights(j, k) = Fragment(weights, j, k);
    }
  }

  // Sends the parts of a step's products.
  __device__ __forceinline__ void Send(const State* states, Words4* slot, uint32_t lap) const {
    KeepInRegister(lap);
    const int of_lane = kTiles == 2 ? q_ : q_ / 2;  // a quarter of the batch
    Words4* to = slot + MailboxOffset<Plan>(TileFromStart(own_), of_lane, BlockOfScan<Plan>()) + g_;
#pragma unroll 1
    for (int pair = 0; pair < kSizes.pairs; ++pair, to += MailboxOffset<Plan>(0, 4, 0)) {
      uint32_t x[kSteps][kTiles][2];
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int at = ((StateTile(k) * kSizes.pairs + pair) * 16 + n * 8 + g_) * 16 + q_ * 4;
          const auto words = *reinterpret_cast<const Words2*>(states + at);
          x[k][n][0] = words.x, x[k][n][1] = words.y;
        }
      }
#pragma unroll
      for (int first = 0; first < kLoads; first += kTogether) {
        float sums[kTogether][kTiles][4] = {};
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            const int j = first + i;
            if (j >= kLoads) continue;
            const Words4 a = WeightsOf(j, k);
#pragma unroll
            for (int n = 0; n < kTiles; ++n) {
              MultiplyAdd(State(), sums[i][n], {a.x, a.y, a.z, a.w}, x[k][n][0], x[k][n][1]);
            }
          }
        }
        Store(sums, to, first, pair * 4 + of_lane < kSizes.quarters, lap);
      }
    }
  }

  // Of the lane's number among the warp's tiles: how far the block has come that receives it. A
  // lane without one sees what is far enough for any step.
  __device__ __forceinline__ int32_t ProgressOfReceiver(const uint32_t* progress) const {
    const int j = threadIdx.x % kWarp;
    if (j >= kLoads || !Exists(j)) return 0x7fffffff;
    return static_cast<int32_t>(LoadRelaxed(progress + Tile(j) / kSizes.unit_tiles));
  }

 private:
  // Of the tiles of units from the warp's number `first` on, if the quarter of the batch exists.
  __device__ __forceinline__ void Store(const float (&sums)[kTogether][kTiles][4], Words4* to,
                                        int first, bool exists, uint32_t lap) const {
    uint32_t words[kTogether][kTiles][2];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool is_first = n == 0 && e == 0 && (kTiles == 2 || q_ % 2 == 0);
          words[i][n][e] = SumsOfLap<State>(sums[i][n][e], sums[i][n][e + 2], is_first, lap);
        }
      }
    }
    if constexpr (kTiles == 2) {
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const auto& of_tile = words[i];
        StoreWords(to, first + i, exists,
                   {of_tile[0][0], of_tile[0][1], of_tile[1][0], of_tile[1][1]});
      }
    } else {
      uint32_t own[2], others[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        own[e] = own_ == 1 ? words[1][0][e] : words[0][0][e];
        others[e] = __shfl_xor_sync(kAllLanes, own_ == 1 ? words[0][0][e] : words[1][0][e], 1);
      }
      StoreWords(to, first, exists,
                 {own_ == 1 ? others[0] : own[0], own_ == 1 ? others[1] : own[1],
                  own_ == 1 ? own[0] : others[0], own_ == 1 ? own[1] : others[1]});
    }
  }
  // Of tile j + own_. `to`: where those of tile own_ lie.
  __device__ __forceinline__ void StoreWords(Words4* to, int j, bool exists,
                                             const Words4& words) const {
    const bool all_exist = (j + 3 - kTiles) * kSizes.warps <= kSizes.all_tiles;
    if (!exists || (!all_exist && !Exists(j + own_))) return;
    Words4* from_end = to - MailboxOffset<Plan>(kSizes.all_tiles, 0, 0);
    const bool is_behind_end = TileFromStart(own_) + j * kSizes.warps >= kSizes.all_tiles;
    StoreAtOnce((is_behind_end ? from_end : to) + MailboxOffset<Plan>(j * kSizes.warps, 0, 0),
                words);
  }

  // A block begins with its own tiles, so that not all send to one block at once, and goes on
  // behind the last one with the first.
  __device__ __forceinline__ static int TileFromStart(int j) {
    return static_cast<int>(BlockOfScan<Plan>()) * kSizes.unit_tiles + Number(j);
  }
  __device__ __forceinline__ static int Tile(int j) {
    const int tile = TileFromStart(j);
    return tile < kSizes.all_tiles ? tile : tile - kSizes.all_tiles;
  }
  __device__ __forceinline__ static bool Exists(int j) {
    return (j + 1) * kSizes.warps <= kSizes.all_tiles || Number(j) < kSizes.all_tiles;
  }
  __device__ __forceinline__ static int Number(int j) {
    return j * kSizes.warps + static_cast<int>(threadIdx.x / kWarp);
  }
  __device__ __forceinline__ static int StateTile(int k) {
    return NthOf(kMatrix.states, k / kSizes.unit_tiles) * kSizes.unit_tiles + k % kSizes.unit_tiles;
  }

  // Two neighbouring units of the receiving layer by 4 own ones.
  __device__ __forceinline__ Words4 Fragment(const DenseWeights& weights, int j, int k) const {
    const auto* values = static_cast<const State*>(weights.values);
    const int row = Tile(j) * 16 + 2 * g_, place = k / kSizes.unit_tiles;
    const int unit =
        static_cast<int>(BlockOfScan<Plan>()) * kSizes.units + k % kSizes.unit_tiles * 16 + 4 * q_;
    State x[2][4] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (values == nullptr || !Exists(j) || row + r >= kSizes.hidden ||
            unit + i >= kSizes.hidden) {
          continue;
        }
        x[r][i] = values[(row + r) * weights.row_stride +
                         (int64_t{place} * kSizes.hidden + unit + i) * weights.column_stride];
      }
    }
    return {Pair(x[0][0], x[0][1]), Pair(x[1][0], x[1][1]), Pair(x[0][2], x[0][3]),
            Pair(x[1][2], x[1][3])};
  }
  __device__ __forceinline__ static uint32_t Pair(State low, State high) {
    return static_cast<uint32_t>(low.bits) | static_cast<uint32_t>(high.bits) << 16;
  }
  // Those in shared memory in this order: all of a step at once would leave no registers for sums
  // that are independent.
  __device__ __forceinline__ Words4 WeightsOf(int j, int k) const {
    if (j < kRegisterTiles) return weights_[j < kRegisterTiles ? j : 0][k];
    uint32_t words[4];
    LoadShared(AddressOfShared(&SharedWeights(j, k)), words);
    return {words[0], words[1], words[2], words[3]};
  }
  __device__ __forceinline__ Words4& SharedWeights(int j, int k) const {
    return shared_[((j - kRegisterTiles) * kSteps + k) * kSizes.product_threads];
  }

  const int g_, q_;
  // With one tile of the batch, of two tiles of units the one whose sums the lane stores, for four
  // batch entries: it hands those of the other one to its neighbour.
  const int own_;
  Words4* const shared_;
  Words4 weights_[kRegisterTiles > 0 ? kRegisterTiles : 1][kSteps];
};

}  // namespace jaxsparse
