// Cotangents of keys and values by the tensor cores of single warps (mma.sync), for what the kernel
// by warpgroups (keys.cu) does not take; it says what is computed. A block owns 128 keys of a key
// head, or half of them, and walks the cells of 64 queries that the transposed mask lists for them,
// of all query heads of the group; queries, their cotangents, lse and ct_sums come to stages in
// shared memory. A warp has 16 of the keys, whose scores, cotangents of scores and sums stay in its
// registers, for all queries of a cell or for half of them at a time.
//
// Where registers have no room for both sums, blocks of their own add up each: scores are computed
// twice then.
//
// Each sum belongs to one block: there are no atomic additions, and results repeat bitwise. Rows
// with sums that are not finite are computed once more, entry by entry, as by tiles_mma.cu.
//
// Floors, for a cell of 64 x 64 positions of a head: 4 * 64 * 64 * (head_size + value_size)
// operations, six times as many in float32: for sizes of 128, 2,048 clocks of a multiprocessor of
// an A100, about 1,680 of an H100. Operands of two of the four products come from shared memory on
// both sides, 320 bytes for each 16 x 8 x 16, those of the others on one side, 256: 2,304 clocks.
// From the L2 cache come the cell's rows of two operands, for two cells of keys at once; from
// memory all operands once, and go ct_key and ct_value.
#include "attention/kernels/cotangent_entries.cuh"
#include "attention/kernels/mma_products.cuh"
#include "attention/kernels/mma_steps.cuh"
#include "attention/kernels/store_rows.cuh"

namespace jaxsparse {

// What a block works on: the query head's operands, from their first position on.
template <typename T>
struct KeysMmaControl {
  MmaItem item;
  const T *query, *ct_out;
  const float *lse, *ct_sums;

  // By one thread.
  __device__ __forceinline__ void Set(const AttentionCotangentWork& p, uint32_t number) {
    item.SetKeys(p, number);
  }
  // By one thread: begins a query head of the item's.
  __device__ __forceinline__ void SetHead(const AttentionCotangentWork& p, uint32_t of_group) {
    const uint32_t head = item.head * static_cast<uint32_t>(p.per_group) + of_group;
    item.SetMask(p.batch, p.transposed_mask, item.head, of_group);
    query = item.place.At<const T>(p.batch, p.query) + head * p.head_size;
    ct_out = item.place.At<const T>(p.batch, p.ct_out) + head * p.value_size;
    lse = item.place.At<const float>(p.batch, p.lse) + head * p.queries;
    ct_sums = item.place.At<const float>(p.batch, p.ct_sums) + head * p.queries;
  }
};

// kOfKeys, kOfValues: whose cotangents it computes.
template <typename T, CotangentMmaConfig kConfig, bool kOfKeys, bool kOfValues, typename Scoring>
class KeysMmaBlock {
  static constexpr MmaTiles kTiles = kConfig.tiles;
  static constexpr int kHeadSize = kTiles.head_size, kValueSize = kTiles.value_size;
  static constexpr int kThreads = kTiles.Threads();
  static constexpr int kScores = kConfig.columns / 2;
  static constexpr int kKeySums = kOfKeys ? kHeadSize / 2 : 1;
  static constexpr int kValueSums = kOfValues ? kValueSize / 2 : 1;
  static_assert(kTiles.strips == 1);
  using KeyFactors = FactorsOfTile<T, kHeadSize + 8>;
  using ValueFactors = FactorsOfTile<T, kValueSize + 8>;
  using Pair = Vector<float, 2>;

  const AttentionCotangentWork& p_;
  KeysMmaControl<T>& control_;
  const MmaItem& item_;
  MmaRows<kTiles> rows_;
  uint32_t shared_;
  HeadScores<Scoring> head_;

  __device__ __forceinline__ void CopyOwn() const {
    const int64_t at = rows_.First() * p_.groups + item_.head, left = p_.keys - rows_.First();
    const T* key = item_.place.At<const T>(p_.batch, p_.key) + at * p_.head_size;
    CopyRows<T, kTiles.rows, kHeadSize, kThreads>(shared_, key, p_.groups * p_.head_size, left,
                                                  p_.head_size);
    if constexpr (!kOfKeys) return;
    const T* value = item_.place.At<const T>(p_.batch, p_.value) + at * p_.value_size;
    CopyRows<T, kTiles.rows, kValueSize, kThreads>(shared_ + kConfig.OwnValuesAt(), value,
                                                   p_.groups * p_.value_size, left, p_.value_size);
  }

