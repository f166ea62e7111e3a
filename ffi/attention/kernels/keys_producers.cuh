// What controls the kernel of cotangents of keys and values, and its producers: a thread that takes
// items and has their keys and values copied, and warps that have queries and their cotangents
// copied, step by step.
#pragma once

#include "attention/kernels/column_terms.cuh"
#include "attention/kernels/cotangent.cuh"
#include "attention/kernels/cotangent_scores.cuh"
#include "attention/kernels/keys.h"

namespace jaxsparse {

template <AttentionKeysConfig kConfig, bool kScored>
struct KeysControl {
  uint64_t full[kConfig.kStages], empty[kConfig.kStages];
  uint64_t keys_full[kCotangentGroups], keys_empty[kCotangentGroups];
  CotangentItemSlots items;
  // The states of both warpgroups' cells, in two bits each; 0 ends an item.
  uint32_t steps[kConfig.kStages];
  // Of the query head that a producer of steps is at.
  struct Head {
    MaskRow row;
    const float *lse, *ct_sums;
    uint32_t number, query_entry, ct_out_entry;
  };
  Head heads[kKeysStepWarps];
  KeysPlaces<kScored, kConfig.kStages> places;

  // Whether lse and ct_sums are terms of products: no function is in between.
  static constexpr bool kHasTerms = !kScored;

  using State = PipelineState<kConfig.kStages>;
  __device__ __forceinline__ PipelineStage StageAt(State at) {
    return {&full[at.stage], &empty[at.stage], at.phase};
  }
};

// A thread that takes items and has their keys and values copied.
template <AttentionKeysConfig kConfig, typename Control>
__device__ __forceinline__ void CopyKeys(const AttentionCotangentTiles& p, Control& control,
                                         unsigned char* shared) {
  constexpr int kTileBytes = kConfig.TileBytes();
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    const CotangentItem& item = control.items.Take(p, p.transposed_mask, kCotangentKeysCounter,
                                                   static_cast<uint32_t>(p.groups), number);
    const bool is_last = item.row == kNoItem;
#pragma unroll 1
    for (int group = 0; group < kCotangentGroups; ++group) {
      uint64_t* full = &control.keys_full[group];
      WaitForPhase(&control.keys_empty[group], (number & 1) ^ 1);
      if (is_last) {
        Arrive(full);
        continue;
      }
      ArriveAndExpect(full, 2 * kTileBytes);
      const uint32_t first = item.row * kMaskTile + group * kMaskCell;
      unsigned char* keys = shared + group * kTileBytes;
      unsigned char* values = keys + kCotangentGroups * kTileBytes;
      CopyLines<kConfig.head_size, kMaskCell>(keys, p.key_tiles, item.head, first,
                                              item.place.OwnEntry(p.batch, p.key), full);
      CopyLines<kConfig.head_size, kMaskCell>(values, p.value_tiles, item.head, first,
                                              item.place.OwnEntry(p.batch, p.value), full);
    }
    if (is_last) return;
  }
}

// Stores terms of columns: shifts over the scale times log2(e), of products of queries and keys;
// behind them ct_sums, of those of ct_out and values.
__device__ __forceinline__ void StoreTerms(const ShiftsOfRows& rows, unsigned char* to,
                                           float log2_scale) {
  static_assert(ColumnTerms::kBytes == AttentionKeysConfig::kTermsBytes);
  const float by = ApproximateReciprocal(log2_scale);
#pragma unroll
  for (int i = 0; i < ShiftsOfRows::kOfLane; ++i) {
    const int column = i * kWarp + threadIdx.x % kWarp;
    ColumnTerms::Set(to, column, ShiftOf(rows.lse[i]) * by);
    ColumnTerms::Set(to + ColumnTerms::kBytes, column, rows.ct_sums[i]);
  }
}

// A warp that has queries and their cotangents copied: one of several, which take steps in turns,
// so that a step does not wait for what another one reads from memory.
template <typename T, AttentionKeysConfig kConfig, typename Control>
class KeysSteps {
  // One warp may be at an item while the others end as many as they are, whose slots come next.
  static_assert(kKeysStepWarps < kItemSlots);
  const AttentionCotangentTiles& p_;
  Control& control_;
  unsigned char* shared_;
  typename Control::Head& head_;
  int until_own_;  // steps
  typename Control::State at_;

  // By one thread: begins a query head.
  __device__ __forceinline__ void SetHead(const CotangentItem& item, uint32_t of_group) {
    const auto own = static_cast<uint32_t>(p_.transposed_mask.Own(item.head, of_group));
    const uint32_t number = item.head * static_cast<uint32_t>(p_.per_group) + of_group;
    head_.row.Set(p_.transposed_mask, p_.batch, item.place, own, item.row);
    head_.lse = item.place.At<const float>(p_.batch, p_.lse) + number * p_.queries;
    head_.ct_sums = item.place.At<const float>(p_.batch, p_.ct_sums) + number * p_.queries;
    head_.number = number;
    head_.query_entry = item.place.OwnEntry(p_.batch, p_.query);
    head_.ct_out_entry = item.place.OwnEntry(p_.batch, p_.ct_out);
  }

