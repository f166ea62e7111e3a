// The sampled dense-dense product on tensor cores: tile by tile x y^T is computed densely, and its
// stored entries are picked. A tile costs what tensor cores take for it, however many entries it
// has, where a product entry by entry reads a row of y for each.
//
// A block goes along the columns of its rows, so that these rows of x are split into planes once
// (as far as they fit), and each row's entries are walked once. The next tile is the one of the
// lowest column that is still to be written: tiles without entries are never come to. Two blocks
// share a multiprocessor, and one picks entries while the other multiplies.
//
// What a tile can't tell is computed entry by entry: entries that stand behind higher columns of
// their row, and sums in float32 that are not finite. There is no plane of an infinite number
// (common/tensor_cores.cuh), so what meets one is NaN in the tile, and it alone: rows and columns
// do not mix.
//
// Floors: kProducts * 2 * rows * columns * d operations of tensor cores for tiles with entries,
// kProducts being 6 in float32 and else 1; from memory x, y, column indices, the result and its
// scale, once each. In between, y passes from the L2 cache once for every kSddmmTensorRows rows.
#include "common/tensor_cores.cuh"
#include "sddmm/problem.h"

namespace jaxsparse {

constexpr int kSddmmTensorWarps = kSddmmTensorThreads / kWarp;
constexpr uint32_t kNoColumn = 0xffffffffu;

// The arrays of one batch entry.
template <typename T, typename Out, typename Index>
struct SddmmArrays {
  const int32_t* row_offsets;
  const Index* column_indices;
  const T* x;
  const T* y;
  const T* scale_by;
  Out* out;

  __device__ SddmmArrays(const SddmmProblem& p, int64_t entry)
      : row_offsets(p.pattern.row_offsets.At<const int32_t>(p.batch, entry)),
        column_indices(p.pattern.column_indices.At<const Index>(p.batch, entry)),
        x(p.x.At<const T>(p.batch, entry)),
        y(p.y.At<const T>(p.batch, entry)),
        scale_by(p.scale_by.data == nullptr ? nullptr : p.scale_by.At<const T>(p.batch, entry)),
        out(p.out.At<Out>(p.batch, entry)) {}