  __device__ __forceinline__ void CopyStep(uint32_t stage, uint32_t first) const {
    const int64_t heads = p_.groups * p_.per_group, left = p_.queries - first;
    CopyRows<T, kMaskCell, kHeadSize, kThreads>(stage,
                                                control_.query + first * heads * p_.head_size,
                                                heads * p_.head_size, left, p_.head_size);
    CopyRows<T, kMaskCell, kValueSize, kThreads>(stage + kConfig.ValuesOfStageAt(),
                                                 control_.ct_out + first * heads * p_.value_size,
                                                 heads * p_.value_size, left, p_.value_size);
    static_assert(kThreads >= 2 * kMaskCell);
    if (threadIdx.x >= 2 * kMaskCell) return;
    const int row = threadIdx.x % kMaskCell;
    const float* from = threadIdx.x < kMaskCell ? control_.lse : control_.ct_sums;
    AsyncCopyOrZero<4>(stage + kConfig.LseOfStageAt() + threadIdx.x * 4, from + first + row,
                       row < left);
  }

  // The same of a function of scores or dropout: of products with queries from `query` on, which
  // are stored by the bits of `word`.
  __device__ __forceinline__ void AddScored(uint32_t query, uint32_t word, uint32_t lse,
                                            float (&scores)[1][kScores], uint32_t ct_outs,
                                            uint32_t queries, uint32_t values,
                                            float (&ct_key)[1][kKeySums],
                                            float (&ct_value)[1][kValueSums]) const {
    const uint32_t first_query = query + threadIdx.x % 4 * 2;
    const uint32_t first_key = rows_.FirstOfWarp() + threadIdx.x % kWarp / 4;
    float probabilities[1][kScores];
    uint32_t kept = kAllLanes;  // bits of those that are not dropped
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const float shift = ShiftOf(SharedAt<const float>(lse + (i / 4 * 8 + i % 2) * sizeof(float)));
      const uint32_t row = first_query + i / 4 * 8 + i % 2, column = first_key + i / 2 % 2 * 8;
      float power = scores[0][i] * p_.log2_scale, slope = 1;
      if constexpr (Scoring::Function::kExists) {
        power = head_.Of(scores[0][i], row, column, &slope) * kLog2OfE<float>;
      }
      const bool stored = (word & (1u << i)) != 0;
      const float probability = stored ? ApproximateExp2(power + shift) : 0.0f;
      scores[0][i] = stored ? probability * slope : 0.0f;
      probabilities[0][i] = probability;
      if constexpr (Scoring::kDrops) {
        if (!head_.Keeps(head_.HashOfRow(row), column)) {
          kept &= ~(1u << i);
          probabilities[0][i] = 0;
        }
      }
    }
    if constexpr (kOfValues) {
      MultiplyProductByRows<T>(ct_value, probabilities, ct_outs + ValueFactors::TransposedPlace());
    }
    if constexpr (kOfKeys) {
      float ct_scores[1][kScores];
      MultiplyRowsByRows<T, kValueSize>(ct_scores, values, ct_outs + ValueFactors::RightPlace());
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        const float sum = SharedAt<const float>(lse + (kMaskCell + i / 4 * 8 + i % 2) *
                                                          static_cast<int>(sizeof(float)));
        const bool is_kept = !Scoring::kDrops || (kept & (1u << i)) != 0;
        scores[0][i] *= (is_kept ? ct_scores[0][i] * head_.KeptScale() : 0.0f) + sum;
      }
      MultiplyProductByRows<T>(ct_key, scores, queries + KeyFactors::TransposedPlace());
    }
  }

  // Adds a cell to the sums, of queries from `query` on.
  __device__ __forceinline__ void AddCell(uint32_t stage, uint32_t query, bool partial,
                                          uint32_t word, float (&ct_key)[1][kKeySums],
                                          float (&ct_value)[1][kValueSums]) const {
    const uint32_t keys = shared_ + rows_.of_warp * kTiles.KeyRowBytes() + KeyFactors::LeftPlace();
    const uint32_t values = shared_ + kConfig.OwnValuesAt() +
                            rows_.of_warp * kTiles.ValueRowBytes() + ValueFactors::LeftPlace();
#pragma unroll 1
    for (int first = 0; first < kMaskCell; first += kConfig.columns) {
      const uint32_t queries = stage + first * kTiles.KeyRowBytes();
      const uint32_t ct_outs = stage + kConfig.ValuesOfStageAt() + first * kTiles.ValueRowBytes();
      const uint32_t lse =
          stage + kConfig.LseOfStageAt() + (first + threadIdx.x % 4 * 2) * sizeof(float);
      float scores[1][kScores];
      MultiplyRowsByRows<T, kHeadSize>(scores, keys, queries + KeyFactors::RightPlace());
      if constexpr (Scoring::kExists) {
        AddScored(query + first, word >> (first / 2), lse, scores, ct_outs, queries, values, ct_key,
                  ct_value);
        continue;
      }
#pragma unroll
      for (int column = 0; column < kConfig.columns; column += 8) {
        const Pair pair = SharedAt<const Pair>(lse + column * sizeof(float));
        const float shifts[] = {ShiftOf(pair.elements[0]), ShiftOf(pair.elements[1])};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[0][column / 2 + i];
          score = ApproximateExp2(score * p_.log2_scale + shifts[i % 2]);
        }
      }
      if (partial) ApplyMaskWord<0>(word >> (first / 2), 0.0f, scores[0]);
      if constexpr (kOfValues) {
        MultiplyProductByRows<T>(ct_value, scores, ct_outs + ValueFactors::TransposedPlace());
      }
      if constexpr (kOfKeys) {
        float ct_scores[1][kScores];
        MultiplyRowsByRows<T, kValueSize>(ct_scores, values, ct_outs + ValueFactors::RightPlace());
#pragma unroll
        for (int column = 0; column < kConfig.columns; column += 8) {
          const Pair sums = SharedAt<const Pair>(lse + (kMaskCell + column) * sizeof(float));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int n = column / 2 + i;
            scores[0][n] *= ct_scores[0][n] + sums.elements[i % 2];
          }
        }
        MultiplyProductByRows<T>(ct_key, scores, queries + KeyFactors::TransposedPlace());
      }
    }
  }

  // Walks the steps of a query head. Whether the warp's rows have had a partial cell.
  __device__ __forceinline__ bool AddCells(float (&ct_key)[1][kKeySums],
                                           float (&ct_value)[1][kValueSums]) const {
    return WalkStages<kConfig>(
        rows_, shared_ + kConfig.StagesAt(),
        [&](uint32_t stage, uint32_t column) { CopyStep(stage, column); },
        [&](uint32_t stage, uint32_t column, bool partial, const uint32_t (&words)[1]) {
          AddCell(stage, column, partial, words[0], ct_key, ct_value);
        });
  }

  // Stores one of the results. Returns which rows have numbers that are not finite.
  template <int kCount>
  __device__ __forceinline__ uint32_t Store(const float (&sums)[kCount], float scale,
                                            const Array& array, int64_t size) const {
    T* to =
        item_.place.At<T>(p_.batch, array) + (rows_.FirstOfWarp() * p_.groups + item_.head) * size;
    return StoreStrip<T>(sums, {scale, scale}, to, p_.groups * size, rows_.LeftOfWarp(p_.keys),
                         static_cast<int>(size));
  }

 public:
  __device__ __forceinline__ KeysMmaBlock(const AttentionCotangentWork& p,
                                          KeysMmaControl<T>& control, const unsigned char* shared,
                                          uint32_t block)
      : p_(p),
        control_(control),
        item_(control.item),
        rows_(control.item, block),
        shared_(AddressOfShared(shared)),
        head_(p) {}

  __device__ __forceinline__ void Run() {
    CopyOwn();
    float ct_key[1][kKeySums] = {}, ct_value[1][kValueSums] = {};
    const auto heads = static_cast<uint32_t>(p_.per_group);
    bool masked = false;
#pragma unroll 1
    for (uint32_t of_group = 0; of_group < heads; ++of_group) {
      __syncthreads();
      if (threadIdx.x == 0) control_.SetHead(p_, of_group);
      __syncthreads();
      if constexpr (Scoring::kExists) head_.Set(item_.place, item_.head * heads + of_group);
      masked |= AddCells(ct_key, ct_value);
    }
    uint32_t wrong = 0;
    if constexpr (kOfValues) {
      wrong |= Store(ct_value[0], head_.KeptScale(), p_.ct_value, p_.value_size);
    }
    if constexpr (kOfKeys) {
      wrong |= Store(ct_key[0], static_cast<float>(p_.scale), p_.ct_key, p_.head_size);
    }
    if (kComponents<T> == 1 && !masked) return;
    __syncwarp();
    ForEachRow(wrong, [&](int row) {
      WriteKeyByEntries<T, kHeadSize, kValueSize, kOfKeys, kOfValues, Scoring>(
          p_, item_.place, item_.head, item_.row, rows_.FirstOfWarp() + row);
    });
  }
};

template <typename T, CotangentMmaConfig kConfig, typename Scoring = NoScoring>
__global__ void __launch_bounds__(kConfig.tiles.Threads(), 1)
    AttentionCotangentOfKeysMma(const __grid_constant__ AttentionCotangentWork p) {
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  const uint32_t block = kConfig.split ? blockIdx.x / 2 : blockIdx.x;
  auto& control = SetMmaControl<T, KeysMmaControl<T>, kConfig>(p, attention_shared, block);
  if constexpr (!kConfig.split) {
    KeysMmaBlock<T, kConfig, true, true, Scoring>(p, control, attention_shared, block).Run();
  } else if (blockIdx.x % 2 == 0) {
    KeysMmaBlock<T, kConfig, true, false, Scoring>(p, control, attention_shared, block).Run();
  } else {
    KeysMmaBlock<T, kConfig, false, true, Scoring>(p, control, attention_shared, block).Run();
  }
  if (threadIdx.x == 0) WaitForPrologue();  // what follows this kernel finds that one done, too
}

}  // namespace jaxsparse
