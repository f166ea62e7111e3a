// Products in exact float32. A warp's lanes form kRowGroups groups; lane (group, i) holds the
// weights of its group's rows in the columns that load i of a chunk brings. So each value received
// serves kRows / kRowGroups rows, and each weight kBatchTile batch entries; more groups mean fewer
// sums to add up over lanes, fewer groups fewer lanes that receive the same words.
#pragma once

#include "persistent/exchange.cuh"
#include "recurrent/dense_shape.cuh"

namespace jaxsparse {

// The sums of v[0..kCount) over groups of kLanes lanes, scattered over them while the count is
// even: a lane ends with the sums from index *first on at the front of v. *owner is false where
// another lane has the same ones.
template <int kCount, int kLanes>
__device__ __forceinline__ void SumAndScatter(int lane, float* v, int* first, bool* owner) {
  if constexpr (kLanes > 1) {
    const bool upper = lane & (kLanes / 2);
    if constexpr (kCount % 2 == 0) {
      constexpr int kHalf = kCount / 2;
#pragma unroll
      for (int i = 0; i < kHalf; ++i) {
        const float send = upper ? v[i] : v[i + kHalf];
        const float keep = upper ? v[i + kHalf] : v[i];
        v[i] = keep + __shfl_xor_sync(kAllLanes, send, kLanes / 2);
      }
      if (upper) *first += kHalf;
      SumAndScatter<kHalf, kLanes / 2>(lane, v, first, owner);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) v[i] += __shfl_xor_sync(kAllLanes, v[i], kLanes / 2);
      if (upper) *owner = false;
      SumAndScatter<kCount, kLanes / 2>(lane, v, first, owner);
    }
  }
}
// How many sums are left in a lane.
constexpr int Scattered(int count, int lanes) {
  for (; lanes > 1; lanes /= 2) {
    if (count % 2 == 0) count /= 2;
  }
  return count;
}

template <typename Step, typename Plan>
class DenseFma {
  using Shape = DenseShape<Step, Plan>;
  using State = typename Plan::State;
  static constexpr int kGroupLanes = kWarp / Plan::kRowGroups;
  static constexpr int kPerLoad = Shape::kStatesPerLoad;
  static constexpr int kChunk = kGroupLanes * kPerLoad;
  static constexpr int kChunks = Shape::Ceil(Shape::kColumns, kChunk);
  static constexpr int kLoads = Shape::Ceil(kChunks, Plan::kWarps);  // chunks of a warp
  static constexpr int kInRegisters =
      Plan::kRegisterChunks < kLoads ? Plan::kRegisterChunks : kLoads;
  // A warp that waits for nobody would run ahead of the others.
  static_assert(kChunks > (Plan::kWarps - 1) * kLoads);
  static constexpr int kLaneRows = Shape::Ceil(Shape::kRows, Plan::kRowGroups);
  static constexpr int kTile = Plan::kBatchTile < Plan::kBatch ? Plan::kBatchTile : Plan::kBatch;
  static constexpr int kTiles = Shape::Ceil(Plan::kBatch, kTile);
  static constexpr int kVectors = Shape::Ceil(kLaneRows * kPerLoad, 4);  // weights of a chunk
  static constexpr int kSums = kLaneRows * kTile;
  static constexpr int kSumsLeft = Scattered(kSums, kGroupLanes);

  // A warp's part of the state: 16 bytes for each group of columns and batch entry. The distance
  // between groups is odd, so that lanes with neighbouring groups read different banks.
  static constexpr int kGroups = kLoads * kGroupLanes;
  static constexpr int kWords = kGroups * Shape::kExchangeBatch;
  static constexpr int kReceives = Shape::Ceil(kWords, kWarp);
  static constexpr int kDistance = Shape::kExchangeBatch | 1;
  static constexpr int kStateWords = kGroups * kDistance;

 public:
  static constexpr int kSharedBytes =
      (kLoads - kInRegisters) * kVectors * Shape::kProductThreads * 16 +
      Plan::kWarps * kStateWords * 16;

