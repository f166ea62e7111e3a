// Cotangents of queries by rows of tiles: a block owns 128 queries of a head and walks the tiles
// that the mask lists for them. For a tile of 128 x 128 each of two consumer warpgroups computes,
// for its 64 queries,
//
//   s = query key^T,  dp = ct_out value^T               (both operands in shared memory)
//   p = exp2(log2_scale s - lse log2(e)) where stored, 0 elsewhere;  ds = p (dp + ct_sums)
//   ct_query += ds key                                  (ds from registers)
//
// Scores and probabilities are computed once more than by the kernel of keys (keys.cu), since sums
// over keys and sums over queries belong to different blocks: so there are no atomic additions, and
// results repeat bitwise.
//
// A producer thread has tiles of key and value copied into a pipeline of stages, with the words of
// partial cells. Values of a stage are done with long before its keys; the next keys, which are
// wanted first, take their place. A producer warp
// takes items of work and has queries, ct_out, lse and ct_sums of the next one copied as soon as a
// warpgroup is done with those that it has.
//
// A zero of ds times a NaN of a key that a query does not see would be NaN. So an item with partial
// cells computes rows that are not finite once more, entry by entry.
//
// Floors, for a tile of 128 x 128 with cells that are listed, and heads of 128: 3 * 128^3
// multiply-adds of tensor cores, 3,072 clocks of a multiprocessor, which does 2,048 in a clock; for
// causal attention with 12,288 positions and 8 heads that are 495 us at 1,755 MHz. Through shared
// memory pass 2 * 96 KiB for the products of operands that lie there, 2 * 32 for the others, and 64
// as tiles are copied: 2,560 clocks at 128 bytes a clock. From the L2 cache come 64 KiB. From
// memory come query, key, value, ct_out, lse, ct_sums and the words of cells, and goes ct_query,
// once each.
#include "attention/kernels/cotangent.cuh"
#include "attention/kernels/rows.h"

namespace jaxsparse {

template <AttentionRowsConfig kConfig>
struct RowsControl {
  static constexpr int kStages = kConfig.Stages();
  uint64_t keys_full[kStages], keys_empty[kStages], values_full[kStages], values_empty[kStages];
  uint64_t rows_full[kCotangentGroups], rows_empty[kCotangentGroups];
  CotangentItemSlots items;
  uint32_t steps[kStages];  // the states of a tile's cells, as an entry has them; 0 ends an item
  // Of the item that the producer of rows is at.
  const float *lse, *ct_sums;
  uint32_t query_entry, ct_out_entry;
  // Of the one that the producer of tiles is at.
  MaskRow row;
  uint32_t group, key_entry, value_entry;

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

// A thread that has keys and values copied, tile by tile.
template <AttentionRowsConfig kConfig>
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
    MaskRow& row = control.row;
    row.Set(p.mask, p.batch, item.place,
            static_cast<uint32_t>(p.mask.Own(control.group, item.head % per_group)), item.row);
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
      control.steps[at.stage] = states << kMaskStatesAt;
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

// One of the consumer warpgroups.
template <typename T, AttentionRowsConfig kConfig>
class RowsConsumer {
  using Control = RowsControl<kConfig>;
  static constexpr int kSize = kConfig.head_size;
  static constexpr int kRowsBlock = kMaskCell * 64 * 2, kTileBlock = kMaskTile * 64 * 2;
  const AttentionCotangentTiles& p_;
  Control& control_;
  int group_;
  uint32_t shared_, rows_;  // where its queries lie
  typename Control::State at_;
  bool masked_;  // the item has had a partial cell
  float shifts_[2], ct_sums_[2];
  float ct_query_[kSize / 2];

  // Keys are read by products alone: one lane of each warp arrives. Values are emptied by all
  // lanes, which have read the words that came for this tile.
  __device__ __forceinline__ static void EmptyKeys(const PipelineStage& stage) {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) stage.Emptied();
  }

