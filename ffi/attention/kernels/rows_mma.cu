// Cotangents of queries by the tensor cores of single warps (mma.sync), for what the kernel by
// warpgroups (rows.cu) does not take; it says what is computed. A block owns 128 queries of a head,
// or half of them, and walks the cells of 64 keys that the mask lists for them; keys and values
// come to stages in shared memory. A warp has 16 or 32 of the queries, whose scores, cotangents of
// scores and sums stay in its registers, for all keys of a cell or for half of them at a time.
//
// Each sum belongs to one block: there are no atomic additions, and results repeat bitwise. Rows
// with sums that are not finite are computed once more, entry by entry, as by tiles_mma.cu.
//
// Floors, for a cell of 64 x 64 positions of a head: 2 * 64 * 64 * (2 head_size + value_size)
// operations, six times as many in float32: for sizes of 128, 1,536 clocks of a multiprocessor of
// an A100, about 1,260 of an H100. Operands of two of the three products come from shared memory on
// both sides, 320 bytes for each 16 x 8 x 16, those of the third one on one side, 256: 1,792 clocks
// with 16 rows of a warp. From the L2 cache come the cell's keys and values, for two cells of
// queries at once; from memory all operands once, and goes ct_query.
#include "attention/kernels/cotangent_entries.cuh"
#include "attention/kernels/mma_products.cuh"
#include "attention/kernels/mma_steps.cuh"
#include "attention/kernels/store_rows.cuh"

namespace jaxsparse {

template <typename T, CotangentMmaConfig kConfig, typename Scoring>
class RowsMmaBlock {
  static constexpr MmaTiles kTiles = kConfig.tiles;
  static constexpr int kHeadSize = kTiles.head_size, kValueSize = kTiles.value_size;
  static constexpr int kStrips = kTiles.strips, kThreads = kTiles.Threads();
  static constexpr int kScores = kConfig.columns / 2, kSums = kHeadSize / 2;  // of a strip
  using KeyFactors = FactorsOfTile<T, kHeadSize + 8>;
  using ValueFactors = FactorsOfTile<T, kValueSize + 8>;

  const AttentionCotangentWork& p_;
  const MmaItem& item_;
  MmaRows<kTiles> rows_;
  uint32_t shared_;
  float shifts_[kStrips][2], ct_sums_[kStrips][2];
  // Of operands of the function of scores, those cotangents that are sums of rows.
  using Function = typename Scoring::Function;
  static constexpr int kGradients = Function::kGradients;
  float row_sums_[kGradients > 0 ? kGradients : 1][kStrips][2] = {};
  HeadScores<Scoring> head_;

  __device__ __forceinline__ void CopyOwn() const {
    const int64_t heads = p_.groups * p_.per_group, left = p_.queries - rows_.First();
    const int64_t at = rows_.First() * heads + item_.head;
    const T* query = item_.place.At<const T>(p_.batch, p_.query) + at * p_.head_size;
    const T* ct_out = item_.place.At<const T>(p_.batch, p_.ct_out) + at * p_.value_size;
    CopyRows<T, kTiles.rows, kHeadSize, kThreads>(shared_, query, heads * p_.head_size, left,
                                                  p_.head_size);
    CopyRows<T, kTiles.rows, kValueSize, kThreads>(shared_ + kConfig.OwnValuesAt(), ct_out,
                                                   heads * p_.value_size, left, p_.value_size);
  }
  __device__ __forceinline__ void CopyStep(uint32_t stage, const T* keys, const T* values,
                                           uint32_t first) const {
    const int64_t left = p_.keys - first, at = first * p_.groups;
    CopyRows<T, kMaskCell, kHeadSize, kThreads>(stage, keys + at * p_.head_size,
                                                p_.groups * p_.head_size, left, p_.head_size);
    CopyRows<T, kMaskCell, kValueSize, kThreads>(stage + kConfig.ValuesOfStageAt(),
                                                 values + at * p_.value_size,
                                                 p_.groups * p_.value_size, left, p_.value_size);
  }

