// Sums of one block's sparse rows times the state. The entries stay with their thread for the whole
// scan, in registers and, those that find no room there, in shared memory; the state comes from
// shared memory, one wide load per entry for several batch entries.
#pragma once

#include "cuda/device.cuh"
#include "recurrent/kernels/sparse.h"
#include "recurrent/scan_of_block.cuh"

namespace jaxsparse {

// The values of one column for kWidth batch entries, as they lie in memory: 4, 8 or 16 bytes.
template <typename State, int kWidth>
struct Piece {
  static constexpr int kBytes = kWidth * static_cast<int>(sizeof(State));
  static constexpr int kWords = kBytes / 4;
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);

  uint32_t words[kWords];

  __device__ __forceinline__ static Piece FromShared(uint32_t address) {
    Piece v;
    LoadShared(address, v.words);
    return v;
  }

  __device__ __forceinline__ float Get(int i) const {
    if constexpr (sizeof(State) == 4) {
      return __uint_as_float(words[i]);
    } else {
      const uint32_t word = words[i / 2];
      return ToAccumulator(State{static_cast<uint16_t>(i % 2 == 0 ? word & 0xffffu : word >> 16)});
    }
  }
};

// bfloat16 pairs unpack in one instruction each.
template <int kWidth>
__device__ __forceinline__ float Unpack(const Piece<bfloat16, kWidth>& v, int i) {
  const uint32_t word = v.words[i / 2];
  return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
}
template <typename State, int kWidth>
__device__ __forceinline__ float Unpack(const Piece<State, kWidth>& v, int i) {
  return v.Get(i);
}

// Sums kCount values over kGroup neighbouring lanes, halving the values with every exchange while
// there are several: kCount - 1 exchanges instead of kCount * log2(kGroup). Afterwards v[0 ..
// max(kCount / kGroup, 1)) are the sums from number FirstSum() on.
template <int kGroup, int kCount>
__device__ __forceinline__ void SumOverGroup(float* v) {
  if constexpr (kGroup > 1) {
    constexpr int kDistance = kGroup / 2;
    if constexpr (kCount > 1) {
      const bool upper = (threadIdx.x & kDistance) != 0;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const float give = upper ? v[i] : v[i + kCount / 2];
        const float keep = upper ? v[i + kCount / 2] : v[i];
        v[i] = keep + __shfl_xor_sync(kAllLanes, give, kDistance);
      }
      SumOverGroup<kDistance, kCount / 2>(v);
    } else {
      v[0] += __shfl_xor_sync(kAllLanes, v[0], kDistance);
      SumOverGroup<kDistance, 1>(v);
    }
  }
}
template <int kGroup, int kCount>
struct GroupShare {
  static constexpr int kSums = kCount > kGroup ? kCount / kGroup : 1;
  static constexpr int kCopies = kCount < kGroup ? kGroup / kCount : 1;  // lanes with the same sum
  __device__ static int FirstSum() { return threadIdx.x % kGroup / kCopies * kSums; }
  __device__ static bool StoresSum() { return threadIdx.x % kCopies == 0; }
};

template <typename Plan>
class SparseProduct {
 public:
  using State = typename Plan::State;
  using Weight = typename Plan::Weight;
  static constexpr SparseSizes kSizes = Plan::kSizes;
  static constexpr SparseShape kShape = kSizes.form.shape;
  using StatePiece = Piece<State, kSizes.width>;
  static_assert(StatePiece::kBytes == kSizes.form.piece_bytes);
  static_assert(kSizes.slice % 16 == 0 && kSizes.part_slice % 16 == 0);

  __device__ SparseProduct(const RecurrentScanProblem& p, const uint32_t* record, uint32_t shared)
      : shared_(shared + threadIdx.x * 8) {
    const auto* weights =
        static_cast<const Weight*>(p.weights) + DirectionOf<Plan>(p) * p.weights_size;
#pragma unroll
    for (int l = 0; l < kShape.lanes; ++l) {
      destination_[l] = DestinationOf(
          record[kShape.groups_at() + (l * kShape.threads + threadIdx.x) / kShape.group]);
#pragma unroll
      for (int n = 0; n < kShape.entries; ++n) {
        const int slot = (l * kShape.entries + n) * kShape.threads + threadIdx.x;
        const uint32_t column =
            Within(record[kShape.columns_at() + slot], kSizes.form.shared_columns());
        const uint32_t at = record[kShape.values_at() + slot];
        const float value = at < p.weights_size ? ToAccumulator(weights[at]) : 0.0f;
        if (n < kSizes.register_entries) {
          if constexpr (kSizes.index_with_value) {
            Weight narrow;
            FromAccumulator(value, &narrow);
            indices_with_values_[l][n] = column | static_cast<uint32_t>(narrow.bits) << 16;
          } else {
            offsets_[l][n] = column * StatePiece::kBytes;
            values_[l][n] = value;
          }
        } else {
          StoreShared(SharedAddress(l, n), column * StatePiece::kBytes, __float_as_uint(value));
        }
      }
    }
  }

