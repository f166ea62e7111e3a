// Work of the forward kernel by tiles, and its producer warps: one schedules items and has their
// queries copied, one has keys copied, with the words of partial cells, and one values.
#pragma once

#include "attention/kernels/mask_cells.cuh"
#include "attention/kernels/tiles.h"
#include "cuda/pipeline.cuh"
#include "cuda/warpgroup.cuh"

namespace jaxsparse {

// A row of tiles of a head, as it is described to the warps that work on it.
struct AttentionItem {
  bool exists;  // or the work is done
  BatchPlace place;
  MaskRow mask;
  uint32_t first_query, group, head;             // of all heads
  uint32_t query_entry, key_entry, value_entry;  // own batch entries
  uint16_t* out;                                 // the head's first number
  float* lse;
};

// Barriers and what is small in shared memory. A slot has an item and its queries.
template <AttentionTilesConfig kConfig>
struct AttentionControl {
  static constexpr int kStages = kConfig.Stages(), kSlots = kAttentionItemSlots;
  using Stage = PipelineState<kStages>;
  using Slot = PipelineState<kSlots>;

  AttentionItem items[kSlots];
  uint64_t item_full[kSlots], item_empty[kSlots], query_full[kSlots];
  uint64_t key_full[kStages], key_empty[kStages], value_full[kStages], value_empty[kStages];
  uint32_t entries[kStages];  // of the tiles whose keys are there

  __device__ __forceinline__ PipelineStage ItemAt(Slot at) {
    return {&item_full[at.stage], &item_empty[at.stage], at.phase};
  }
  __device__ __forceinline__ PipelineStage QueryAt(Slot at) {  // empty when the item is
    return {&query_full[at.stage], &item_empty[at.stage], at.phase};
  }
  __device__ __forceinline__ PipelineStage KeyAt(Stage at) {
    return {&key_full[at.stage], &key_empty[at.stage], at.phase};
  }
  __device__ __forceinline__ PipelineStage ValueAt(Stage at) {
    return {&value_full[at.stage], &value_empty[at.stage], at.phase};
  }

  // By one thread. Each consumer arrives where it has read, or each warp of them where products
  // have; of items, two producers do, too.
  __device__ __forceinline__ void Init() {
    constexpr int kWarps = kAttentionConsumers / kWarp;
    for (uint32_t i = 0; i < kSlots; ++i) {
      ItemAt({i}).Init(1, kAttentionConsumers + 2);
      InitBarrier(&query_full[i], 1);
    }
    for (uint32_t i = 0; i < kStages; ++i) {
      KeyAt({i}).Init(1, kAttentionConsumers);
      ValueAt({i}).Init(1, kWarps);
    }
    FenceShared();
  }
};

// Which items a block works on: the first one by its number, others as they are left, counted in
// the workspace. Items come by falling work: for some heads at a time, first the rows of tiles with
// most cells.
class AttentionScheduler {
  const AttentionTilesProblem& p_;
  uint32_t item_ = blockIdx.x;

 public:
  __device__ __forceinline__ explicit AttentionScheduler(const AttentionTilesProblem& p) : p_(p) {}

  __device__ __forceinline__ bool IsDone() const { return item_ >= p_.items; }

  // The counter is 0 once the prologue is done. Without other items there is none.
  __device__ __forceinline__ void Next() {
    item_ = gridDim.x;
    if (p_.items <= gridDim.x) return;
    WaitForPrologue();
    item_ += FetchAndAddOfGpu(reinterpret_cast<uint32_t*>(p_.workspace.data), 1);
  }

  // What is described is read again from there: there are few registers.
  __device__ __forceinline__ void Describe(AttentionItem& item) const {
    const auto rows = static_cast<uint32_t>(p_.mask.rows);
    const auto per_group = static_cast<uint32_t>(p_.per_group);
    const uint32_t heads = static_cast<uint32_t>(p_.groups) * per_group;
    const uint32_t all_heads = static_cast<uint32_t>(p_.batch.count) * heads;
    const uint32_t at_once = p_.heads_at_once;
    const uint32_t first = item_ / (at_once * rows) * at_once;  // of the heads that take turns
    const uint32_t together = at_once < all_heads - first ? at_once : all_heads - first;
    const uint32_t turn = item_ - first * rows, place_of_row = turn / together;
    const uint32_t of_all = first + (turn - place_of_row * together), entry = of_all / heads;
    item.head = of_all - entry * heads;
    item.group = item.head / per_group;
    item.place.Set(p_.batch, entry);
    const auto own =
        static_cast<uint32_t>(p_.mask.Own(item.group, item.head - item.group * per_group));
    item.mask.SetBits(p_.mask, p_.batch, item.place, own);
    const uint32_t row = MaskRowInOrder(p_.mask, p_.batch, item.place, own, place_of_row);
    item.first_query = row * kMaskTile;
    item.mask.SetEntries(p_.mask, p_.batch, item.place, own, row);
    item.query_entry = item.place.OwnEntry(p_.batch, p_.query);
    item.key_entry = item.place.OwnEntry(p_.batch, p_.key);
    item.value_entry = item.place.OwnEntry(p_.batch, p_.value);
    item.out = item.place.At<uint16_t>(p_.batch, p_.out) + item.head * p_.value_size;
    item.lse = item.place.At<float>(p_.batch, p_.lse) + item.head * p_.queries;
  }
};

// Copies kHeadSize numbers of each position from `first` on: blocks of 64 numbers one behind the
// other.
template <int kHeadSize>
__device__ __forceinline__ void CopyTile(unsigned char* to, const TensorMap& map, uint32_t head,
                                         uint32_t first, uint32_t entry, uint64_t* full) {
  constexpr int kBlockBytes = kMaskTile * 64 * 2;
#pragma unroll
  for (int block = 0; block < kHeadSize / 64; ++block) {
    const int at[] = {block * 64, static_cast<int>(head), static_cast<int>(first),
                      static_cast<int>(entry)};
    TensorCopy(to + block * kBlockBytes, map, at, full);
  }
}

// Each of these is run by one thread until the work is done.
template <AttentionTilesConfig kConfig>
class AttentionProducers {
  using Control = AttentionControl<kConfig>;
  const AttentionTilesProblem& p_;
  Control& control_;
  unsigned char* shared_;

