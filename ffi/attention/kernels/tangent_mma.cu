// The derivative of attention along tangents of its operands, by the tensor cores of single warps
// (mma.sync): u and r of attention/problem.h. A block owns 128 queries of a head, or half of them,
// and walks the cells of 64 keys that the mask lists for them. For a cell a warp computes
//
//   s = query key^T,  ds = d_query key^T + query d_key^T
//   p = exp2(log2_scale s - lse log2(e)) where stored, 0 elsewhere;  w = scale p ds
//   u += w value + p d_value,  r += row sums of w
//
// with scores and sums in its registers: one pass, and nothing as large as the scores. Each sum
// belongs to one block, so results repeat bitwise. Rows with sums that are not finite are computed
// once more, entry by entry, as by tiles_mma.cu.
//
// Floors, for a cell of 64 x 64 positions of a head: 2 * 64 * 64 * (3 head_size + 2 value_size)
// operations, six times as many in float32: for sizes of 128, 2,560 clocks of a multiprocessor of
// an A100, about 2,100 of an H100. Shared memory gives operands on both sides of three of the five
// products, 320 bytes for each 16 x 8 x 16, and 256 for the others: 2,944 clocks. From the L2 cache
// come the cell's rows of four operands, for two cells of queries at once; from memory all operands
// once, and go results, in float32.
#include "attention/kernels/cotangent_entries.cuh"
#include "attention/kernels/mma_products.cuh"
#include "attention/kernels/mma_steps.cuh"
#include "attention/kernels/store_rows.cuh"

namespace jaxsparse {

// What a block works on: the first ones of its head's keys and values, and of their tangents.
template <typename T>
struct TangentMmaControl {
  MmaItem item;
  const T *key, *d_key, *value, *d_value;

  // By one thread.
  __device__ __forceinline__ void Set(const AttentionTangentWork& p, uint32_t number) {
    item.Set(p, number);
    const uint32_t group = item.head / static_cast<uint32_t>(p.per_group);
    const auto of_group = [&](const Array& array, int64_t size) {
      return item.place.At<const T>(p.batch, array) + group * size;
    };
    key = of_group(p.key, p.head_size);
    d_key = of_group(p.d_key, p.head_size);
    value = of_group(p.value, p.value_size);
    d_value = of_group(p.d_value, p.value_size);
  }
};

template <typename T, TangentMmaConfig kConfig>
class TangentMmaBlock {
  static constexpr MmaTiles kTiles = kConfig.tiles;
  static constexpr int kHeadSize = kTiles.head_size, kValueSize = kTiles.value_size;
  static constexpr int kThreads = kTiles.Threads();
  static constexpr int kScores = kConfig.columns / 2, kSums = kValueSize / 2;
  static_assert(kTiles.strips == 1);
  using KeyFactors = FactorsOfTile<T, kHeadSize + 8>;
  using ValueFactors = FactorsOfTile<T, kValueSize + 8>;

  const AttentionTangentWork& p_;
  const TangentMmaControl<T>& control_;
  const MmaItem& item_;
  MmaRows<kTiles> rows_;
  uint32_t shared_;
  float log2_scale_, shifts_[2];

  __device__ __forceinline__ void CopyOwn(uint32_t to, const Array& array) const {
    const int64_t heads = p_.groups * p_.per_group;
    const T* from = item_.place.At<const T>(p_.batch, array) +
                    (rows_.First() * heads + item_.head) * p_.head_size;
    CopyRows<T, kTiles.rows, kHeadSize, kThreads>(to, from, heads * p_.head_size,
                                                  p_.queries - rows_.First(), p_.head_size);
  }
  __device__ __forceinline__ void CopyStep(uint32_t stage, uint32_t first) const {
    const int64_t left = p_.keys - first;
    const int64_t key_step = p_.groups * p_.head_size, value_step = p_.groups * p_.value_size;
    CopyRows<T, kMaskCell, kHeadSize, kThreads>(stage, control_.key + first * key_step, key_step,
                                                left, p_.head_size);
    CopyRows<T, kMaskCell, kHeadSize, kThreads>(stage + kConfig.KeyBytes(),
                                                control_.d_key + first * key_step, key_step, left,
                                                p_.head_size);
    stage += 2 * kConfig.KeyBytes();
    CopyRows<T, kMaskCell, kValueSize, kThreads>(stage, control_.value + first * value_step,
                                                 value_step, left, p_.value_size);
    CopyRows<T, kMaskCell, kValueSize, kThreads>(stage + kConfig.ValueBytes(),
                                                 control_.d_value + first * value_step, value_step,
                                                 left, p_.value_size);
  }

