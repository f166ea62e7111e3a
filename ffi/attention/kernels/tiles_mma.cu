// Attention over a block mask by the tensor cores of single warps (mma.sync), which all GPUs since
// compute capability 8.0 have: for heads and numbers that the kernel by warpgroups (tiles.cu) does
// not take. Heads have up to 256 numbers, those of keys and of values differ; numbers are of 16
// bits or float32, which is multiplied as exactly as float32 multiply-adds do (mma_products.cuh).
//
// A block has an item, 128 queries of a head, or half of them, and walks the cells of 64 keys that
// the mask lists for them. A warp has 16 or 32 of the queries: their scores, probabilities and sums
// stay in its registers. Keys and values pass through shared memory in turns: a step's values are
// copied while its scores are computed, the next step's keys while the softmax is taken and values
// are multiplied. Two blocks on a multiprocessor, where they fit, hide each other's barriers.
//
// Blocks begin in the order of items, long rows first; the GPU gives the next one to whichever
// multiprocessor is free. None depends on another one, so results repeat bitwise.
//
// Scores that are not stored are replaced. A probability of 0 times a value that is not finite
// makes sums NaN that should not be: such rows are computed once more, key by key (exact_rows.cuh).
// Of float32 these are all rows with sums that are not finite, as the components of an infinite
// number include NaN.
//
// Floors, for a cell of 64 x 64 positions of a head: 2 * 64 * 64 * (head_size + value_size)
// operations, six times as many in float32. Of those of 16 bits a multiprocessor of an A100 does
// 2,048 a clock, one of an H100 about 2,500 by these instructions: 1,024 or 840 clocks for sizes of
// 128. Their operands come from shared memory, 128 bytes a clock: with 16 rows of a warp 256 bytes
// for each 16 x 8 x 16 product of values and 320 of keys, 1,152 clocks for both sizes of 128, and
// half of that with 32. Beside them 4,096 powers, 16 a clock (256 clocks). From the L2 cache come
// the cell's keys and values, for two cells of queries at once; from memory all operands and words
// once, and go results.
#include "attention/kernels/exact_rows.cuh"
#include "attention/kernels/mma_products.cuh"
#include "attention/kernels/mma_steps.cuh"
#include "attention/kernels/store_rows.cuh"

namespace jaxsparse {

// What a block works on: the first ones of its head's keys and values.
template <typename T>
struct TilesMmaControl {
  MmaItem item;
  const T *key, *value;

  // By one thread.
  __device__ __forceinline__ void Set(const AttentionMmaProblem& p, uint32_t number) {
    item.Set(p, number);
    const uint32_t group = item.head / static_cast<uint32_t>(p.per_group);
    key = item.place.At<const T>(p.batch, p.key) + group * p.head_size;
    value = item.place.At<const T>(p.batch, p.value) + group * p.value_size;
  }
};

template <typename T, AttentionMmaConfig kConfig, typename Scoring>
class AttentionMmaBlock {
  static constexpr MmaTiles kTiles = kConfig.tiles;
  static constexpr int kHeadSize = kTiles.head_size, kValueSize = kTiles.value_size;
  static constexpr int kStrips = kTiles.strips, kThreads = kTiles.Threads();
  static constexpr int kScores = kMaskCell / 2, kSums = kValueSize / 2;  // of a thread and strip
  using KeyFactors = FactorsOfTile<T, kHeadSize + 8>;
  using ValueFactors = FactorsOfTile<T, kValueSize + 8>;

  const AttentionMmaProblem& p_;
  const TilesMmaControl<T>& control_;
  const MmaItem& item_;
  uint32_t shared_;
  // Not MmaRows, by which the compiler orders instructions so that heads of 128 take 6 % longer.
  int lane_, first_row_;  // the warp's first row of the block's
  int first_cell_;        // of the block's, and its rows' first of the tile's
  HeadScores<Scoring> head_;

  // Of all.
  __device__ __forceinline__ uint32_t FirstQuery() const {
    return item_.row * kMaskTile + first_cell_ * kMaskCell;
  }