  __device__ uint32_t Column(int i) const { return static_cast<uint32_t>(column_indices[i]); }
  __device__ float Scale(int i) const {
    return scale_by == nullptr ? 1.0f : ToAccumulator(scale_by[i]);
  }
};

// Where in [low, high) the entries from `column` on begin. If columns do not rise, it is some place
// that is never further for a lower column, so that parts cut there have every entry once.
template <typename Arrays>
__device__ __forceinline__ int FirstFrom(const Arrays& arrays, int low, int high, uint32_t column) {
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (arrays.Column(middle) < column) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The entries of a warp's rows that are still to be written, in the order in which they are stored.
// Where they are, a lane knows for one row each; of every row the next 32 pass through registers,
// one a lane.
template <typename T, typename Arrays>
class SampledRows {
  static constexpr int kRows = kSddmmTensorRows / kSddmmTensorWarps;
  const Arrays& arrays_;
  int lane_, warp_;
  int next_ = 0, end_ = 0;
  uint32_t columns_[kRows];
  float scales_[kRows];

  __device__ __forceinline__ void Load(int r) {
    const int i = __shfl_sync(kAllLanes, next_, r) + lane_;
    columns_[r] = kNoColumn;
    if (i >= __shfl_sync(kAllLanes, end_, r)) return;
    columns_[r] = arrays_.Column(i);
    scales_[r] = arrays_.Scale(i);
  }

  // Whether the tile of columns from `first` on tells an entry's sum.
  __device__ __forceinline__ static bool Find(const float* product, int row, uint32_t column,
                                              uint32_t first, float* sum) {
    if (column < first) return false;
    *sum = product[row * kSddmmTensorPitch + (column - first)];
    return kPlanes<T> == 1 || *sum - *sum == 0;
  }

 public:
  // Those of part `part` of `parts`, of the block's rows from `first_row` on.
  __device__ __forceinline__ SampledRows(const SddmmProblem& p, const Arrays& arrays,
                                         const SddmmParts& parts, int64_t stored, int first_row,
                                         int part)
      : arrays_(arrays), lane_(threadIdx.x % kWarp), warp_(threadIdx.x / kWarp) {
    // One lane finds where a row's entries begin, another one where they end.
    static_assert(2 * kRows <= kWarp);
    const int64_t row = int64_t{first_row} + warp_ * kRows + lane_ % kRows;
    const int cut = part + lane_ / kRows;
    int found = 0;
    if (lane_ < 2 * kRows && row < p.pattern.rows) {
      const RowBounds bounds(arrays.row_offsets, row, stored);
      const int begin = static_cast<int>(bounds.begin), end = static_cast<int>(bounds.end);
      found = cut == 0 ? begin
              : cut == parts.across
                  ? end
                  : FirstFrom(arrays, begin, end, static_cast<uint32_t>(cut) * parts.columns);
    }
    end_ = __shfl_sync(kAllLanes, found, (lane_ + kRows) % kWarp);
    if (lane_ < kRows) next_ = found;
    else end_ = 0;
  }

  // The lowest column of all rows' next entries. All of the block's threads meet here.
  __device__ __forceinline__ uint32_t LowestColumn(uint32_t* of_warps) const {
    uint32_t lowest = next_ < end_ ? arrays_.Column(next_) : kNoColumn;
#pragma unroll
    for (int distance = kRows / 2; distance > 0; distance /= 2) {
      const uint32_t other = __shfl_xor_sync(kAllLanes, lowest, distance);
      if (other < lowest) lowest = other;
    }
    if (lane_ == 0) of_warps[warp_] = lowest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kSddmmTensorWarps; ++w) {
      if (of_warps[w] < lowest) lowest = of_warps[w];
    }
    return lowest;
  }

  __device__ __forceinline__ void Load() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) Load(r);
  }

  // Writes what comes next in each row as long as its columns are below `limit`. `product` is the
  // tile of columns from `first` to there.
  __device__ __forceinline__ void Write(const SddmmProblem& p, const float* product, int first_row,
                                        uint32_t first, uint32_t limit) {
    const int begin = next_;
    bool found = true;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      while (true) {
        const int i = __shfl_sync(kAllLanes, next_, r) + lane_;
        const unsigned below = __ballot_sync(kAllLanes, columns_[r] < limit);
        const int taken = __popc(below & ~(below + 1));  // up to the first that is not
        if (lane_ < taken) {
          float sum;
          const bool here = Find(product, warp_ * kRows + r, columns_[r], first, &sum);
          if (here) FromAccumulator(sum * scales_[r], &arrays_.out[i]);
          found = found && here;
        }
        if (lane_ == r) next_ += taken;
        if (taken < kWarp) break;
        Load(r);
      }
    }
    if (__ballot_sync(kAllLanes, !found) != 0) WriteOthers(p, product, first_row, first, begin);
  }

 private:
  // From `begin` up to what comes next, the entries whose sums the tile does not tell.
  __device__ __forceinline__ void WriteOthers(const SddmmProblem& p, const float* product,
                                              int first_row, uint32_t first, int begin) {
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      const int end = __shfl_sync(kAllLanes, next_, r);
      const T* x = arrays_.x + (int64_t{first_row} + warp_ * kRows + r) * p.d;
#pragma unroll 1
      for (int i = __shfl_sync(kAllLanes, begin, r) + lane_; i < end; i += kWarp) {
        const uint32_t column = arrays_.Column(i);
        float sum;
        if (Find(product, warp_ * kRows + r, column, first, &sum)) continue;
        const T* y = arrays_.y + column * p.d;
        sum = 0;
        for (int64_t d = 0; d < p.d; ++d) sum += ToAccumulator(x[d]) * ToAccumulator(y[d]);
        FromAccumulator(sum * arrays_.Scale(i), &arrays_.out[i]);
      }
    }
  }
};