  // Whether the next step is this warp's.
  __device__ __forceinline__ bool IsOwn() const { return until_own_ == 0; }
  __device__ __forceinline__ void Advance() {
    until_own_ = (IsOwn() ? kKeysStepWarps : until_own_) - 1;
    at_.Advance();
  }

  // A step of 64 queries: the half `across` of an entry that has words at `at`.
  __device__ __forceinline__ void Step(uint32_t entry, int32_t at, int across) {
    const uint32_t upper = static_cast<uint32_t>(MaskCellOf(entry, 0, across));
    const uint32_t lower = static_cast<uint32_t>(MaskCellOf(entry, 1, across));
    if ((upper | lower) == 0) return;
    if (!IsOwn()) {
      Advance();
      return;
    }
    const int lane = threadIdx.x % kWarp;
    const uint32_t first =
        head_.row.ColumnOf(entry) * kMaskTile + static_cast<uint32_t>(across) * kMaskCell;
    unsigned char* side = shared_ + kConfig.SideAt() + at_.stage * kConfig.kSideBytes;
    const PipelineStage stage = control_.StageAt(at_);
    ShiftsOfRows shifts;
    shifts.Load(head_.lse, head_.ct_sums, first, static_cast<uint32_t>(p_.queries));
    stage.WaitUntilEmpty();
    if (lane == 0) {
      constexpr uint32_t kWordBytes = kMaskCellWords * 4, kPartial = 1;
      const uint32_t words[] = {upper == kPartial ? kWordBytes : 0,
                                lower == kPartial ? kWordBytes : 0};
      control_.steps[at_.stage] = upper | lower << 2;
      control_.places.Tell(at_.stage, head_.number, first);
      stage.Expect(kConfig.StageBytes() + words[0] + words[1]);
      unsigned char* to = shared_ + kConfig.StagesAt() + at_.stage * kConfig.StageBytes();
      CopyLines<kConfig.head_size, kMaskCell>(to, p_.query_tiles, head_.number, first,
                                              head_.query_entry, stage.full);
      CopyLines<kConfig.head_size, kMaskCell>(to + kConfig.TileBytes(), p_.ct_out_tiles,
                                              head_.number, first, head_.ct_out_entry, stage.full);
#pragma unroll
      for (int group = 0; group < kCotangentGroups; ++group) {
        if (words[group] == 0) continue;
        const uint32_t* from = head_.row.WordsAt(at, CountPartialCells(entry)) +
                               CountPartialCells(entry, group, across) * kMaskCellWords;
        BulkCopy(side + kConfig.kWordsAt + group * kWordBytes, from, kWordBytes, stage.full);
      }
    }
    if constexpr (Control::kHasTerms) {
      StoreTerms(shifts, side, p_.log2_scale);
      FenceShared();
    } else {
      shifts.Store(side);
    }
    stage.Filled();
    Advance();
  }

  // All of a query head.
  __device__ __forceinline__ void OfHead() {
#pragma unroll 1
    for (uint32_t i = 0; i < 2 * head_.row.count; ++i) {
      const MaskRow& row = head_.row;
      Step(WithWords(row, row.entries[i / 2]), row.bits_at[i / 2], static_cast<int>(i % 2));
    }
  }

 public:
  __device__ KeysSteps(const AttentionCotangentTiles& p, Control& control, unsigned char* shared,
                       int warp)
      : p_(p), control_(control), shared_(shared), head_(control.heads[warp]), until_own_(warp) {}

  __device__ __forceinline__ void Run() {
    const bool is_first = threadIdx.x % kWarp == 0;
#pragma unroll 1
    for (uint32_t number = 0;; ++number) {
      const CotangentItem& item = control_.items.Await(number);
      if (item.row == kNoItem) return;
#pragma unroll 1
      for (uint32_t of_group = 0; of_group < static_cast<uint32_t>(p_.per_group); ++of_group) {
        __syncwarp();
        if (is_first) SetHead(item, of_group);
        __syncwarp();
        OfHead();
      }
      if (IsOwn()) {
        const PipelineStage end = control_.StageAt(at_);
        end.WaitUntilEmpty();
        if (is_first) {
          control_.steps[at_.stage] = 0;
          end.Filled();
        }
        end.Filled();
      }
      Advance();
    }
  }
};

// By a warp: makes the tile of ones, and those of terms, of which only components are written
// later.
template <AttentionKeysConfig kConfig>
__device__ __forceinline__ void PrepareTerms(unsigned char* shared) {
  ColumnTerms::FillOnes(shared + kConfig.OnesAt());
#pragma unroll 1
  for (int stage = 0; stage < kConfig.kStages; ++stage) {
    unsigned char* terms = shared + kConfig.SideAt() + stage * kConfig.kSideBytes;
    ColumnTerms::Clear(terms);
    ColumnTerms::Clear(terms + ColumnTerms::kBytes);
  }
  FenceShared();
}

}  // namespace jaxsparse
