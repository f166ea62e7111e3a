// What lower layers of a wave add to a layer's products beside products by matrices: the states of
// one of them, unit by unit, which is a skip, and means over the units of the layer below, for
// norms.
//
// Product warps add up h B numbers for each mean in float32. Most often these are states that they
// multiply anyway; others they receive in the same way. Each warp leaves its sums in shared memory,
// where pointwise threads add them up. Of a skip's state, which was published some steps ago,
// pointwise threads read their own units, for which they ask a step ahead.
#pragma once

#include "persistent/exchange.cuh"
#include "recurrent/kernels/dense_mma.cuh"
#include "recurrent/kernels/wave.h"
#include "recurrent/kernels/wave_matrix.cuh"

namespace jaxsparse {

// Where a layer has its state after a step, by its exchange buffer for this block's part of the
// batch.
template <typename Plan>
__device__ __forceinline__ const typename Plan::State* SlotAfter(const void* exchange,
                                                                 const RecurrentWaveLayer& p,
                                                                 int64_t step) {
  const char* of_scan =
      static_cast<const char*>(exchange) + ScanOfLaunch<Plan>() * p.exchange_bytes;
  return reinterpret_cast<const typename Plan::State*>(of_scan) + (step + 1) * Plan::kSizes.slot;
}

// The first or the second of two numbers of 16 bits in a word.
template <typename State>
__device__ __forceinline__ float HalfOf(uint32_t word, int i) {
  return ToAccumulator(State{static_cast<uint16_t>(word >> i % 2 * 16)});
}

// Of the buffers of sums, a step's.
template <typename Plan, typename Float>
__device__ __forceinline__ Float* BufferOf(Float* sums, int64_t step) {
  constexpr WaveMeans kMeans = Plan::kSizes.means;
  return sums + static_cast<int>(step & (kMeans.buffers - 1)) * kMeans.buffer;
}

// What a product warp adds up of the layer below.
template <typename Plan>
class SumsOfBelow {
  using State = typename Plan::State;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr WaveMeans kMeans = kSizes.means;
  static constexpr int kTiles = kSizes.batch_tiles, kWords = kMeans.loads * kTiles;

 public:
  __device__ __forceinline__ SumsOfBelow()
      : warp_(threadIdx.x / kWarp), g_(threadIdx.x % kWarp / 4), q_(threadIdx.x % 4) {}

  // Asks for states that no matrix takes.
  __device__ __forceinline__ void Ask(const State* slot) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      x_[i] = {0, 0, 0, 0};
      LoadRelaxedIf(Active(i), From(slot, i), &x_[i]);
    }
  }

  // A step begins.
  __device__ __forceinline__ void Clear() {
#pragma unroll
    for (int k = 0; k < kMeans.count; ++k) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) sums_[k][n] = 0.f;
    }
  }

  // What was asked for. A warp that times out adds something else.
  __device__ __forceinline__ void AddReceived(const State* slot, Watchdog* watchdog) {
    if constexpr (kWords > 0) {
      Await<kWords>(x_, [&](int i) { return From(slot, i); }, watchdog);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const int part = CountBits(kMeans.states) == 1 ? 0 : Column(i) / kSizes.part;
        Add(NthOf(kMeans.states, part), i % kTiles, x_[i]);
      }
    }
  }

  // Of a state, eight units of a lane's row in a tile of the batch.
  __device__ __forceinline__ void Add(int state, int tile, const Words4& x) {
    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int k = 0; k < kMeans.count; ++k) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float value = HalfOf<State>(words[j / 2], j);
        sum = kMeans.mean_of[k].squared ? sum + value * value : sum + value;
      }
      if (state == kMeans.mean_of[k].state) sums_[k][tile] += sum;
    }
  }

  // Leaves the sums, zeros where nothing was added, to the other warps.
  __device__ __forceinline__ void Write(float* to) const {
#pragma unroll
    for (int k = 0; k < kMeans.count; ++k) {
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float sum = sums_[k][n];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        const int b = n * 8 + g_;
        if (q_ == 0 && b < kSizes.batch) {
          to[warp_ * kMeans.warp_floats + k * kSizes.batch_slots + b] = sum;
        }
      }
    }
  }

 private:
  static constexpr int kSlots = kMeans.count > 0 ? kMeans.count : 1;

  __device__ __forceinline__ int Column(int i) const {
    return (i / kTiles * kSizes.warps + warp_) * kSizes.chunk + q_ * 8;
  }
  __device__ __forceinline__ bool Active(int i) const {
    return i % kTiles * 8 + g_ < kSizes.batch && Column(i) < kMeans.columns;
  }
  __device__ __forceinline__ const Words4* From(const State* slot, int i) const {
    const int column = Column(i), part = column / kSizes.part;
    const int of_slot = NthOf(kMeans.states, part) * kSizes.part + column - part * kSizes.part;
    return reinterpret_cast<const Words4*>(slot + SlotOffset<Plan>(i % kTiles * 8 + g_, of_slot));
  }

  const int warp_, g_, q_;
  Words4 x_[kWords > 0 ? kWords : 1];  // what is on its way, or has come
  float sums_[kSlots][kTiles] = {};
};

// A mean of a row of the batch, of the sums that all product warps have left.
template <typename Plan>
__device__ __forceinline__ float MeanOf(const float* sums, int mean, int b) {
  constexpr auto kSizes = Plan::kSizes;
  float sum = 0.f;
#pragma unroll
  for (int warp = 0; warp < kSizes.warps; ++warp) {
    sum += sums[warp * kSizes.means.warp_floats + mean * kSizes.batch_slots + b];
  }
  return sum * (1.f / kSizes.hidden);
}