  // Makes probabilities of keys that are not stored 0.
  template <int kAcross>
  __device__ __forceinline__ void ApplyCell(uint32_t states, float (&scores)[kMaskTile / 2]) {
    const MaskCell cell = MaskCellOf(states, group_, kAcross);
    uint32_t word = 0;
    if (cell == MaskCell::kPartial) {
      const uint32_t place =
          CountPartialCells(states, group_, kAcross) * kMaskCellWords + threadIdx.x % kWarpgroup;
      word = SharedAt<const uint32_t>(shared_ + kConfig.WordsAt() +
                                      at_.stage * kConfig.kWordsBytes + place * 4);
    }
    if (cell == MaskCell::kPartial || cell == MaskCell::kEmpty) {
      ApplyMaskWord<kAcross * kMaskCell / 2>(word, 0.0f, scores);
    }
  }

  // Keys of the step before, once products that read them are done.
  __device__ __forceinline__ void EmptyKeysBefore(bool is_first) {
    constexpr uint32_t kStages = Control::kStages;
    if (!is_first) EmptyKeys(control_.KeysAt({(at_.stage + kStages - 1) % kStages}));
  }

  // Adds a tile to the sums. The last product is not waited for.
  __device__ __forceinline__ void AddTile(uint32_t states, bool is_first) {
    // In a way that tells a compiler that all lanes agree, as about states below.
    const typename Control::State at = {__shfl_sync(kAllLanes, at_.stage, 0),
                                        __shfl_sync(kAllLanes, at_.phase, 0)};
    const uint32_t keys = shared_ + kConfig.KeysAt(at.stage, at.phase);
    const uint32_t values = shared_ + kConfig.ValuesAt(at.stage, at.phase);
    float scores[kMaskTile / 2], ct_scores[kMaskTile / 2];
    FenceProducts();
    MultiplyTiles<T, kSize, kRowsBlock, kTileBlock>(scores, rows_, keys);
    CommitProducts();
    WaitForGroups<1>();
    EmptyKeysBefore(is_first);
    control_.ValuesAt(at_).WaitUntilFull();
    FenceProducts();
    MultiplyTiles<T, kSize, kRowsBlock, kTileBlock>(
        ct_scores, rows_ + kCotangentGroups * kConfig.RowsBytes(), values);
    CommitProducts();
    WaitForGroups<1>();
    KeepInRegisters(scores);
#pragma unroll
    for (int i = 0; i < kMaskTile / 2; ++i) {
      scores[i] = ApproximateExp2(scores[i] * p_.log2_scale + shifts_[i / 2 % 2]);
    }
    ApplyCell<0>(states, scores);
    ApplyCell<1>(states, scores);
    WaitForGroups<0>();
    KeepInRegisters(ct_scores);
    control_.ValuesAt(at_).Emptied();
#pragma unroll
    for (int i = 0; i < kMaskTile / 2; ++i) scores[i] *= ct_scores[i] + ct_sums_[i / 2 % 2];
    uint32_t rows[kMaskTile / kInnerOfProduct][4];
    RowsOfProduct<T>(scores, rows);
    FenceProducts();
    MultiplyRows<T, kTileBlock>(ct_query_, rows, keys);
    CommitProducts();
  }

  __device__ __forceinline__ void AddTiles() {
    masked_ = false;
#pragma unroll 1
    for (bool is_first = true;; is_first = false) {
      control_.KeysAt(at_).WaitUntilFull();
      const uint32_t states = __shfl_sync(kAllLanes, control_.steps[at_.stage], 0);
      if ((states >> (kMaskStatesAt + 4 * group_) & 15) != 0) {
        masked_ |= (PartialCellsOf(states) >> 4 * group_ & 15) != 0;
        AddTile(states, is_first);
      } else {
        WaitForGroups<0>();
        EmptyKeysBefore(is_first);
        control_.ValuesAt(at_).WaitUntilFull();
        control_.ValuesAt(at_).Emptied();
      }
      if (states == 0) break;
      at_.Advance();
    }
    EmptyKeys(control_.KeysAt(at_));
    at_.Advance();
  }