  // Adds a cell to the sums; `row_sums` are of this thread's columns.
  __device__ __forceinline__ void AddCell(uint32_t stage, bool partial, uint32_t word,
                                          float (&sums)[1][kSums], float (&row_sums)[2]) const {
    const auto scale = static_cast<float>(p_.scale);
    const uint32_t queries =
        shared_ + rows_.of_warp * kTiles.KeyRowBytes() + KeyFactors::LeftPlace();
#pragma unroll 1
    for (int first = 0; first < kMaskCell; first += kConfig.columns) {
      const uint32_t keys = stage + first * kTiles.KeyRowBytes() + KeyFactors::RightPlace();
      const uint32_t values = stage + 2 * kConfig.KeyBytes() + first * kTiles.ValueRowBytes() +
                              ValueFactors::TransposedPlace();
      float scores[1][kScores], d_scores[1][kScores];
      MultiplyRowsByRows<T, kHeadSize>(scores, queries, keys);
      MultiplyRowsByRows<T, kHeadSize>(d_scores, queries + kConfig.OwnTangentsAt(), keys);
      AddRowsByRows<T, kHeadSize>(d_scores, queries, keys + kConfig.KeyBytes());
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[0][i] = ApproximateExp2(scores[0][i] * log2_scale_ + shifts_[RowOfNumber(i)]);
      }
      if (partial) ApplyMaskWord<0>(word >> (first / 2), 0.0f, scores[0]);
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        d_scores[0][i] *= scores[0][i] * scale;
        row_sums[RowOfNumber(i)] += d_scores[0][i];
      }
      MultiplyProductByRows<T>(sums, d_scores, values);
      MultiplyProductByRows<T>(sums, scores, values + kConfig.ValueBytes());
    }
  }

  // Writes rows anew of which `wrong` has the bits, entry by entry, by the warp.
  __device__ __forceinline__ void WriteByEntries(uint32_t wrong) const {
    using Key = RowOfWarp<T, kHeadSize>;
    using Value = RowOfWarp<T, kValueSize>;
    const auto h = static_cast<int>(p_.head_size), e = static_cast<int>(p_.value_size);
    const int64_t heads = p_.groups * p_.per_group;
    const auto scale = static_cast<float>(p_.scale);
    ForEachRow(wrong, [&](int of_warp) {
      const uint32_t row = rows_.FirstOfWarp() + of_warp;
      const int64_t vector = row * heads + item_.head, number = item_.head * p_.queries + row;
      Key query, d_query;
      query.Load(item_.place.At<const T>(p_.batch, p_.query) + vector * h, h);
      d_query.Load(item_.place.At<const T>(p_.batch, p_.d_query) + vector * h, h);
      const float shift = ShiftOf(item_.place.At<const float>(p_.batch, p_.lse)[number]);
      RowOfWarp<float, kValueSize> sums = {};
      float row_sum = 0;
      const auto add = [&](uint32_t u) {
        Key key, d_key;
        Value value, d_value;
        key.Load(control_.key + u * p_.groups * h, h);
        d_key.Load(control_.d_key + u * p_.groups * h, h);
        value.Load(control_.value + u * p_.groups * e, e);
        d_value.Load(control_.d_value + u * p_.groups * e, e);
        const float p = ApproximateExp2(query.Dot(key) * log2_scale_ + shift);
        const float weight = p * scale * (d_query.Dot(key) + query.Dot(d_key));
        row_sum += weight;
#pragma unroll
        for (int i = 0; i < Value::kOfLane; ++i) {
          sums.numbers[i] += weight * value.numbers[i] + p * d_value.numbers[i];
        }
        return !(sums.IsNan(e) && row_sum != row_sum);
      };
      ForEachStored(item_.mask, row % kMaskTile, static_cast<uint32_t>(p_.keys), add);
      sums.Store(item_.place.At<float>(p_.batch, p_.weighted) + vector * e, e, 1.0f);
      if (threadIdx.x % kWarp == 0) item_.place.At<float>(p_.batch, p_.sums)[number] = row_sum;
    });
  }

 public:
  __device__ __forceinline__ TangentMmaBlock(const AttentionTangentWork& p,
                                             const TangentMmaControl<T>& control,
                                             const unsigned char* shared)
      : p_(p),
        control_(control),
        item_(control.item),
        rows_(control.item, blockIdx.x),
        shared_(AddressOfShared(shared)),
        log2_scale_(static_cast<float>(p.scale) * kLog2OfE<float>) {}

  __device__ __forceinline__ void Run() {
    CopyOwn(shared_, p_.query);
    CopyOwn(shared_ + kConfig.OwnTangentsAt(), p_.d_query);
    const int lane = threadIdx.x % kWarp;
    const uint32_t first = rows_.FirstOfWarp();
    const int rows = rows_.LeftOfWarp(p_.queries);
    const float* lse = item_.place.At<const float>(p_.batch, p_.lse) + item_.head * p_.queries;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane / 4;
      shifts_[half] = row < rows ? ShiftOf(lse[first + row]) : 0;
    }
    float sums[1][kSums] = {}, row_sums[2] = {};
    const bool masked = WalkStages<kConfig>(
        rows_, shared_ + kConfig.StagesAt(),
        [&](uint32_t stage, uint32_t column) { CopyStep(stage, column); },
        [&](uint32_t stage, uint32_t, bool partial, const uint32_t (&words)[1]) {
          AddCell(stage, partial, words[0], sums, row_sums);
        });
    const int64_t heads = p_.groups * p_.per_group;
    float* const r = item_.place.At<float>(p_.batch, p_.sums) + item_.head * p_.queries;
    uint32_t wrong = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane / 4;
      const float sum = SumOverLanes(row_sums[half], 4);
      if (lane % 4 == 0 && row < rows) r[first + row] = sum;
      const unsigned of_lanes = __ballot_sync(kAllLanes, sum - sum != 0 && row < rows);
#pragma unroll
      for (int i = 0; i < 8; ++i) wrong |= (of_lanes >> 4 * i & 1) << (8 * half + i);
    }
    float* const u =
        item_.place.At<float>(p_.batch, p_.weighted) + (first * heads + item_.head) * p_.value_size;
    wrong |= StoreStrip<float>(sums[0], {1, 1}, u, heads * p_.value_size, rows,
                               static_cast<int>(p_.value_size));
    if (kComponents<T> == 1 && !masked) return;
    if (wrong == 0) return;
    __syncwarp();  // the same rows are written once more
    WriteByEntries(wrong);
  }
};

template <typename T, TangentMmaConfig kConfig>
__global__ void __launch_bounds__(kConfig.tiles.Threads(), 1)
    AttentionTangentMma(const __grid_constant__ AttentionTangentWork p) {
  extern __shared__ __align__(1024) unsigned char attention_shared[];
  const auto& control =
      SetMmaControl<T, TangentMmaControl<T>, kConfig>(p, attention_shared, blockIdx.x);
  TangentMmaBlock<T, kConfig>(p, control, attention_shared).Run();
}

}  // namespace jaxsparse