  __device__ __forceinline__ void LoadShifts() {
    const float* lse = item_.place.At<const float>(p_.batch, p_.lse) + item_.head * p_.queries;
    const float* ct_sums =
        item_.place.At<const float>(p_.batch, p_.ct_sums) + item_.head * p_.queries;
#pragma unroll
    for (int i = 0; i < 2 * kStrips; ++i) {
      const int64_t row = rows_.FirstOfWarp() + i * 8 + threadIdx.x % kWarp / 4;
      const bool exists = row < p_.queries;
      shifts_[i / 2][i % 2] = exists ? ShiftOf(lse[row]) : 0;
      ct_sums_[i / 2][i % 2] = exists ? ct_sums[row] : 0;
    }
  }

  // Turns products of a strip to cotangents of scores, and adds or stores those of operands. What
  // is not stored, by the bits of `word`, has none, whatever the function is there.
  __device__ __forceinline__ void Differentiate(int strip, uint32_t key, uint32_t word,
                                                float (&scores)[kScores],
                                                float (&ct_scores)[kScores]) {
    const uint32_t query = rows_.FirstOfWarp() + strip * kMmaStrip + threadIdx.x % kWarp / 4;
    head_.DropPairs(query, key, head_.KeptScale(), ct_scores);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      const uint32_t row = query + RowOfNumber(i) * 8, column = key + i / 4 * 8 + i % 2;
      const bool stored = (word & (1u << i)) != 0;
      float power = scores[i] * p_.log2_scale, slope = 1;
      float gradients[kGradients > 0 ? kGradients : 1];
      if constexpr (kGradients > 0) {
        power = head_.Of(scores[i], row, column, &slope, gradients) * kLog2OfE<float>;
      } else if constexpr (Function::kExists) {
        power = head_.Of(scores[i], row, column, &slope) * kLog2OfE<float>;
      }
      const float p = ApproximateExp2(power + shifts_[strip][RowOfNumber(i)]);
      const float ct = stored ? p * (ct_scores[i] + ct_sums_[strip][RowOfNumber(i)]) : 0.0f;
      scores[i] = stored ? ct * slope : 0.0f;
#pragma unroll
      for (int g = 0; g < kGradients; ++g) {
        const float of_operand = stored ? ct * gradients[g] : 0.0f;
        if (Function::kSums[g] == ScoreSums::kByRow) {
          row_sums_[g][strip][RowOfNumber(i)] += of_operand;
        } else if (stored && row < p_.queries && column < p_.keys) {
          CotangentsOf(g, p_.queries * p_.keys)[row * p_.keys + column] = of_operand;
        }
      }
    }
  }

  // Of the head, which has so many.
  __device__ __forceinline__ float* CotangentsOf(int gradient, int64_t count) const {
    return item_.place.template At<float>(p_.batch, p_.scores.ct_values[gradient]) +
           item_.head * count;
  }

  __device__ __forceinline__ void WriteRowSums() const {
#pragma unroll
    for (int g = 0; g < kGradients; ++g) {
      if (Function::kSums[g] != ScoreSums::kByRow) continue;
#pragma unroll
      for (int i = 0; i < 2 * kStrips; ++i) {
        const float sum = SumOverLanes(row_sums_[g][i / 2][i % 2], 4);
        const int64_t row = rows_.FirstOfWarp() + i * 8 + threadIdx.x % kWarp / 4;
        if (threadIdx.x % 4 == 0 && row < p_.queries) CotangentsOf(g, p_.queries)[row] = sum;
      }
    }
  }

