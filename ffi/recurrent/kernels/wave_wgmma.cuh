// Products of a layer in a wave on the tensor cores of warpgroups, for batches of 32 and more
// entries. The states are the operand A, 64 batch entries by 16 columns, and the weights B, which
// lies in shared memory.
//
// The order of columns within a product is free, so a lane takes as its part of A whatever 16 bytes
// of a batch entry it receives, straight from the exchange buffer; weights are arranged to match.
// Only sums pass through shared memory.
//
// Floors of a step of an LSTM of 4 x 512 units, 64 batch entries, 32 blocks of 16 units a layer, of
// one multiprocessor:
//
//   bytes: 64 KB of the own state and as much of the layer below; where blocks only exchange these,
//     a step takes 1.3 to 1.5 us. 64 KB of sums to shared memory and back, 0.27 us
//   operations: 64 products of 64 x 64 x 16, 1.1 us; half of them are in the way between receiving
//     a state and publishing the next one
#pragma once

#include "cuda/warpgroup.cuh"
#include "persistent/exchange.cuh"
#include "recurrent/kernels/wave_matrix.cuh"
#include "recurrent/kernels/wave_wgmma.h"

namespace jaxsparse {

// Sums of a warpgroup: 64 batch entries by a block's products, which are columns, in tiles of 8
// units of one product. Products that only the own matrix has come first, then those of both, so
// that each matrix has neighbouring ones: what it has no products of stays as it is, whatever its
// states are.
template <typename Plan>
struct WgmmaSums {
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kOwn = kSizes.own.products, kBelow = kSizes.below.products,
                       kTilesOfProduct = kSizes.units / 8;
  float tiles[kSizes.products * kTilesOfProduct][4] = {};

  // Products that both matrices have, and those that only this one or the other has.
  static constexpr int kBoth = CountBits(kOwn & kBelow), kOnlyOwn = CountBits(kOwn & ~kBelow),
                       kOnlyBelow = CountBits(kBelow & ~kOwn);
  template <bool kOfBelow>
  static constexpr int kFirst = kOfBelow ? kOnlyOwn : 0;  // place of a matrix

  // The place of a product.
  __device__ __forceinline__ static constexpr int PlaceOf(int product) {
    const int own = kOwn & ~kBelow, both = kOwn & kBelow, below = kBelow & ~kOwn;
    const int before = (1 << product) - 1;
    if ((own >> product & 1) != 0) return CountBits(own & before);
    if ((both >> product & 1) != 0) return CountBits(own) + CountBits(both & before);
    if ((below >> product & 1) != 0) return CountBits(kOwn) + CountBits(below & before);
    return CountBits(kOwn | kBelow) + CountBits(~(kOwn | kBelow) & before);
  }

  // Calls with the sums that one instruction adds to, and where its lines are in a matrix. Sums are
  // in the same blocks for both matrices: they are registers in a row.
  template <bool kOfBelow, typename Function>
  __device__ __forceinline__ void ForEachBlock(Function function) {
    constexpr int kBefore = kOfBelow ? 0 : kOnlyOwn, kBehind = kOfBelow ? kOnlyBelow : 0;
    constexpr int kTiles = kTilesOfProduct;
    Blocks<0, kBefore * kTiles, 0>(function);
    Blocks<kOnlyOwn * kTiles, kBoth * kTiles, kBefore * kTiles>(function);
    Blocks<(kOnlyOwn + kBoth) * kTiles, kBehind * kTiles, kBoth * kTiles>(function);
  }

  // `b`: the batch entry of this lane's first row. A lane has all products of its units.
  __device__ __forceinline__ void Write(float* part, int b) const {
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (b + row * 8 >= kSizes.batch_slots) continue;
      float* to = part + (b + row * 8) * kSizes.row_slots + 2 * q * kSizes.gate_slots;
#pragma unroll
      for (int unit = 0; unit < kSizes.units; unit += unit % 2 == 0 ? 1 : 7) {
        float values[kSizes.gate_slots] = {};
#pragma unroll
        for (int g = 0; g < kSizes.products; ++g) {
          values[g] = tiles[PlaceOf(g) * kTilesOfProduct + unit / 8][row * 2 + unit % 2];
        }
        Store(values, to + unit * kSizes.gate_slots);
      }
    }
  }