  // Calls send<count>(destination, first batch entry, sums) for the partial sums. `state` is the
  // shared address of the block's part of the state.
  template <typename Send>
  __device__ __forceinline__ void FromShared(uint32_t state, Send send) const {
#pragma unroll
    for (int l = 0; l < kShape.lanes; ++l) {
      float sums[kSizes.pieces][kSizes.width] = {};
#pragma unroll
      for (int n = 0; n < kShape.entries; ++n) {
        uint32_t offset;
        float value;
        GetEntry(l, n, &offset, &value);
#pragma unroll
        for (int piece = 0; piece < kSizes.pieces; ++piece) {
          Add(StatePiece::FromShared(state + offset + piece * kSizes.shared_slice), value,
              sums[piece]);
        }
      }
      Finish(l, sums, send);
    }
  }

 private:
  // Where a group's sum goes, or -1; so if the record has a place that no block has.
  __device__ static int DestinationOf(uint32_t word) {
    const bool exists = word >> 16 < kShape.cluster && (word & 0xffff) < kSizes.form.partial_sums;
    return exists ? static_cast<int>(word) : -1;
  }

  __device__ uint32_t SharedAddress(int l, int n) const {
    return shared_ +
           (l * kSizes.shared_entries + n - kSizes.register_entries) * (kShape.threads * 8);
  }

  __device__ __forceinline__ void GetEntry(int l, int n, uint32_t* offset, float* value) const {
    if (n >= kSizes.register_entries) {
      uint32_t entry[2];
      LoadShared(SharedAddress(l, n), entry);
      *offset = entry[0];
      *value = __uint_as_float(entry[1]);
    } else if constexpr (kSizes.index_with_value) {
      *offset = (indices_with_values_[l][n] & 0xffffu) * StatePiece::kBytes;
      *value = ToAccumulator(Weight{static_cast<uint16_t>(indices_with_values_[l][n] >> 16)});
    } else {
      *offset = offsets_[l][n];
      *value = values_[l][n];
    }
  }

  __device__ __forceinline__ static void Add(const StatePiece& state, float value, float* sums) {
#pragma unroll
    for (int b = 0; b < kSizes.width; ++b) sums[b] = fmaf(value, Unpack(state, b), sums[b]);
  }

  template <typename Send>
  __device__ __forceinline__ void Finish(int l, float (&sums)[kSizes.pieces][kSizes.width],
                                         Send send) const {
    using Share = GroupShare<kShape.group, kSizes.width>;
#pragma unroll
    for (int piece = 0; piece < kSizes.pieces; ++piece) {
      SumOverGroup<kShape.group, kSizes.width>(sums[piece]);
      if constexpr (kShape.cluster > 1) {
        // One message per group: it is their number that counts between blocks.
        float all[kSizes.width];
#pragma unroll
        for (int i = 0; i < kSizes.width; ++i) {
          all[i] = __shfl_sync(kAllLanes, sums[piece][i % Share::kSums],
                               i / Share::kSums * Share::kCopies, kShape.group);
        }
        if (destination_[l] >= 0 && threadIdx.x % kShape.group == 0) {
          send.template operator()<kSizes.width>(destination_[l], piece * kSizes.width, all);
        }
      } else if (destination_[l] >= 0 && Share::StoresSum()) {
        send.template operator()<Share::kSums>(
            destination_[l], piece * kSizes.width + Share::FirstSum(), sums[piece]);
      }
      __syncwarp();  // the next exchange of lanes and the next barrier need whole warps
    }
  }

  static constexpr int kTogetherSize =
      kSizes.index_with_value && kSizes.register_entries > 0 ? kSizes.register_entries : 1;
  static constexpr int kApartSize =
      kSizes.index_with_value || kSizes.register_entries == 0 ? 1 : kSizes.register_entries;
  int destination_[kShape.lanes];
  uint32_t indices_with_values_[kShape.lanes][kTogetherSize];
  uint32_t offsets_[kShape.lanes][kApartSize];
  float values_[kShape.lanes][kApartSize];
  uint32_t shared_;
};

}  // namespace jaxsparse
