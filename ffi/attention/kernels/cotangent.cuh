// What both kernels by warpgroups of the transpose of attention's derivative share on the device:
// items of work and copies.
#pragma once

#include "attention/kernels/cotangent_entries.cuh"
#include "attention/kernels/products.cuh"
#include "attention/kernels/store_rows.cuh"
#include "cuda/pipeline.cuh"

namespace jaxsparse {

constexpr uint32_t kNoItem = 0xffffffffu;
// A block's items by turns: one may be copied, one multiplied, and results of one be written.
constexpr int kItemSlots = 3;

// A row of tiles of a head, as the producer tells consumers.
struct CotangentItem {
  BatchPlace place;
  uint32_t head;         // of its batch entry's
  uint32_t head_of_all;  // of all batch entries
  uint32_t row;          // of tiles; kNoItem: there are no more
};

// Items that a block has taken. The thread that takes one tells two readers of it: who waits here,
// and consumers, by a barrier of their own.
struct CotangentItemSlots {
  CotangentItem slots[kItemSlots];
  uint64_t taken[kItemSlots];

  __device__ __forceinline__ void Init() {
    for (int i = 0; i < kItemSlots; ++i) InitBarrier(&taken[i], 1);
  }

  // Takes the block's item of this number, by one thread: a row of `mask` of one of so many heads
  // of a batch entry. Blocks begin with that of their own number.
  __device__ __forceinline__ const CotangentItem& Take(const AttentionCotangentTiles& p,
                                                       const MaskTiles& mask, int counter,
                                                       uint32_t heads_of_entry, uint32_t number) {
    const uint32_t slot = number % kItemSlots;
    CotangentItem& item = slots[slot];
    const AttentionItems& items = p.items;
    uint32_t next = blockIdx.x;
    if (number > 0) {
      next =
          gridDim.x + FetchAndAddOfGpu(reinterpret_cast<uint32_t*>(p.workspace.data) + counter, 1);
    }
    if (next < items.Count()) {
      const AttentionItems::Place at = items.At(next);
      item.place.Set(p.batch, at.head / heads_of_entry);
      item.head = at.head % heads_of_entry;
      item.head_of_all = at.head;
      const auto per_group = heads_of_entry / static_cast<uint32_t>(p.groups);
      const auto own =
          static_cast<uint32_t>(mask.Own(item.head / per_group, item.head % per_group));
      item.row = MaskRowInOrder(mask, p.batch, item.place, own, at.row);
    } else {
      item.row = kNoItem;
    }
    Arrive(&taken[slot]);
    return item;
  }
  __device__ __forceinline__ const CotangentItem& Await(uint32_t number) {
    const auto at = PipelineState<kItemSlots>::Of(number);
    WaitForPhase(&taken[at.stage], at.phase);
    return slots[at.stage];
  }
};

// Has kLines lines of kWidth numbers copied, in blocks of 64 numbers of each.
template <int kWidth, int kLines>
__device__ __forceinline__ void CopyLines(unsigned char* to, const TensorMap& map, uint32_t head,
                                          uint32_t line, uint32_t entry, uint64_t* full) {
#pragma unroll
  for (int column = 0; column < kWidth; column += 64) {
    const int at[] = {column, static_cast<int>(head), static_cast<int>(line),
                      static_cast<int>(entry)};
    TensorCopy(to + column * kLines * 2, map, at, full);
  }
}

// Shifts of 64 rows and their ct_sums on the way through the registers of a warp to shared memory,
// where the latter lie behind the former. They need not be aligned, as bulk copies want.
struct ShiftsOfRows {
  static constexpr int kOfLane = kMaskCell / kWarp;
  float lse[kOfLane], ct_sums[kOfLane];

  // Of rows from `first` on; there are `rows` in all.
  __device__ __forceinline__ void Load(const float* all_lse, const float* all_ct_sums,
                                       uint32_t first, uint32_t rows) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const uint32_t row = first + i * kWarp + threadIdx.x % kWarp;
      lse[i] = ct_sums[i] = 0;
      if (row >= rows) continue;
      lse[i] = all_lse[row];
      ct_sums[i] = all_ct_sums[row];
    }
  }
  __device__ __forceinline__ void Store(unsigned char* to) const {
    float* numbers = reinterpret_cast<float*>(to) + threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      numbers[i * kWarp] = ShiftOf(lse[i]);
      numbers[kMaskCell + i * kWarp] = ct_sums[i];
    }
  }
};

}  // namespace jaxsparse