 private:
  // The same of kCount tiles, which are the lines of the matrix from that tile on.
  template <int kTile, int kCount, int kTileOfMatrix, typename Function>
  __device__ __forceinline__ void Blocks(Function function) {
    if constexpr (kCount > 0) {
      constexpr int kNow = kCount >= 8 ? 8 : kCount >= 4 ? 4 : kCount >= 2 ? 2 : 1;
      constexpr int kTileBytes = 8 * 64 * 2;
      function(reinterpret_cast<float (&)[kNow * 4]>(tiles[kTile]), kTileOfMatrix * kTileBytes);
      Blocks<kTile + kNow, kCount - kNow, kTileOfMatrix + kNow>(function);
    }
  }

  __device__ __forceinline__ static void Store(const float (&x)[kSizes.gate_slots], float* to) {
    if constexpr (kSizes.gate_slots % 4 == 0) {
#pragma unroll
      for (int g = 0; g < kSizes.gate_slots; g += 4) {
        *reinterpret_cast<float4*>(to + g) = make_float4(x[g], x[g + 1], x[g + 2], x[g + 3]);
      }
    } else {
#pragma unroll
      for (int g = 0; g < kSizes.gate_slots; ++g) to[g] = x[g];
    }
  }
};

// A warpgroup's chunks of a matrix, and the states that it receives for them, of which kAhead are
// on their way at once.
template <typename Plan, bool kBelow>
class WgmmaChunks {
  using State = typename Plan::State;
  using Matrix = MatrixOfWave<Plan, kBelow>;
  using Sums = WgmmaSums<Plan>;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr auto kMatrix = kBelow ? kSizes.below : kSizes.own;
  static constexpr int kLoads = kMatrix.loads, kAhead = kMatrix.ahead, kLines = kMatrix.lines,
                       kParts = kSizes.parts, kTileWidth = 64;
  using Tile = SwizzledTile<kLines, kTileWidth>;

