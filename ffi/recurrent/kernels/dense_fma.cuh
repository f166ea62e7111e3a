// Products in exact float32. A warp's lanes form row_groups groups; lane (group, i) holds the
// weights of its group's rows in the columns that load i of a chunk brings. So each value received
// serves rows / row_groups rows, and each weight batch_tile batch entries; more groups mean fewer
// sums to add up over lanes, fewer groups fewer lanes that receive the same words.
#pragma once

#include "persistent/exchange.cuh"
#include "recurrent/kernels/dense_shape.cuh"

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

template <typename Plan>
class DenseFma {
  using State = typename Plan::State;
  static constexpr DenseSizes kSizes = Plan::kSizes;
  static_assert(!kSizes.has_idle_warps);
  static constexpr int kTiles = (kSizes.batch + kSizes.batch_tile - 1) / kSizes.batch_tile;
  static constexpr int kSumsLeft = Scattered(kSizes.sums, kSizes.group_lanes);

  using Row = DenseRow<Plan, OwnMatrix<Plan>>;

  // What a warp receives: words of 16 bytes, in loads of all lanes.
  static constexpr int kWords = kSizes.column_groups * kSizes.exchange_batch;
  static constexpr int kReceives = (kWords + kWarp - 1) / kWarp;

 public:
  __device__ __forceinline__ DenseFma(const RecurrentScanProblem& p, Words4* shared)
      : warp_(threadIdx.x / kWarp),
        lane_(threadIdx.x % kWarp),
        state_(shared + warp_ * kSizes.state_words),
        shared_(reinterpret_cast<float4*>(shared + kSizes.warps * kSizes.state_words) +
                threadIdx.x) {
    const int first_row = lane_ / kSizes.group_lanes * kSizes.lane_rows;
#pragma unroll
    for (int j = 0; j < kSizes.loads; ++j) {
      float chunk[kSizes.vectors * 4] = {};
#pragma unroll
      for (int i = 0; i < kSizes.lane_rows; ++i) {
        typename Plan::Weight row[kSizes.states_per_load];
        Row(p, first_row + i).Load(Column(j), row);
#pragma unroll
        for (int e = 0; e < kSizes.states_per_load; ++e) {
          chunk[e * kSizes.lane_rows + i] = ToAccumulator(row[e]);
        }
      }
#pragma unroll
      for (int v = 0; v < kSizes.vectors * 4; ++v) {
        if (j < kSizes.register_chunks) weights_[j < kSizes.register_chunks ? j : 0][v] = chunk[v];
      }
      if (j >= kSizes.register_chunks) {
#pragma unroll
        for (int v = 0; v < kSizes.vectors; ++v) {
          SharedWeights(j, v) =
              make_float4(chunk[4 * v], chunk[4 * v + 1], chunk[4 * v + 2], chunk[4 * v + 3]);
        }
      }
    }
  }

  // As DenseMma.
  __device__ __forceinline__ bool Multiply(const State* slot, float* partials, Watchdog* watchdog) {
    Receive(slot, watchdog);
    const bool timed_out = __any_sync(kAllLanes, watchdog->timed_out());
    if (!timed_out) AddTiles(partials);
    return timed_out;
  }

 private:
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
  __device__ __forceinline__ void AddTiles(float* partials) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      float sums[kSizes.sums] = {};
#pragma unroll
      for (int j = 0; j < kSizes.loads; ++j) {
        float chunk[kSizes.vectors * 4];
        if (j < kSizes.register_chunks) {
#pragma unroll
          for (int v = 0; v < kSizes.vectors * 4; ++v) {
            chunk[v] = weights_[j < kSizes.register_chunks ? j : 0][v];
          }
        } else {
#pragma unroll
          for (int v = 0; v < kSizes.vectors; ++v) {
            const float4 w = SharedWeights(j, v);
            chunk[4 * v] = w.x;
            chunk[4 * v + 1] = w.y;
            chunk[4 * v + 2] = w.z;
            chunk[4 * v + 3] = w.w;
          }
        }
#pragma unroll
        for (int b = 0; b < kSizes.batch_tile; ++b) {
          if (tile * kSizes.batch_tile + b >= kSizes.batch) continue;
          const Words4 x =
              state_[(j * kSizes.group_lanes + lane_ % kSizes.group_lanes) * kSizes.group_distance +
                     tile * kSizes.batch_tile + b];
#pragma unroll
          for (int e = 0; e < kSizes.states_per_load; ++e) {
            const float value = Element(State(), x, e);
#pragma unroll
            for (int i = 0; i < kSizes.lane_rows; ++i) {
              sums[i * kSizes.batch_tile + b] += chunk[e * kSizes.lane_rows + i] * value;
            }
          }
        }
      }
      int first = 0;
      bool owner = true;
      SumAndScatter<kSizes.sums, kSizes.group_lanes>(lane_, sums, &first, &owner);
#pragma unroll
      for (int i = 0; i < kSumsLeft; ++i) {
        const int row =
            lane_ / kSizes.group_lanes * kSizes.lane_rows + (first + i) / kSizes.batch_tile;
        const int b = tile * kSizes.batch_tile + (first + i) % kSizes.batch_tile;
        if (owner && row < kSizes.rows && b < kSizes.batch) {
          partials[warp_ * kSizes.warp_part + b * kSizes.row_slots + SlotOfRow<Plan>(row, b)] =
              sums[i];
        }
      }
    }
  }

  __device__ __forceinline__ int Column(int j) const {
    return ((warp_ * kSizes.loads + j) * kSizes.group_lanes + lane_ % kSizes.group_lanes) *
           kSizes.states_per_load;
  }

  // What this lane receives for its warp: every 32nd 16 bytes.
  __device__ __forceinline__ int Word(int j) const { return j * kWarp + lane_; }
  __device__ __forceinline__ int WordColumn(int j) const {
    return (warp_ * kSizes.column_groups + Word(j) / kSizes.exchange_batch) *
           kSizes.states_per_load;
  }
  __device__ __forceinline__ bool Active(int j) const {
    return Word(j) < kWords && WordColumn(j) < kSizes.columns;
  }
  __device__ __forceinline__ const Words4* From(const State* slot, int j) const {
    return reinterpret_cast<const Words4*>(slot) + warp_ * kWords + Word(j);
  }
  __device__ __forceinline__ void Place(int j, Words4 x) const {
    if (Word(j) < kWords) {
      state_[Word(j) / kSizes.exchange_batch * kSizes.group_distance +
             Word(j) % kSizes.exchange_batch] = x;
    }
  }
  __device__ __forceinline__ float4& SharedWeights(int j, int v) const {
    return shared_[((j - kSizes.register_chunks) * kSizes.vectors + v) * kSizes.product_threads];
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
  float weights_[kSizes.register_chunks > 0 ? kSizes.register_chunks : 1][kSizes.vectors * 4];
};

}  // namespace jaxsparse