// Where a buffer of sums has the means, if one warp makes them for all.
template <typename Plan>
constexpr int kMeansOfBuffer = Plan::kSizes.warps * Plan::kSizes.means.warp_floats;

// Scales a warp's sums of products by what the layer below has by its standard deviation, row by
// row, and leaves the means. All product warps call it, when they have left what they added up.
template <typename Plan>
__device__ __forceinline__ void ScaleByNorm(float* sums_of_below, float epsilon,
                                            MmaSums<Plan>& sums) {
  constexpr auto kSizes = Plan::kSizes;
  static_assert(kSizes.batch <= kWarp);
  constexpr int kSumsAreThere = 3;  // a barrier
  WaitAt<kSizes.product_threads>(kSumsAreThere);
  const int lane = threadIdx.x % kWarp, b = lane < kSizes.batch ? lane : 0;
  float means[kSizes.means.count];
#pragma unroll
  for (int k = 0; k < kSizes.means.count; ++k) {
    means[k] = MeanOf<Plan>(sums_of_below, k, b);
    if (threadIdx.x < kSizes.batch) {
      sums_of_below[kMeansOfBuffer<Plan> + k * kSizes.batch_slots + b] = means[k];
    }
  }
  float variance = means[kSizes.means.count - 1];
  if (kSizes.means.count == 2) variance = fmaxf(variance - means[0] * means[0], 0.f);
  const float factor = rsqrtf(variance + epsilon);
#pragma unroll
  for (int n = 0; n < kSizes.batch_tiles; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float of_row = __shfl_sync(kAllLanes, factor, n * 8 + lane % 4 * 2 + e);
#pragma unroll
      for (int c = 0; c < kSizes.chains; ++c) {
#pragma unroll
        for (int m = 0; m < kSizes.row_tiles; ++m) {
          sums[c][m][n][e] *= of_row;
          sums[c][m][n][e + 2] *= of_row;
        }
      }
    }
  }
}

// What pointwise threads add to the products of their groups of neighbouring units.
template <typename Plan>
class AddedByLayers {
  using State = typename Plan::State;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr WaveMeans kMeans = kSizes.means;
  static constexpr bool kSkips = kSizes.skip.product >= 0;
  static constexpr int kNear = kSizes.near, kGroups = kSizes.items / kNear;
  static constexpr int kWords = (kNear + 1) / 2;  // of a group

 public:
  // `sums`: of the product warps.
  __device__ __forceinline__ AddedByLayers(const RecurrentWaveLayer& p, const float* sums)
      : p_(p), sums_(sums), watchdog_(p.wait_limits) {}

  // Asks for what group `n` has of a step's skip, if it lies in the layer.
  __device__ __forceinline__ void Ask(int64_t step, int n, bool real, int b, int unit) {
    if constexpr (kSkips) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words_[n][i] = 0;
      if (real && p_.skip_exchange != nullptr) Load(step, n, b, unit);
    }
  }

  // Repeats what was asked for until it is there. False if the warp timed out.
  template <typename PlaceOf>
  __device__ __forceinline__ bool Await(int64_t step, PlaceOf place_of) {
    if constexpr (kSkips) {
      watchdog_.Begin();
      for (;;) {
        bool missing = false;
#pragma unroll
        for (int n = 0; n < kGroups; ++n) missing |= IsMissing(n);
        if (!__any_sync(kAllLanes, missing)) return true;
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          const auto place = place_of(n);
          if (IsMissing(n)) Load(step, n, place.b, place.unit);
        }
        if (__any_sync(kAllLanes, watchdog_.TimesOut())) return false;
      }
    }
    return true;
  }

  template <int kProducts>
  __device__ __forceinline__ void AddTo(int64_t step, int n, int b, int unit,
                                        float (&products)[kNear][kProducts]) const {
    if constexpr (kSkips) {
#pragma unroll
      for (int i = 0; i < kNear; ++i) {
        products[i][kSizes.skip.product] += HalfOf<State>(words_[n][i / 2], kNear == 1 ? unit : i);
      }
    }
#pragma unroll
    for (int k = 0; k < kMeans.count; ++k) {
      const float* sums = BufferOf<Plan>(sums_, step);
      const float mean = kMeans.scales ? sums[kMeansOfBuffer<Plan> + k * kSizes.batch_slots + b]
                                       : MeanOf<Plan>(sums, k, b);
#pragma unroll
      for (int i = 0; i < kNear; ++i) products[i][kMeans.mean_of[k].product] += mean;
    }
  }

 private:
  __device__ __forceinline__ bool IsMissing(int n) const {
    bool missing = false;
#pragma unroll
    for (int i = 0; i < kWords; ++i) missing |= !IsWritten(words_[n][i]);
    return missing;
  }

  __device__ __forceinline__ void Load(int64_t step, int n, int b, int unit) {
    const State* slot = SlotAfter<Plan>(p_.skip_exchange, p_, step);
    const auto* from = reinterpret_cast<const uint32_t*>(
        slot + SlotOffset<Plan>(b, kSizes.skip.state * kSizes.part + unit / 2 * 2));
    if constexpr (kWords == 4) {
      const Words4 x = LoadRelaxed(reinterpret_cast<const Words4*>(from));
      words_[n][0] = x.x, words_[n][1] = x.y, words_[n][2] = x.z, words_[n][3] = x.w;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; ++i) words_[n][i] = LoadRelaxed(from + i);
    }
  }

  const RecurrentWaveLayer& p_;
  const float* const sums_;
  Watchdog watchdog_;
  uint32_t words_[kGroups][kWords] = {};
};

}  // namespace jaxsparse