 public:
  // `shared`: where the matrix's tiles lie. For all product threads, which meet before they
  // multiply.
  __device__ __forceinline__ WgmmaChunks(const RecurrentWaveLayer& p, Words4* shared)
      : part_(WarpgroupOfBlock() / kSizes.row_parts),
        q_(threadIdx.x % 4),
        tiles_(AddressOfShared(shared)) {
    const int first = RowOfLane();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      // What is no batch entry takes the last one's state: all warps have data to wait for.
      b_[row] = first + row * 8 < kSizes.batch ? first + row * 8 : kSizes.batch - 1;
    }
    LoadWeights(p);
  }

  // The batch entry of this lane's first row of the sums.
  __device__ __forceinline__ static int RowOfLane() {
    return WarpgroupOfBlock() % kSizes.row_parts * 64 + WarpOfBlock() % 4 * 16 +
           static_cast<int>(threadIdx.x % kWarp / 4);
  }
  __device__ __forceinline__ int part() const { return part_; }

  // Asks for the first states of a slot.
  __device__ __forceinline__ void Ask(const State* slot) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) AskForChunk(slot, j);
  }

  // Adds the products of a slot's states, of which the first were asked for. A warp that times out
  // adds something else.
  __device__ __forceinline__ void Multiply(const State* slot, Watchdog* watchdog, Sums& sums) {
    uint32_t first_matrix = tiles_ + PlaceOf(part_);
    KeepInRegister(first_matrix);  // and no registers for what follows from it
    const uint64_t matrix = SharedMatrix<kTileWidth>(first_matrix);
    uint32_t zero = 0;
    KeepInRegister(zero);
#pragma unroll
    for (int j = 0; j < kLoads; j += kLooks) {
      AwaitChunks(slot, j, watchdog);
#pragma unroll
      for (int i = j; i < j + kLooks && i < kLoads; ++i) Arrange(i, zero);
      const bool first = j == 0 || j - kLooks + kAhead < kLoads;
      if (first) BeginProducts(sums.tiles);
      else FenceProducts();
      AddChunks(j, matrix, sums);
      if (j + kAhead < kLoads || j + kLooks >= kLoads) WaitForProducts(sums.tiles);
      // Until then the products read the states that others replace.
#pragma unroll
      for (int i = j + kAhead; i < j + kAhead + kLooks && i < kLoads; ++i) AskForChunk(slot, i);
    }
  }

 private:
  // Chunks that a warp waits for together.
  static constexpr int kLooks = (kAhead + 1) / 2;

  __device__ __forceinline__ void AskForChunk(const State* slot, int j) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      x_[j % kAhead][row] = {0, 0, 0, 0};
      LoadRelaxedIf(IsColumn(j), From(slot, j, row), &x_[j % kAhead][row]);
    }
  }

  // Waits for chunks j to j + kLooks. What came too early is asked for again, of all chunks that
  // are on their way: those behind them hardly came in time, either.
  __device__ __forceinline__ void AwaitChunks(const State* slot, int j, Watchdog* watchdog) {
    watchdog->Begin();
    for (;;) {
      bool missing = false;
#pragma unroll
      for (int i = j; i < j + kLooks && i < kLoads; ++i) {
        missing |= !IsWritten(x_[i % kAhead][0]) || !IsWritten(x_[i % kAhead][1]);
      }
      if (!__any_sync(kAllLanes, missing)) return;
#pragma unroll
      for (int i = j; i < j + kAhead && i < kLoads; ++i) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          Words4& x = x_[i % kAhead][row];
          LoadRelaxedIf(!IsWritten(x), From(slot, i, row), &x);
        }
      }
      if (__any_sync(kAllLanes, watchdog->TimesOut())) return;
    }
  }

  // From words of two batch entries to those of two products, in place. A load fills four registers
  // in a row with one entry's columns, a product takes four of both entries. `zero` keeps the two
  // apart for the compiler: if it had each load fill what products take, by copies, loads that are
  // repeated would wait for one another.
  __device__ __forceinline__ void Arrange(int j, uint32_t zero) {
    Words4(&x)[2] = x_[j % kAhead];
    const Words4 first = x[0], second = x[1];
    x[0] = {first.x ^ zero, second.x ^ zero, first.y ^ zero, second.y ^ zero};
    x[1] = {first.z ^ zero, second.z ^ zero, first.w ^ zero, second.w ^ zero};
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // now, and not between products
      KeepInRegister(x[half].x), KeepInRegister(x[half].y);
      KeepInRegister(x[half].z), KeepInRegister(x[half].w);
    }
  }

  // Adds a portion's products, those of one block of sums after those of another: where they take
  // turns, the compiler has each wait for the one before.
  __device__ __forceinline__ void AddChunks(int first, uint64_t matrix, Sums& sums) const {
    sums.template ForEachBlock<kBelow>([&](auto& block, int bytes) {
#pragma unroll
      for (int j = first; j < first + kLooks && j < kLoads; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Words4 x = x_[j % kAhead][half];
          const uint32_t a[4] = {x.x, x.y, x.z, x.w};
          MultiplyAdd<false>(State(), block, a,
                             Behind(matrix, PlaceOf(j * kParts) + half * 32 + bytes));
        }
      }
    });
  }

  // Of a chunk of the matrix, in bytes. Those of a warpgroup are kParts apart, and so in one half
  // of the tiles where there are two or more.
  __device__ __forceinline__ static int PlaceOf(int chunk) {
    return chunk / 2 * Tile::kBytes + chunk % 2 * 64;
  }

  __device__ __forceinline__ int Column(int j) const {
    return (j * kParts + part_) * kSizes.chunk + q_ * 8;
  }
  __device__ __forceinline__ bool IsColumn(int j) const {
    return (j + 1) * kParts * kSizes.chunk <= kMatrix.columns || Column(j) < kMatrix.columns;
  }
  __device__ __forceinline__ const Words4* From(const State* slot, int j, int row) const {
    const auto* words = reinterpret_cast<const Words4*>(slot);
    if constexpr (HasFirst(kMatrix.states)) {  // at distances that take no registers
      constexpr int kDistance = kParts * kSizes.chunk / kSizes.states_per_load;
      return words + OffsetOf(Column(0), row) + j * (kDistance * kSizes.exchange_batch);
    } else {
      return words + OffsetOf(Matrix::SlotColumn(Column(j)), row);
    }
  }
  __device__ __forceinline__ int OffsetOf(int column, int row) const {
    return SlotOffset<Plan>(b_[row], column) / kSizes.states_per_load;
  }

  // A thread takes four columns of a product at a time, neighbouring threads neighbouring units.
  // The four are those of one lane's words: two in each half of the 16 that wgmma takes.
  __device__ __forceinline__ void LoadWeights(const RecurrentWaveLayer& p) const {
    constexpr int kFours = kMatrix.tiles * kTileWidth / 4;
#pragma unroll 8  // loads on their way at once
    for (int i = threadIdx.x; i < kLines * kFours; i += kSizes.product_threads) {
      const int line = i % kLines, column = i / kLines * 4;
      const int product = ProductAt(Sums::template kFirst<kBelow> + line / kSizes.units);
      typename Plan::Weight w[4];
      DenseRow<Plan, Matrix>(p, product * kSizes.units + line % kSizes.units).Load(column, w);
      const int at = column / 32 % 2 * 32 + column / 4 % 2 * 16 + column / 8 % 4 * 2;
      const uint32_t to = tiles_ + column / kTileWidth * Tile::kBytes;
      SharedAt<uint32_t>(to + Tile::At(line, at)) = Pair(w[0], w[1]);
      SharedAt<uint32_t>(to + Tile::At(line, at + 8)) = Pair(w[2], w[3]);
    }
  }
  // The product with that place among the sums.
  __device__ __forceinline__ static int ProductAt(int place) {
    int product = 0;
#pragma unroll
    for (int g = 0; g < kSizes.products; ++g) {
      if (Sums::PlaceOf(g) == place) product = g;
    }
    return product;
  }
  __device__ __forceinline__ static uint32_t Pair(State low, State high) {
    return static_cast<uint32_t>(low.bits) | static_cast<uint32_t>(high.bits) << 16;
  }

  const int part_, q_;
  const uint32_t tiles_;
  int b_[2];
  Words4 x_[kAhead][2];  // of two batch entries: what is on its way, or has come
};