  __device__ __forceinline__ void CopyQueries() const {
    const int64_t step = p_.groups * p_.per_group * p_.head_size;
    const T* queries = item_.place.At<const T>(p_.batch, p_.query) + item_.head * p_.head_size;
    CopyRows<T, kTiles.rows, kHeadSize, kThreads>(shared_, queries + FirstQuery() * step, step,
                                                  p_.queries - FirstQuery(), p_.head_size);
  }
  __device__ __forceinline__ void CopyKeys(uint32_t first) const {
    const int64_t step = p_.groups * p_.head_size;
    CopyRows<T, kMaskCell, kHeadSize, kThreads>(shared_ + kConfig.KeysAt(),
                                                control_.key + first * step, step, p_.keys - first,
                                                p_.head_size);
  }
  __device__ __forceinline__ void CopyValues(uint32_t first) const {
    const int64_t step = p_.groups * p_.value_size;
    CopyRows<T, kMaskCell, kValueSize, kThreads>(shared_ + kConfig.ValuesAt(),
                                                 control_.value + first * step, step,
                                                 p_.keys - first, p_.value_size);
  }

  // Scores of a strip's products with keys from the thread's first one on.
  __device__ __forceinline__ void ApplyFunction(uint32_t query, uint32_t key,
                                                float (&scores)[kScores]) const {
    if constexpr (Scoring::Function::kExists) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] = head_.Of(scores[i], query + RowOfNumber(i) * 8, key + i / 4 * 8 + i % 2);
      }
    }
  }

  // Walks the item's steps. Whether some of the warp's cells have positions that are not stored.
  __device__ __forceinline__ bool Attend(OnlineSoftmax (&softmax)[2],
                                         float (&sums)[kStrips][kSums]) const {
    const int down = first_cell_ + first_row_ / kMaskCell;
    const int strip = first_row_ % kMaskCell / kMmaStrip;
    const uint32_t queries = shared_ + first_row_ * kTiles.KeyRowBytes() + KeyFactors::LeftPlace();
    const uint32_t keys_at = shared_ + kConfig.KeysAt() + KeyFactors::RightPlace();
    const uint32_t values_at = shared_ + kConfig.ValuesAt() + ValueFactors::TransposedPlace();
    const uint32_t first_query = FirstQuery() + first_row_ + lane_ / 4;
    MmaSteps<kTiles.rows / kMaskCell> steps(item_.mask, first_cell_);
    bool mixed = false, more = steps.Next();
    if (more) CopyKeys(steps.Column());
    CopyQueries();
#pragma unroll 1
    while (more) {
      const MaskCell cell = steps.CellAt(down);
      uint32_t words[kStrips];
      steps.LoadWords(down, strip, words);
      WaitForCopies();
      __syncthreads();
      CopyValues(steps.Column());
      float scores[kStrips][kScores];
      if (cell != MaskCell::kEmpty) {
        MultiplyRowsByRows<T, kHeadSize>(scores, queries, keys_at);
      }
      const uint32_t first_key = Scoring::kExists ? steps.Column() + lane_ % 4 * 2 : 0;
      more = steps.Next();
      WaitForCopies();
      __syncthreads();
      if (more) CopyKeys(steps.Column());
      mixed |= cell == MaskCell::kPartial;
      if (cell == MaskCell::kEmpty) continue;
#pragma unroll
      for (int i = 0; i < kStrips; ++i) {
        const uint32_t query = first_query + i * kMmaStrip;
        ApplyFunction(query, first_key, scores[i]);
        if (cell == MaskCell::kPartial) ApplyMaskWord<0>(words[i], kNoScore, scores[i]);
        float factors[2];
        if (softmax[i].Exponentiate(scores[i], factors)) {
#pragma unroll
          for (int n = 0; n < kSums; ++n) sums[i][n] *= factors[RowOfNumber(n)];
        }
        head_.DropPairs(query, first_key, 1.0f, scores[i]);
      }
      MultiplyProductByRows<T>(sums, scores, values_at);
    }
    WaitForCopies();
    return mixed;
  }

  // Writes rows anew of which `wrong` has the bits, by the number of the row of the warp.
  __device__ __forceinline__ void WriteExactly(uint32_t wrong) const {
    constexpr int kOfLane = kValueSize / kWarp;
    const int64_t heads = p_.groups * p_.per_group;
    HeadOperands<T> of;
    of.key = control_.key;
    of.value = control_.value;
    of.key_step = p_.groups * p_.head_size;
    of.value_step = p_.groups * p_.value_size;
    of.keys = static_cast<uint32_t>(p_.keys);
    of.head_size = static_cast<int>(p_.head_size);
    of.value_size = static_cast<int>(p_.value_size);
    of.scale = ScaleOfScores();
    ForEachRow(wrong, [&](int of_warp) {
      const uint32_t of_block = first_row_ + of_warp;
      const uint32_t row = FirstQuery() + of_block;
      of.query =
          item_.place.At<const T>(p_.batch, p_.query) + (row * heads + item_.head) * p_.head_size;
      float out[kOfLane], lse;
      ComputeRow(item_.mask, first_cell_ * kMaskCell + of_block, of, out, lse,
                 RowScores<Scoring>(head_, row));
      T* const to =
          item_.place.At<T>(p_.batch, p_.out) + (row * heads + item_.head) * p_.value_size;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        const int at = i * kWarp + lane_;
        if (at < p_.value_size) FromAccumulator(out[i], &to[at]);
      }
      if (lane_ == 0) LseOfHead()[row] = lse;
    });
  }

  // What turns scores to powers of 2.
  __device__ __forceinline__ float ScaleOfScores() const {
    return Scoring::Function::kExists ? kLog2OfE<float>
                                      : static_cast<float>(p_.scale) * kLog2OfE<float>;
  }

  __device__ __forceinline__ float* LseOfHead() const {
    return item_.place.At<float>(p_.batch, p_.lse) + item_.head * p_.queries;
  }

  // Writes a strip's results. Returns the rows that have to be written once more.
  __device__ __forceinline__ uint32_t Write(const OnlineSoftmax& softmax,
                                            const float (&sums)[kSums], int strip,
                                            bool mixed) const {
    const int first_row = first_row_ + strip * kMmaStrip;
    const uint32_t first = FirstQuery() + first_row;
    const int rows = static_cast<int>(p_.queries) - static_cast<int>(first);
    float factors[2];
    uint32_t finite = 0;  // rows whose probabilities' sum is
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 8 * half + lane_ / 4;
      const float total = softmax.Total(half);
      factors[half] = total == 0 ? 0.0f : 1.0f / total;
      if constexpr (Scoring::kDrops) factors[half] *= head_.KeptScale();
      if (lane_ % 4 == 0 && row < rows) LseOfHead()[first + row] = softmax.LogOfSum(half, total);
      const unsigned of_lanes = __ballot_sync(kAllLanes, total - total == 0);
#pragma unroll
      for (int i = 0; i < 8; ++i) finite |= (of_lanes >> 4 * i & 1) << (8 * half + i);
    }
    const int64_t step = p_.groups * p_.per_group * p_.value_size;
    T* const to = item_.place.At<T>(p_.batch, p_.out) + item_.head * p_.value_size + first * step;
    const uint32_t wrong =
        StoreStrip<T>(sums, factors, to, step, rows, static_cast<int>(p_.value_size));
    if constexpr (kComponents<T> == 1) return mixed ? wrong & finite : 0;
    else return wrong;
  }

 public:
  __device__ __forceinline__ AttentionMmaBlock(const AttentionMmaProblem& p,
                                               const TilesMmaControl<T>& control,
                                               const unsigned char* shared)
      : p_(p),
        control_(control),
        item_(control.item),
        shared_(AddressOfShared(shared)),
        lane_(threadIdx.x % kWarp),
        first_row_(WarpOfBlock() * kStrips * kMmaStrip),
        first_cell_(static_cast<int>(blockIdx.x) % kTiles.BlocksOfTile()),
        head_(p) {
    if constexpr (Scoring::kExists) head_.Set(item_.place, item_.head);
  }

  __device__ __forceinline__ void Run() const {
    const float scale = ScaleOfScores();
    OnlineSoftmax softmax[2] = {OnlineSoftmax(scale), OnlineSoftmax(scale)};
    float sums[kStrips][kSums] = {};
    const bool mixed = Attend(softmax, sums);
    uint32_t wrong = 0;
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      wrong |= Write(softmax[strip], sums[strip], strip, mixed) << (strip * kMmaStrip);
    }
    if (wrong == 0) return;
    __syncwarp();  // the same rows are written once more
    WriteExactly(wrong);
  }
};

template <typename T, AttentionMmaConfig kConfig, typename Scoring = NoScoring>
__global__ void __launch_bounds__(kConfig.tiles.Threads(), 1)
    AttentionTilesMma(const __grid_constant__ AttentionMmaProblem p) {
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  const auto& control =
      SetMmaControl<T, TilesMmaControl<T>, kConfig>(p, attention_shared, blockIdx.x);
  AttentionMmaBlock<T, kConfig, Scoring>(p, control, attention_shared).Run();
}

}  // namespace jaxsparse
