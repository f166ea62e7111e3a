// What controls the kernel of cotangents of queries, and its producers: a warp that takes items and
// has their queries copied, and a thread that has keys, values and words of partial cells copied.
#pragma once

#include "attention/kernels/cotangent.cuh"
#include "attention/kernels/rows.h"
#include "attention/kernels/tile_sums.cuh"

namespace jaxsparse {

template <AttentionRowsConfig kConfig>
struct RowsControl {
  static constexpr int kStages = kConfig.Stages();
  uint64_t keys_full[kStages], keys_empty[kStages], values_full[kStages], values_empty[kStages];
  uint64_t rows_full[kCotangentGroups], rows_empty[kCotangentGroups];
  CotangentItemSlots items;
  uint32_t steps[kStages];    // the states of a tile's cells, as an entry has them; 0 ends an item
  uint32_t numbers[kStages];  // of tiles, of the mask's entries
  TileSumsControl tile_sums;
  // Of the item that the producer of rows is at.
  const float *lse, *ct_sums;
  uint32_t query_entry, ct_out_entry;
  // Of the one that the producer of tiles is at.
  MaskRow row;
  uint32_t group, key_entry, value_entry, first_number;

  using State = PipelineState<kStages>;
  __device__ __forceinline__ PipelineStage KeysAt(State at) {
    return {&keys_full[at.stage], &keys_empty[at.stage], at.phase};
  }
  __device__ __forceinline__ PipelineStage ValuesAt(State at) {
    return {&values_full[at.stage], &values_empty[at.stage], at.phase};
  }
};

// A warp that takes items and has their rows copied.
template <AttentionRowsConfig kConfig>
class RowsOfItems {
  using Control = RowsControl<kConfig>;
  const AttentionCotangentTiles& p_;
  Control& control_;
  unsigned char* shared_;

  // By one thread.
  __device__ __forceinline__ void TakeItem(uint32_t number) {
    const CotangentItem& item =
        control_.items.Take(p_, p_.mask, kCotangentRowsCounter,
                            static_cast<uint32_t>(p_.groups * p_.per_group), number);
    if (item.row == kNoItem) return;
    const int64_t of_head = item.head * p_.queries;
    control_.lse = item.place.At<const float>(p_.batch, p_.lse) + of_head;
    control_.ct_sums = item.place.At<const float>(p_.batch, p_.ct_sums) + of_head;
    control_.query_entry = item.place.OwnEntry(p_.batch, p_.query);
    control_.ct_out_entry = item.place.OwnEntry(p_.batch, p_.ct_out);
  }

  // By one thread: rows of a warpgroup.
  __device__ __forceinline__ void CopyRows(const CotangentItem& item, int group, uint32_t first) {
    constexpr int kBytes = kConfig.RowsBytes(), kSize = kConfig.head_size;
    uint64_t* full = &control_.rows_full[group];
    ArriveAndExpect(full, 2 * kBytes);
    unsigned char* to = shared_ + group * kBytes;
    CopyLines<kSize, kMaskCell>(to, p_.query_tiles, item.head, first, control_.query_entry, full);
    to += kCotangentGroups * kBytes;
    CopyLines<kSize, kMaskCell>(to, p_.ct_out_tiles, item.head, first, control_.ct_out_entry, full);
  }

 public:
  __device__ RowsOfItems(const AttentionCotangentTiles& p, Control& control, unsigned char* shared)
      : p_(p), control_(control), shared_(shared) {}

  __device__ __forceinline__ void Run() {
    const bool is_first = threadIdx.x % kWarp == 0;
#pragma unroll 1
    for (uint32_t number = 0;; ++number) {
      __syncwarp();
      if (is_first) TakeItem(number);
      __syncwarp();
      const CotangentItem& item = control_.items.slots[number % kItemSlots];
      const bool is_last = item.row == kNoItem;
#pragma unroll 1
      for (int group = 0; group < kCotangentGroups; ++group) {
        uint64_t* full = &control_.rows_full[group];
        WaitForPhase(&control_.rows_empty[group], (number & 1) ^ 1);
        if (is_last) {
          if (is_first) Arrive(full);
        } else {
          const uint32_t first = item.row * kMaskTile + group * kMaskCell;
          if (is_first) CopyRows(item, group, first);
          ShiftsOfRows shifts;
          shifts.Load(control_.lse, control_.ct_sums, first, static_cast<uint32_t>(p_.queries));
          shifts.Store(shared_ + kConfig.ShiftsAt() + group * kShiftsBytes);
        }
        Arrive(full);
      }
      if (is_last) return;
    }
  }
};

// A thread that has keys and values copied, tile by tile. `kColumns`: consumers are told which;
// `kNumbers`: and which of the mask's entries these are.
template <AttentionRowsConfig kConfig, bool kColumns, bool kNumbers>
__device__ __forceinline__ void CopyTiles(const AttentionCotangentTiles& p,
                                          RowsControl<kConfig>& control, unsigned char* shared) {
  constexpr int kSize = kConfig.head_size;
  uint32_t steps = 0;  // so far
#pragma unroll 1
  for (uint32_t number = 0;; ++number) {
    const CotangentItem& item = control.items.Await(number);
    if (item.row == kNoItem) return;
    const auto per_group = static_cast<uint32_t>(p.per_group);
    control.group = item.head / per_group;
    control.key_entry = item.place.OwnEntry(p.batch, p.key);
    control.value_entry = item.place.OwnEntry(p.batch, p.value);
    const auto own = static_cast<uint32_t>(p.mask.Own(control.group, item.head % per_group));
    MaskRow& row = control.row;
    row.Set(p.mask, p.batch, item.place, own, item.row);
    if constexpr (kNumbers)
      control.first_number = FirstEntryOf(p.mask, p.batch, item.place, own, item.row);
#pragma unroll 1
    for (uint32_t i = 0; i <= row.count; ++i) {
      const bool is_end = i == row.count;
      const uint32_t entry = is_end ? 0 : WithWords(row, row.entries[i]);
      const uint32_t states = entry >> kMaskStatesAt;
      if (states == 0 && !is_end) continue;
      const auto at = RowsControl<kConfig>::State::Of(steps);
      const PipelineStage keys = control.KeysAt(at), values = control.ValuesAt(at);
      const uint32_t first = row.ColumnOf(entry) * kMaskTile;
      values.WaitUntilEmpty();
      if constexpr (kNumbers) control.numbers[at.stage] = control.first_number + i;
      control.steps[at.stage] = states << kMaskStatesAt | (kColumns ? row.ColumnOf(entry) : 0);
      if (is_end) {
        keys.Filled();
      } else {
        const uint32_t cells = CountPartialCells(entry), words_bytes = cells * kMaskCellWords * 4;
        keys.Expect(kConfig.TileBytes() + words_bytes);
        CopyLines<kSize, kMaskTile>(shared + kConfig.KeysAt(at.stage, at.phase), p.key_tiles,
                                    control.group, first, control.key_entry, keys.full);
        if (cells > 0) {
          BulkCopy(shared + kConfig.WordsAt() + at.stage * kConfig.kWordsBytes,
                   row.WordsAt(row.bits_at[i], cells), words_bytes, keys.full);
        }
      }
      keys.WaitUntilEmpty();
      if (is_end) {
        values.Filled();
      } else {
        values.Expect(kConfig.TileBytes());
        CopyLines<kSize, kMaskTile>(shared + kConfig.ValuesAt(at.stage, at.phase), p.value_tiles,
                                    control.group, first, control.value_entry, values.full);
      }
      ++steps;
    }
  }
}

}  // namespace jaxsparse