  // Adds a cell to the sums, of keys from `column` on.
  __device__ __forceinline__ void AddCell(uint32_t stage, uint32_t column, bool partial,
                                          const uint32_t (&words)[kStrips],
                                          float (&sums)[kStrips][kSums]) {
    const uint32_t queries =
        shared_ + rows_.of_warp * kTiles.KeyRowBytes() + KeyFactors::LeftPlace();
    const uint32_t ct_outs = shared_ + kConfig.OwnValuesAt() +
                             rows_.of_warp * kTiles.ValueRowBytes() + ValueFactors::LeftPlace();
#pragma unroll 1
    for (int first = 0; first < kMaskCell; first += kConfig.columns) {
      const uint32_t keys = stage + first * kTiles.KeyRowBytes();
      const uint32_t values = stage + kConfig.ValuesOfStageAt() + first * kTiles.ValueRowBytes();
      float scores[kStrips][kScores], ct_scores[kStrips][kScores];
      MultiplyRowsByRows<T, kHeadSize>(scores, queries, keys + KeyFactors::RightPlace());
      MultiplyRowsByRows<T, kValueSize>(ct_scores, ct_outs, values + ValueFactors::RightPlace());
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip) {
        if constexpr (Scoring::kExists) {
          Differentiate(strip, column + first + threadIdx.x % 4 * 2, words[strip] >> (first / 2),
                        scores[strip], ct_scores[strip]);
          continue;
        }
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          float& score = scores[strip][i];
          score = ApproximateExp2(score * p_.log2_scale + shifts_[strip][RowOfNumber(i)]);
        }
        if (partial) ApplyMaskWord<0>(words[strip] >> (first / 2), 0.0f, scores[strip]);
#pragma unroll
        for (int i = 0; i < kScores; ++i) {
          scores[strip][i] *= ct_scores[strip][i] + ct_sums_[strip][RowOfNumber(i)];
        }
      }
      MultiplyProductByRows<T>(sums, scores, keys + KeyFactors::TransposedPlace());
    }
  }

 public:
  __device__ __forceinline__ RowsMmaBlock(const AttentionCotangentWork& p, const MmaItem& item,
                                          const unsigned char* shared)
      : p_(p), item_(item), rows_(item, blockIdx.x), shared_(AddressOfShared(shared)), head_(p) {
    if constexpr (Scoring::kExists) head_.Set(item_.place, item_.head);
  }

  __device__ __forceinline__ void Run() {
    CopyOwn();
    LoadShifts();
    float sums[kStrips][kSums] = {};
    const uint32_t group = item_.head / static_cast<uint32_t>(p_.per_group);
    const T* keys = item_.place.At<const T>(p_.batch, p_.key) + group * p_.head_size;
    const T* values = item_.place.At<const T>(p_.batch, p_.value) + group * p_.value_size;
    const bool masked = WalkStages<kConfig>(
        rows_, shared_ + kConfig.StagesAt(),
        [&](uint32_t stage, uint32_t column) { CopyStep(stage, keys, values, column); },
        [&](uint32_t stage, uint32_t column, bool partial, const uint32_t (&words)[kStrips]) {
          AddCell(stage, column, partial, words, sums);
        });
    if constexpr (kGradients > 0) WriteRowSums();
    const uint32_t first = rows_.FirstOfWarp();
    const int rows = rows_.LeftOfWarp(p_.queries);
    const int64_t heads = p_.groups * p_.per_group;
    const auto scale = static_cast<float>(p_.scale);
    T* ct_query =
        item_.place.At<T>(p_.batch, p_.ct_query) + (first * heads + item_.head) * p_.head_size;
    uint32_t wrong = 0;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const int above = strip * kMmaStrip;
      wrong |= StoreStrip<T>(sums[strip], {scale, scale}, ct_query + above * heads * p_.head_size,
                             heads * p_.head_size, rows - above, static_cast<int>(p_.head_size))
               << above;
    }
    if (kComponents<T> == 1 && !masked) return;
    __syncwarp();
    ForEachRow(wrong, [&](int row) {
      WriteQueryByEntries<T, kHeadSize, kValueSize, Scoring>(p_, item_.place, item_.head, item_.row,
                                                             first + row);
    });
  }
};

template <typename T, CotangentMmaConfig kConfig, typename Scoring = NoScoring>
__global__ void __launch_bounds__(kConfig.tiles.Threads(), 1)
    AttentionCotangentOfRowsMma(const __grid_constant__ AttentionCotangentWork p) {
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  LetNextKernelBegin();
  const MmaItem& item = SetMmaControl<T, MmaItem, kConfig>(p, attention_shared, blockIdx.x);
  RowsMmaBlock<T, kConfig, Scoring>(p, item, attention_shared).Run();
}

}  // namespace jaxsparse