  __device__ __forceinline__ void WriteResults(const CotangentItem& item) {
    const int64_t stride = p_.groups * p_.per_group * kSize;
    const int64_t first = item.row * kMaskTile + group_ * kMaskCell;
    const int64_t left = p_.queries - first;
    const int rows = left < kMaskCell ? static_cast<int>(left) : kMaskCell;
    T* ct_query = item.place.At<T>(p_.batch, p_.ct_query) + first * stride + item.head * kSize;
    uint32_t not_finite = StoreRows(ct_query_, static_cast<float>(static_cast<float>(p_.scale)),
                                    ct_query, stride, rows);
    if (!masked_) return;
    __syncwarp();
#pragma unroll 1
    for (; not_finite != 0; not_finite &= not_finite - 1) {
      const int row = threadIdx.x % kWarpgroup / kWarp * 16 + __ffs(not_finite) - 1;
      WriteQueryByEntries<T, kSize, kSize>(p_, item.place, item.head, item.row,
                                           static_cast<uint32_t>(first + row));
    }
  }

 public:
  __device__ RowsConsumer(const AttentionCotangentTiles& p, Control& control, uint32_t shared)
      : p_(p),
        control_(control),
        group_(WarpgroupOfBlock()),
        shared_(shared),
        rows_(shared + group_ * kConfig.RowsBytes()) {}

  __device__ __forceinline__ void Run() {
    const int first_row = threadIdx.x % kWarpgroup / kWarp * 16 + threadIdx.x % kWarp / 4;
    const uint32_t shifts = shared_ + kConfig.ShiftsAt() + group_ * kShiftsBytes + first_row * 4;
#pragma unroll 1
    for (uint32_t number = 0;; ++number) {
      WaitForPhase(&control_.rows_full[group_], number & 1);
      const CotangentItem& item = control_.items.slots[number % kItemSlots];
      if (item.row == kNoItem) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        shifts_[i] = SharedAt<const float>(shifts + i * 8 * 4);
        ct_sums_[i] = SharedAt<const float>(shifts + (kMaskCell + i * 8) * 4);
      }
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) ct_query_[i] = 0;
      AddTiles();
      WaitForGroups<0>();
      KeepInRegisters(ct_query_);
      Arrive(&control_.rows_empty[group_]);
      WriteResults(item);
    }
  }
};

template <typename T, AttentionRowsConfig kConfig>
__global__ void __launch_bounds__(kCotangentThreads, 1)
    AttentionCotangentOfRows(const __grid_constant__ AttentionCotangentTiles p) {
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  using Control = RowsControl<kConfig>;
  static_assert(sizeof(Control) <= kCotangentControlBytes);
  Control& control = *reinterpret_cast<Control*>(attention_shared + kConfig.ControlAt());
  constexpr int kConsumerWarps = kWarpgroup / kWarp;  // of a warpgroup
  LetNextKernelBegin();
  if (threadIdx.x == 0) {
    for (uint32_t stage = 0; stage < Control::kStages; ++stage) {
      control.KeysAt({stage}).Init(1, kCotangentGroups * kConsumerWarps);
      control.ValuesAt({stage}).Init(1, kCotangentGroups * kWarpgroup);
    }
    control.items.Init();
    for (int group = 0; group < kCotangentGroups; ++group) {
      InitBarrier(&control.rows_full[group], kWarp + 1);
      InitBarrier(&control.rows_empty[group], kWarpgroup);
    }
    FenceShared();
  }
  __syncthreads();
  if (threadIdx.x < kCotangentGroups * kWarpgroup) {
    TakeRegisters<kCotangentConsumerRegisters>();
    RowsConsumer<T, kConfig>(p, control, AddressOfShared(attention_shared)).Run();
  } else {
    GiveUpRegisters<kCotangentProducerRegisters>();
    const int warp = WarpOfBlock() - kCotangentGroups * kConsumerWarps;
    if (warp == 0 && threadIdx.x % kWarp == 0) CopyTiles<kConfig>(p, control, attention_shared);
    if (warp == 1) RowsOfItems<kConfig>(p, control, attention_shared).Run();
  }
}

}  // namespace jaxsparse
