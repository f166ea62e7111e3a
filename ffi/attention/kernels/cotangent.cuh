// What both kernels of the transpose of attention's derivative share on the device: items of work,
// results, and cotangents that are computed entry by entry.
#pragma once

#include "attention/kernels/cotangent.h"
#include "attention/kernels/mask_cells.cuh"
#include "attention/kernels/products.cuh"
#include "attention/kernels/scores.cuh"
#include "cuda/pipeline.cuh"

namespace jaxsparse {

constexpr float kLog2OfE = 1.44269504088896341f;
constexpr uint32_t kNoItem = 0xffffffffu;
// A block's items by turns: one may be copied, one multiplied, and results of one be written.
constexpr int kItemSlots = 3;

// A row of tiles of a head, as the producer tells consumers.
struct CotangentItem {
  BatchPlace place;
  uint32_t head;  // of its batch entry's
  uint32_t row;   // of tiles; kNoItem: there are no more
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
    const CotangentItems& items = p.items;
    uint32_t next = blockIdx.x;
    if (number > 0) {
      next =
          gridDim.x + FetchAndAddOfGpu(reinterpret_cast<uint32_t*>(p.workspace.data) + counter, 1);
    }
    if (next < items.Count()) {
      const uint32_t at_once = items.heads_at_once * items.rows;
      const uint32_t first = next / at_once * items.heads_at_once;
      const uint32_t left = items.heads - first;
      const uint32_t heads = left < items.heads_at_once ? left : items.heads_at_once;
      const uint32_t rest = next % at_once, head = first + rest % heads;
      item.place.Set(p.batch, head / heads_of_entry);
      item.head = head % heads_of_entry;
      const auto per_group = heads_of_entry / static_cast<uint32_t>(p.groups);
      const auto own =
          static_cast<uint32_t>(mask.Own(item.head / per_group, item.head % per_group));
      item.row = MaskRowInOrder(mask, p.batch, item.place, own, rest / heads);
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

// An entry whose partial cells are empty if there are no words for them.
__device__ __forceinline__ uint32_t WithWords(const MaskRow& row, uint32_t entry) {
  const uint32_t partial = PartialCellsOf(entry);
  return __popc(partial) <= row.cells ? entry : entry & ~(partial << kMaskStatesAt);
}

// What is added to the scores of a row in base 2, so that their powers are probabilities. Those of
// a row that sees nothing are 0.
__device__ __forceinline__ float ShiftOf(float lse) {
  const float least = __uint_as_float(0xff800000);
  return lse == least ? least : -lse * kLog2OfE;
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

// Of four words of each of four neighbouring lanes, hands word k of all to lane k.
__device__ __forceinline__ void TransposeWords(uint32_t (&words)[4]) {
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
    const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) != 0) continue;
      uint32_t& low = words[i];
      uint32_t& high = words[i + distance];
      const uint32_t received = __shfl_xor_sync(kAllLanes, upper ? low : high, distance);
      if (upper) low = received;
      else high = received;
    }
  }
}

// Stores those of a warpgroup's 64 rows that there are, each number times `scale`; rows are
// `stride` numbers apart. Returns which of the warp's 16 rows have a number that is not finite.
template <typename T, int kCount>
__device__ __forceinline__ uint32_t StoreRows(const float (&sums)[kCount], float scale, T* to,
                                              int64_t stride, int rows) {
  const int lane = threadIdx.x % kWarp;
  uint32_t not_finite = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = threadIdx.x % kWarpgroup / kWarp * 16 + half * 8 + lane / 4;
    float zero = 0;  // NaN if a number is not finite
#pragma unroll
    for (int column = 0; column < 2 * kCount; column += 32) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = &sums[column / 2 + 4 * i + 2 * half];
        zero += pair[0] * 0 + pair[1] * 0;
        words[i] = PairOf(T(), pair[0] * scale, pair[1] * scale);
      }
      TransposeWords(words);
      if (row < rows) {
        *reinterpret_cast<Words4*>(to + row * stride + column + lane % 4 * 8) = {
            words[0], words[1], words[2], words[3]};
      }
    }
    const uint32_t wrong = __ballot_sync(kAllLanes, !(zero == 0) && row < rows);
#pragma unroll
    for (int r = 0; r < 8; ++r) not_finite |= (wrong >> 4 * r & 15) != 0 ? 1u << (half * 8 + r) : 0;
  }
  return not_finite;
}

// A row of kSize numbers in the registers of a warp.
template <typename T, int kSize>
struct RowOfWarp {
  static constexpr int kOfLane = kSize / kWarp;
  float numbers[kOfLane];

