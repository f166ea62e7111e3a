// Scores in both kernels of the transpose of attention's derivative: the function of each number
// that a thread has, its derivatives, and what is dropped.
#pragma once

#include "attention/kernels/cotangent.cuh"

namespace jaxsparse {

// The scores of 64 queries and a tile of keys, as a thread has them in the kernel of rows. What
// says where operands are is found anew for each tile: there is no register to keep it in.
template <typename Scoring>
class TileScores {
  HeadScores<Scoring> head_;
  uint32_t first_query_ = 0, first_key_ = 0;

 public:
  __device__ __forceinline__ TileScores(const AttentionCotangentTiles& p, const CotangentItem& item,
                                        int group, uint32_t entry)
      : head_(p) {
    if constexpr (Scoring::kExists) {
      head_.Set(item.place, item.head);
      const uint32_t row = threadIdx.x % kWarpgroup / kWarp * 16 + threadIdx.x % kWarp / 4;
      first_query_ = item.row * kMaskTile + group * kMaskCell + row;
      first_key_ = MaskColumnOf(entry) * kMaskTile + threadIdx.x % 4 * 2;
    }
  }

  // The function of the thread's number i, and its derivative.
  __device__ __forceinline__ float Of(int i, float product, float* derivative) const {
    return head_.Of(product, first_query_ + i / 2 % 2 * 8, first_key_ + i / 4 * 8 + i % 2,
                    derivative);
  }
  // The same, and its derivatives by operands.
  __device__ __forceinline__ float Of(int i, float product, float* derivative,
                                      float* gradients) const {
    return head_.Of(product, first_query_ + i / 2 % 2 * 8, first_key_ + i / 4 * 8 + i % 2,
                    derivative, gradients);
  }
  // Stores the number's own cotangent of an operand, whose are (queries, keys).
  __device__ __forceinline__ void Store(const AttentionCotangentTiles& p, float* cotangents, int i,
                                        float cotangent) const {
    const uint32_t row = first_query_ + i / 2 % 2 * 8, column = first_key_ + i / 4 * 8 + i % 2;
    if (row < p.queries && column < p.keys) cotangents[row * p.keys + column] = cotangent;
  }
  // Cotangents of probabilities: what is dropped has none.
  template <int kCount>
  __device__ __forceinline__ void Drop(float (&cotangents)[kCount]) const {
    head_.DropPairs(first_query_, first_key_, head_.KeptScale(), cotangents);
  }
};

// The query head and the first query of each step, where consumers want to know them.
template <bool kTold, int kStages>
struct KeysPlaces {
  uint32_t heads[kStages], first_queries[kStages];

  __device__ __forceinline__ void Tell(uint32_t stage, uint32_t head, uint32_t first_query) {
    heads[stage] = head;
    first_queries[stage] = first_query;
  }
};
template <int kStages>
struct KeysPlaces<false, kStages> {
  __device__ __forceinline__ void Tell(uint32_t, uint32_t, uint32_t) {}
};

// The same of a cell of 64 keys and 64 queries, in the kernel of keys.
template <typename Scoring>
class CellScores {
  HeadScores<Scoring> head_;
  uint32_t first_query_ = 0, first_key_ = 0;

 public:
  template <typename Places>
  __device__ __forceinline__ CellScores(const AttentionCotangentTiles& p, const Places& places,
                                        uint32_t stage, const CotangentItem& item, int group)
      : head_(p) {
    if constexpr (Scoring::kExists) {
      head_.Set(item.place, places.heads[stage]);
      const uint32_t row = threadIdx.x % kWarpgroup / kWarp * 16 + threadIdx.x % kWarp / 4;
      first_key_ = item.row * kMaskTile + group * kMaskCell + row;
      first_query_ = places.first_queries[stage] + threadIdx.x % 4 * 2;
    }
  }

  // The function of the thread's number i, and its derivative.
  __device__ __forceinline__ float Of(int i, float product, float* derivative) const {
    return head_.Of(product, first_query_ + i / 4 * 8 + i % 2, first_key_ + i / 2 % 2 * 8,
                    derivative);
  }
  // Makes those of four probabilities, from a column of queries on, 0 that are dropped, and clears
  // their bits.
  __device__ __forceinline__ void KeepOrDrop(int column, uint32_t& kept,
                                             float (&probabilities)[4]) const {
    if constexpr (Scoring::kDrops) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t hash = head_.HashOfRow(first_query_ + column + i);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          if (head_.Keeps(hash, first_key_ + j * 8)) continue;
          kept &= ~(1u << (column / 2 + 2 * j + i));
          probabilities[2 * j + i] = 0;
        }
      }
    }
  }
  __device__ __forceinline__ float KeptScale() const { return head_.KeptScale(); }
};

}  // namespace jaxsparse