 public:
  __device__ __forceinline__ AttentionProducers(const AttentionTilesProblem& p, Control& control,
                                                unsigned char* shared)
      : p_(p), control_(control), shared_(shared) {}

  // An item is found while the one before it is worked on.
  __device__ __forceinline__ void Schedule() const {
    AttentionScheduler scheduler(p_);
    typename Control::Slot at;
    bool done = false;
#pragma unroll 1
    while (!done) {
      const PipelineStage slot = control_.ItemAt(at);
      AttentionItem& item = control_.items[at.stage];
      slot.WaitUntilEmpty();
      done = scheduler.IsDone();
      item.exists = !done;
      if (!done) scheduler.Describe(item);
      slot.Filled();
      if (!done) {
        uint64_t* const full = control_.QueryAt(at).full;
        ArriveAndExpect(full, kConfig.QueryBytes());
        CopyTile<kConfig.head_size>(shared_ + at.stage * kConfig.QueryBytes(), p_.query_tiles,
                                    item.head, item.first_query, item.query_entry, full);
        scheduler.Next();
      }
      at.Advance();
    }
  }

  __device__ __forceinline__ void CopyKeys() const {
    typename Control::Stage at;
    ForEachTile([&](const AttentionItem& item, uint32_t number, uint32_t entry) {
      const PipelineStage stage = control_.KeyAt(at);
      uint32_t cells = CountPartialCells(entry);
      cells = cells < item.mask.cells ? cells : item.mask.cells;
      const int32_t bits_at = item.mask.bits_at[number];
      stage.WaitUntilEmpty();
      control_.entries[at.stage] = entry;
      constexpr uint32_t kCellBytes = kMaskCellWords * 4;
      stage.Expect(kConfig.KeyBytes() + cells * kCellBytes);
      CopyTile<kConfig.head_size>(shared_ + kConfig.KeysAt() + at.stage * kConfig.KeyBytes(),
                                  p_.key_tiles, item.group, item.mask.ColumnOf(entry) * kMaskTile,
                                  item.key_entry, stage.full);
      if (cells > 0) {
        BulkCopy(shared_ + kConfig.WordsAt() + at.stage * kConfig.kWordBytes,
                 item.mask.WordsAt(bits_at, cells), cells * kCellBytes, stage.full);
      }
      at.Advance();
    });
  }

  __device__ __forceinline__ void CopyValues() const {
    typename Control::Stage at;
    ForEachTile([&](const AttentionItem& item, uint32_t, uint32_t entry) {
      const PipelineStage stage = control_.ValueAt(at);
      stage.WaitUntilEmpty();
      stage.Expect(kConfig.ValueBytes());
      CopyTile<kConfig.value_size>(
          shared_ + kConfig.ValuesAt() + at.stage * kConfig.ValueBytes(), p_.value_tiles,
          item.group, item.mask.ColumnOf(entry) * kMaskTile, item.value_entry, stage.full);
      at.Advance();
    });
  }

 private:
  // Calls with (item, number, entry) for all listed tiles of all items. An entry is loaded while
  // the stage of the one before it is waited for.
  template <typename Function>
  __device__ __forceinline__ void ForEachTile(Function function) const {
    typename Control::Slot at;
#pragma unroll 1
    while (true) {
      const PipelineStage slot = control_.ItemAt(at);
      const AttentionItem& item = control_.items[at.stage];
      slot.WaitUntilFull();
      if (!item.exists) return;
      uint32_t next = item.mask.count > 0 ? item.mask.entries[0] : 0;
#pragma unroll 1
      for (uint32_t i = 0; i < item.mask.count; ++i) {
        const uint32_t entry = next;
        if (i + 1 < item.mask.count) next = item.mask.entries[i + 1];
        function(item, i, entry);
      }
      slot.Emptied();
      at.Advance();
    }
  }
};

}  // namespace jaxsparse