  __device__ __forceinline__ void Load(const T* row) {
    using Own = Vector<T, kOfLane>;
    const Own own = reinterpret_cast<const Own*>(row)[threadIdx.x % kWarp];
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) numbers[i] = ToAccumulator(own.elements[i]);
  }
  __device__ __forceinline__ void Store(T* row, float scale) const {
    using Own = Vector<T, kOfLane>;
    Own own;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) FromAccumulator(numbers[i] * scale, &own.elements[i]);
    reinterpret_cast<Own*>(row)[threadIdx.x % kWarp] = own;
  }
  __device__ __forceinline__ float Dot(const RowOfWarp& other) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) sum += numbers[i] * other.numbers[i];
    return SumOverLanes(sum, kWarp);
  }
  // Whether all are NaN, which nothing that is added changes.
  __device__ __forceinline__ bool IsNan() const {
    bool is_nan = true;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) is_nan = is_nan && numbers[i] != numbers[i];
    return __all_sync(kAllLanes, is_nan);
  }
  __device__ __forceinline__ void Add(float factor, const RowOfWarp& other) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) numbers[i] += factor * other.numbers[i];
  }
};

// Calls with each stored position of a line of a row of tiles, in their order, as long as it
// returns true. Positions are those along the other dimension, below `positions`.
template <typename Function>
__device__ __forceinline__ void ForEachStored(const MaskRow& row, int line, uint32_t positions,
                                              Function function) {
  const int down = line / kMaskCell, r = line % kMaskCell;
#pragma unroll 1
  for (uint32_t e = 0; e < row.count; ++e) {
    const uint32_t entry = WithWords(row, row.entries[e]);
    const uint32_t first = row.ColumnOf(entry) * kMaskTile;
#pragma unroll 1
    for (int i = 0; i < kMaskTile; ++i) {
      const int across = i / kMaskCell, c = i % kMaskCell;
      const MaskCell cell = MaskCellOf(entry, down, across);
      bool stored = cell != MaskCell::kEmpty && first + i < positions;
      if (cell == MaskCell::kPartial) {
        const uint32_t* words = row.WordsAt(row.bits_at[e], CountPartialCells(entry)) +
                                CountPartialCells(entry, down, across) * kMaskCellWords;
        stored = stored && IsStored(words, r, c);
      }
      if (stored && !function(first + i)) return;
    }
  }
}

// A query as a key meets it, and what follows from both.
template <typename T, int kSize>
struct StoredEntry {
  RowOfWarp<T, kSize> query, ct_out;
  float lse, ct_sums;

  // `row`: the query, of a head of all.
  __device__ __forceinline__ void Load(const AttentionCotangentTiles& p, const BatchPlace& place,
                                       uint32_t head, uint32_t row) {
    const int64_t heads = p.groups * p.per_group, at = (row * heads + head) * kSize;
    query.Load(place.At<const T>(p.batch, p.query) + at);
    ct_out.Load(place.At<const T>(p.batch, p.ct_out) + at);
    lse = place.At<const float>(p.batch, p.lse)[head * p.queries + row];
    ct_sums = place.At<const float>(p.batch, p.ct_sums)[head * p.queries + row];
  }
  // The probability as it meets the value, and that of the score times the cotangent of its
  // tangent. The entry is at `row` and `column`.
  template <typename Scoring>
  __device__ __forceinline__ void Meet(const AttentionCotangentTiles& p,
                                       const HeadScores<Scoring>& head, uint32_t row,
                                       uint32_t column, const RowOfWarp<T, kSize>& key,
                                       const RowOfWarp<T, kSize>& value, float* probability,
                                       float* ct_score) const {
    float slope = 1;
    if constexpr (Scoring::Function::kExists) {
      const float score = head.Of(query.Dot(key), row, column, &slope);
      *probability = ApproximateExp2(score * kLog2OfE + ShiftOf(lse));
    } else {
      *probability = ApproximateExp2(query.Dot(key) * p.log2_scale + ShiftOf(lse));
    }
    float ct_probability = ct_out.Dot(value);
    if constexpr (Scoring::kDrops) {
      const bool kept = head.Keeps(head.HashOfRow(row), column);
      ct_probability = kept ? ct_probability * head.KeptScale() : 0.0f;
      *ct_score = *probability * (ct_probability + ct_sums);
      *probability = kept ? *probability : 0.0f;
    } else {
      *ct_score = *probability * (ct_probability + ct_sums);
    }
    if constexpr (Scoring::Function::kExists) *ct_score *= slope;
  }
};

}  // namespace jaxsparse