// What the product warps of a layer do in a step, as WaveMma.
template <typename Plan>
class WaveWgmma {
  using State = typename Plan::State;
  static constexpr auto kSizes = Plan::kSizes;
  static_assert(!kSizes.has_idle_warps && kSizes.has_whole_tiles);

 public:
  using Sums = WgmmaSums<Plan>;

  __device__ __forceinline__ WaveWgmma(const RecurrentWaveLayer& p, Words4* shared)
      : own_(p, shared + kSizes.tiles_at / 16), below_(p, shared + kSizes.below_tiles_at / 16) {
    FenceShared();
    MeetOtherProductWarps<Plan>();
  }

  __device__ __forceinline__ void AskBelow(const State* slot) {
    if (kSizes.asks_ahead) below_.Ask(slot);
  }
  __device__ __forceinline__ void MultiplyBelow(const State* slot, Watchdog* watchdog, Sums& sums) {
    if (!kSizes.asks_ahead) below_.Ask(slot);
    below_.Multiply(slot, watchdog, sums);
  }

  __device__ __forceinline__ void AskOwn(const State* slot) { own_.Ask(slot); }
  // Asks for the next state of the layer below, too, behind the own one, for which all wait.
  // `next_below`: may be null. True: the warp timed out, here or below, and what it would overwrite
  // may still be read.
  __device__ __forceinline__ bool MultiplyOwn(const State* slot, const State* next_below,
                                              float* partials, Watchdog* watchdog, Sums& sums) {
    if (next_below != nullptr) AskBelow(next_below);
    own_.Multiply(slot, watchdog, sums);
    const bool timed_out = __any_sync(kAllLanes, watchdog->timed_out());
    if (!timed_out) sums.Write(partials + own_.part() * kSizes.warp_part, own_.RowOfLane());
    return timed_out;
  }

 private:
  WgmmaChunks<Plan, false> own_;
  WgmmaChunks<Plan, true> below_;
};

}  // namespace jaxsparse