// `kKept`: d is small enough for a part's rows of x to be kept.
template <typename T, typename Out, typename Index, bool kKept>
__global__ void __launch_bounds__(kSddmmTensorThreads, 2)
    SddmmTensorCores(const __grid_constant__ SddmmProblem p) {
  using PlaneX = Plane<kSddmmTensorRows, kSddmmTensorInner>;
  using PlaneY = Plane<kSddmmTensorColumns, kSddmmTensorInner>;
  using Arrays = SddmmArrays<T, Out, Index>;
  constexpr int kThreads = kSddmmTensorThreads;
  using TileX = TileInRegisters<T, kSddmmTensorRows, kSddmmTensorInner, kThreads>;
  using TileY = TileInRegisters<T, kSddmmTensorColumns, kSddmmTensorInner, kThreads>;
  constexpr int kStepBytes = kPlanes<T> * PlaneX::kBytes;  // of x
  constexpr int kStageBytes = SddmmStageBytes(kPlanes<T>);
  static_assert(SddmmKeptBytes(kPlanes<T>) == kSddmmTensorKept * kStepBytes);
  static_assert(kStageBytes == kPlanes<T> * PlaneY::kBytes);
  // Warps along the columns and rows of a tile.
  constexpr int kAcross = 4, kDown = kSddmmTensorWarps / kAcross;
  constexpr int kWarpRows = kSddmmTensorRows / kDown, kWarpColumns = kSddmmTensorColumns / kAcross;
  extern __shared__ __align__(128) unsigned char sddmm_shared[];
  unsigned char* stages = sddmm_shared + SddmmKeptBytes(kPlanes<T>);
  auto* sums = reinterpret_cast<float*>(stages);
  auto* of_warps = reinterpret_cast<uint32_t*>(stages + SddmmTileBytes(kPlanes<T>));

  const unsigned thread = threadIdx.x;
  const int warp = thread / kWarp;
  const int row = warp / kAcross * kWarpRows, column = warp % kAcross * kWarpColumns;
  const SddmmParts parts = SddmmPartsOf(p);
  const int64_t per_entry = int64_t{parts.down} * parts.across;
  const int64_t rows = p.pattern.rows, nse = p.pattern.nse;
  const auto columns = static_cast<uint32_t>(p.pattern.columns);
  const int steps = static_cast<int>(CeilDivide(p.d, kSddmmTensorInner));
  const auto of_x = [&](int step) { return sddmm_shared + step % kSddmmTensorKept * kStepBytes; };
  const auto of_y = [&](int step) { return stages + step % kSddmmStages * kStageBytes; };
  for (int64_t unit = blockIdx.x; unit < p.batch.count * per_entry; unit += gridDim.x) {
    const Arrays arrays(p, unit / per_entry);
    const int64_t stored = rows > 0 ? RowBounds::Clamp(arrays.row_offsets[rows], nse) : 0;
    for (int64_t i = stored + unit % per_entry * kThreads + thread; i < nse;
         i += per_entry * kThreads) {
      FromAccumulator(0.0f, &arrays.out[i]);
    }
    const int first_row = static_cast<int>(unit / parts.across % parts.down * kSddmmTensorRows);
    TileY y;
    bool finite = true;  // of no matter: the sums tell
    const bool wide = TileX::IsWide(arrays.x, p.d) && TileY::IsWide(arrays.y, p.d);
    const auto load_x = [&](TileX& x, int step) {
      x.Load(arrays.x, rows, p.d, first_row, step * int64_t{kSddmmTensorInner}, wide, thread);
    };
    if constexpr (kKept) {
      TileX x[2];  // more of them at a time leave addresses behind that take registers later
#pragma unroll 1
      for (int step = 0; step < kSddmmTensorKept; step += 2) {
        load_x(x[0], step);
        load_x(x[1], step + 1);
        x[0].Store(of_x(step), thread, &finite);
        x[1].Store(of_x(step + 1), thread, &finite);
      }
    }
    SampledRows<T, Arrays> entries(p, arrays, parts, stored, first_row,
                                   static_cast<int>(unit % parts.across));
    uint32_t lowest = entries.LowestColumn(of_warps);
    while (lowest < columns) {
      const uint32_t first = lowest / kSddmmTensorColumns * kSddmmTensorColumns;
      const auto load_y = [&](int step) {
        y.Load(arrays.y, columns, p.d, first, step * int64_t{kSddmmTensorInner}, wide, thread);
      };
      WarpProduct<T, kWarpRows / 16, kWarpColumns / 8> product;
      if (steps > 0) load_y(0);
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        TileX x;
        if constexpr (!kKept) load_x(x, step);  // no registers are left to have it earlier
        y.Store(of_y(step), thread, &finite);
        if constexpr (!kKept) x.Store(of_x(step), thread, &finite);
        if (step + 1 < steps) load_y(step + 1);
        // Once for each stage: nobody is further behind than in the product of the other one.
        __syncthreads();
#pragma unroll 1
        for (int k = 0; k < kSddmmTensorInner; k += 16) {
          product.template Add<PlaneX, PlaneY, false>(of_x(step), of_y(step), row, column, k);
        }
      }
      entries.Load();
      __syncthreads();  // the stages are read
      product.ForEachPair([&](int r, int c, float low, float high) {
        *reinterpret_cast<Packet<float, 2>*>(&sums[(row + r) * kSddmmTensorPitch + column + c]) = {
            {low, high}};
      });
      __syncthreads();
      const uint32_t limit = first + kSddmmTensorColumns;
      entries.Write(p, sums, first_row, first, limit < columns ? limit : columns);
      lowest = entries.LowestColumn(of_warps);
    }
    __syncthreads();  // the next part's lowest columns
  }
}

}  // namespace jaxsparse