  __device__ __forceinline__ DenseFma(const RecurrentScanProblem& p, Words4* shared)
      : warp_(threadIdx.x / kWarp),
        lane_(threadIdx.x % kWarp),
        state_(shared + warp_ * kStateWords),
        shared_(reinterpret_cast<float4*>(shared + Plan::kWarps * kStateWords) + threadIdx.x) {
    const int first_row = lane_ / kGroupLanes * kLaneRows;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      float chunk[kVectors * 4] = {};
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        typename Plan::Weight row[kPerLoad];
        DenseRow<Step, Plan>(p, first_row + i).Load(Column(j), row);
#pragma unroll
        for (int e = 0; e < kPerLoad; ++e) chunk[e * kLaneRows + i] = ToAccumulator(row[e]);
      }
#pragma unroll
      for (int v = 0; v < kVectors * 4; ++v) {
        if (j < kInRegisters) weights_[j < kInRegisters ? j : 0][v] = chunk[v];
      }
      if (j >= kInRegisters) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          SharedWeights(j, v) =
              make_float4(chunk[4 * v], chunk[4 * v + 1], chunk[4 * v + 2], chunk[4 * v + 3]);
        }
      }
    }
  }

  __device__ __forceinline__ void Start(const RecurrentScanProblem& p) {
#pragma unroll
    for (int j = 0; j < kReceives; ++j) {
      const int b = Word(j) % Shape::kExchangeBatch;
      Place(j, Active(j) && b < Plan::kBatch ? LoadInitialState<Step, Plan>(p, b, WordColumn(j))
                                             : Words4{0, 0, 0, 0});
    }
    __syncwarp();
  }

  __device__ __forceinline__ void Receive(const State* slot, Watchdog* watchdog) {
    constexpr int kAtOnce = kReceives < 8 ? kReceives : 8;
#pragma unroll
    for (int first = 0; first < kReceives; first += kAtOnce) {
      Words4 x[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int j = first + i;
        x[i] = {0, 0, 0, 0};
        if (j < kReceives) LoadRelaxedIf(Active(j), From(slot, j), &x[i]);
      }
      Await<kAtOnce>(x, [&](int i) { return From(slot, first + i); }, watchdog);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < kReceives) Place(first + i, x[i]);
      }
    }
    __syncwarp();
  }

  // Adds tile after tile of the batch and writes this warp's part of the products.
  __device__ __forceinline__ void Multiply(float* partials) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float sums[kSums] = {};
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        float chunk[kVectors * 4];
        if (j < kInRegisters) {
#pragma unroll
          for (int v = 0; v < kVectors * 4; ++v) {
            chunk[v] = weights_[j < kInRegisters ? j : 0][v];
          }
        } else {
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            const float4 w = SharedWeights(j, v);
            chunk[4 * v] = w.x;
            chunk[4 * v + 1] = w.y;
            chunk[4 * v + 2] = w.z;
            chunk[4 * v + 3] = w.w;
          }
        }
#pragma unroll
        for (int b = 0; b < kTile; ++b) {
          if (tile * kTile + b >= Plan::kBatch) continue;
          const Words4 x =
              state_[(j * kGroupLanes + lane_ % kGroupLanes) * kDistance + tile * kTile + b];
#pragma unroll
          for (int e = 0; e < kPerLoad; ++e) {
            const float value = Element(State(), x, e);
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) {
              sums[i * kTile + b] += chunk[e * kLaneRows + i] * value;
            }
          }
        }
      }
      int first = 0;
      bool owner = true;
      SumAndScatter<kSums, kGroupLanes>(lane_, sums, &first, &owner);
#pragma unroll
      for (int i = 0; i < kSumsLeft; ++i) {
        const int row = lane_ / kGroupLanes * kLaneRows + (first + i) / kTile;
        const int b = tile * kTile + (first + i) % kTile;
        if (owner && row < Shape::kRows && b < Plan::kBatch) {
          partials[warp_ * Shape::kWarpPart + b * Shape::kRowSlots + Shape::SlotOfRow(row, b)] =
              sums[i];
        }
      }
    }
  }

 private:
  __device__ __forceinline__ int Column(int j) const {
    return ((warp_ * kLoads + j) * kGroupLanes + lane_ % kGroupLanes) * kPerLoad;
  }

  // What this lane receives for its warp: every 32nd 16 bytes.
  __device__ __forceinline__ int Word(int j) const { return j * kWarp + lane_; }
  __device__ __forceinline__ int WordColumn(int j) const {
    return (warp_ * kGroups + Word(j) / Shape::kExchangeBatch) * kPerLoad;
  }
  __device__ __forceinline__ bool Active(int j) const {
    return Word(j) < kWords && WordColumn(j) < Shape::kColumns;
  }
  __device__ __forceinline__ const Words4* From(const State* slot, int j) const {
    return reinterpret_cast<const Words4*>(slot) + warp_ * kWords + Word(j);
  }
  __device__ __forceinline__ void Place(int j, Words4 x) const {
    if (Word(j) < kWords) {
      state_[Word(j) / Shape::kExchangeBatch * kDistance + Word(j) % Shape::kExchangeBatch] = x;
    }
  }
  __device__ __forceinline__ float4& SharedWeights(int j, int v) const {
    return shared_[((j - kInRegisters) * kVectors + v) * Shape::kProductThreads];
  }
  __device__ __forceinline__ static uint32_t Part(Words4 x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
  }
  __device__ __forceinline__ static float Element(float, Words4 x, int e) {
    return __uint_as_float(Part(x, e));
  }
  template <typename Half>
  __device__ __forceinline__ static float Element(Half, Words4 x, int e) {
    return ToAccumulator(Half{static_cast<uint16_t>(Part(x, e / 2) >> (e % 2 * 16))});
  }

  const int warp_, lane_;
  Words4* const state_;
  float4* const shared_;
  float weights_[kInRegisters > 0 ? kInRegisters : 1][kVectors * 4];
};

}  // namespace jaxsparse
