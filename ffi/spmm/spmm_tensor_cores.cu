// The sparse-dense product on tensor cores: tile by tile the matrix is written out densely in
// shared memory, and multiplied there. A stored entry costs three stores of 16 bits however many
// columns x has, where a product entry by entry reads a row of x for each; a position that is not
// stored costs what a tensor core takes for it.
//
// Half of a block's warps write the next tile out and bring x, the others multiply. What the planes
// of a tile can't stand for (common/tensor_cores.cuh), columns that are not in order or stand
// twice, makes the block compute its part of the result entry by entry instead: then zeros of the
// tile do not meet a NaN of x either.
//
// Floors: kProducts * 2 * rows * columns * n operations of tensor cores, kProducts being 6 in
// float32 and else 1; from memory the entries, x and the result, once each.
#include "common/tensor_cores.cuh"
#include "spmm/matrices.cuh"

namespace jaxsparse {

constexpr int kWriters = 128, kMultipliers = 128;  // of a block's threads
static_assert(kWriters + kMultipliers == kSpmmTensorThreads);

template <typename T, int kColumns, bool kLeft>
struct SpmmStage {
  using PlaneA = Plane<kSpmmTensorRows, kSpmmTensorInner>;
  static constexpr int kXRows = kLeft ? kColumns : kSpmmTensorInner;
  static constexpr int kXWidth = kLeft ? kSpmmTensorInner : kColumns;
  using PlaneX = Plane<kXRows, kXWidth>;
  using TileOfX = TileInRegisters<T, kXRows, kXWidth, kWriters>;
  static constexpr int kXAt = kPlanes<T> * PlaneA::kBytes;
  static constexpr int kBytes = kXAt + kPlanes<T> * PlaneX::kBytes;
};
static_assert(SpmmStage<float, 128, false>::kBytes == SpmmStageBytes(3, 128));

// The entries of a warp's rows, in the order of their columns: of each row the next 32 are in
// registers, one a lane, so that a tile does not wait for memory. Where they are, a lane knows for
// one row each.
template <typename T, typename Index, typename M>
class EntriesOfRows {
  static constexpr int kRows = kSpmmTensorRows * kWarp / kWriters;
  static constexpr int kNone = 0x7fffffff;
  const M& m_;
  int lane_;
  int next_ = 0, end_ = 0;
  int columns_[kRows];
  T values_[kRows];

  // The next entries of those rows that `moved` has a bit of; all loads are on their way at once.
  __device__ __forceinline__ void Load(unsigned moved) {
    int at[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int i = __shfl_sync(kAllLanes, next_, r) + lane_;
      const bool stored = i < __shfl_sync(kAllLanes, end_, r);
      at[r] = -1;
      if (!(moved >> r & 1)) continue;
      columns_[r] = stored ? static_cast<int>(m_.column_indices[i]) : kNone;
      if (stored) at[r] = m_.permutation == nullptr ? i : m_.permutation[i];
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (at[r] >= 0) values_[r] = m_.values[at[r]];
    }
  }

  // Writes those entries of a row that lie in a tile from `k` on and behind `last`; how many.
  template <typename PlaneA>
  __device__ __forceinline__ int Scatter(unsigned char* tile, int row, int r, int k, int last,
                                         bool* exact) {
    const int column = columns_[r];
    const bool inside = column < k + kSpmmTensorInner;
    int before = __shfl_up_sync(kAllLanes, column, 1);
    if (lane_ == 0) before = last;
    if (inside) {
      *exact = *exact && column > before;
      uint32_t words[kPlanes<T>];
      Split(values_[r], T{}, words, exact);
#pragma unroll
      for (int plane = 0; plane < kPlanes<T>; ++plane) {
        if (column < k) continue;
        *reinterpret_cast<uint16_t*>(tile + plane * PlaneA::kBytes +
                                     PlaneA::At(row + r, column - k)) =
            static_cast<uint16_t>(words[plane]);
      }
    }
    const int taken = __popc(__ballot_sync(kAllLanes, inside));
    if (lane_ == r) next_ += taken;
    return taken;
  }

 public:
  __device__ __forceinline__ EntriesOfRows(const M& m, int64_t rows, int64_t nse, int64_t first)
      : m_(m), lane_(threadIdx.x % kWarp) {
    static_assert(kRows <= kWarp);
    if (lane_ < kRows && first + lane_ < rows) {
      const RowBounds bounds(m.row_offsets, first + lane_, nse);
      next_ = static_cast<int>(bounds.begin);
      end_ = static_cast<int>(bounds.end);
    }
    Load(~0u);
  }

  // Writes out columns `k` to k + kSpmmTensorInner of these rows, of the tile's from `row` on.
  template <typename PlaneA>
  __device__ __forceinline__ void Write(unsigned char* tile, int row, int k, bool* exact) {
#pragma unroll
    for (int i = 0; i < kPlanes<T> * kRows * kSpmmTensorInner * 2 / (16 * kWarp); ++i) {
      const int at = (i * kWarp + lane_) * 16;
      constexpr int kOfRows = kRows * kSpmmTensorInner * 2;
      const int plane = at / kOfRows, within = at % kOfRows;
      *reinterpret_cast<Packet<uint32_t, 4>*>(tile + plane * PlaneA::kBytes +
                                              row * kSpmmTensorInner * 2 + within) = {};
    }
    __syncwarp();
    unsigned moved = 0, full = 0;  // rows
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int taken = Scatter<PlaneA>(tile, row, r, k, k - 1, exact);
      moved |= static_cast<unsigned>(taken > 0) << r;
      full |= static_cast<unsigned>(taken == kWarp) << r;
    }
    // Of a full row the lanes held too few: its next entries may lie in the tile, too.
    while (full != 0) {
      int last[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) last[r] = __shfl_sync(kAllLanes, columns_[r], kWarp - 1);
      Load(full);
      unsigned still_full = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (!(full >> r & 1)) continue;
        const int taken = Scatter<PlaneA>(tile, row, r, k, last[r], exact);
        still_full |= static_cast<unsigned>(taken == kWarp) << r;
      }
      full = still_full;
    }
    Load(moved);
  }
};

// The result's rows of a tile entry by entry: any numbers, in any order.
template <int kColumns, bool kLeft, typename T, typename M>
__device__ void MultiplyEntryByEntry(const SpmmProblem& p, const M& m, int64_t first_row,
                                     int64_t first_column) {
  const int lane = threadIdx.x % kWarp;
  for (int r = threadIdx.x / kWarp; r < kSpmmTensorRows; r += kSpmmTensorThreads / kWarp) {
    const int64_t row = first_row + r;
    if (row >= p.pattern.rows) break;
    const RowBounds bounds(m.row_offsets, row, p.pattern.nse);
    for (int64_t c = first_column + lane; c < first_column + kColumns && c < p.n; c += kWarp) {
      Accumulator<T> sum = 0;
      for (int64_t i = bounds.begin; i < bounds.end; ++i) {
        const int64_t k = m.column_indices[i];
        sum += m.Value(i) * ToAccumulator(m.x[kLeft ? c * p.pattern.columns + k : k * p.n + c]);
      }
      m.Write(p.activation, row, kLeft ? c * p.pattern.rows + row : row * p.n + c, sum);
    }
  }
}

template <typename T, typename Out, typename Index, int kColumns, bool kLeft>
__global__ void __launch_bounds__(kSpmmTensorThreads)
    SpmmTensorCores(const __grid_constant__ SpmmProblem p) {
  using Stage = SpmmStage<T, kColumns, kLeft>;
  using M = Matrices<T, Out, Index>;
  // Warps that multiply, along rows and columns.
  constexpr int kAcross = kColumns > 32 ? 2 : 1, kDown = kMultipliers / kWarp / kAcross;
  constexpr int kWarpRows = kSpmmTensorRows / kDown, kWarpColumns = kColumns / kAcross;
  extern __shared__ __align__(128) unsigned char spmm_stages[];
  const int64_t down = CeilDivide(p.pattern.rows, kSpmmTensorRows),
                across = CeilDivide(p.n, kColumns);
  const int64_t tiles = p.batch.count * down * across;
  const int steps = static_cast<int>(CeilDivide(p.pattern.columns, kSpmmTensorInner));
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const M m(p, tile / (down * across));
    const int64_t first_row = tile / across % down * kSpmmTensorRows;
    const int64_t first_column = tile % across * kColumns;
    bool exact = true;
    WarpProduct<T, kWarpRows / 16, kWarpColumns / 8> product;
    const int warp = threadIdx.x / kWarp;
    const int row = warp / kAcross * kWarpRows, column = warp % kAcross * kWarpColumns;
    // At its end a step's tile is written and the one before it read: two stages are enough.
    if (threadIdx.x < kMultipliers) {
      for (int step = 0; step < steps; ++step) {
        const int stage = step % kSpmmStages;
        const unsigned char* from = spmm_stages + stage * Stage::kBytes;
        WaitAt<kSpmmTensorThreads>(kAllThreads);
#pragma unroll 1
        for (int k = 0; k < kSpmmTensorInner; k += 16) {
          product.template Add<typename Stage::PlaneA, typename Stage::PlaneX, !kLeft>(
              from, from + Stage::kXAt, row, column, k);
        }
      }
      if constexpr (kPlanes<T> > 1) {  // planes may overflow where the number itself would not
        product.ForEachPair([&](int, int, float low, float high) {
          exact = exact && low - low == 0 && high - high == 0;
        });
      }
    } else {
      const int thread = threadIdx.x - kMultipliers;
      constexpr int kRows = kSpmmTensorRows * kWarp / kWriters;  // of a warp
      const int own = thread / kWarp * kRows;
      EntriesOfRows<T, Index, M> entries(m, p.pattern.rows, p.pattern.nse, first_row + own);
      const int64_t inner = p.pattern.columns;
      typename Stage::TileOfX x;
      const bool wide = x.IsWide(m.x, kLeft ? inner : p.n);
      const auto load = [&](int step) {
        const int64_t k = static_cast<int64_t>(step) * kSpmmTensorInner;
        x.Load(m.x, kLeft ? p.n : inner, kLeft ? inner : p.n, kLeft ? first_column : k,
               kLeft ? k : first_column, wide, thread);
      };
      if (steps > 0) load(0);
      for (int step = 0; step < steps; ++step) {
        const int stage = step % kSpmmStages;
        unsigned char* to = spmm_stages + stage * Stage::kBytes;
        x.Store(to + Stage::kXAt, thread, &exact);
        if (step + 1 < steps) load(step + 1);
        entries.template Write<typename Stage::PlaneA>(to, own, step * kSpmmTensorInner, &exact);
        WaitAt<kSpmmTensorThreads>(kAllThreads);
      }
    }
    if (__syncthreads_or(!exact)) {
      MultiplyEntryByEntry<kColumns, kLeft, T>(p, m, first_row, first_column);
    } else if (threadIdx.x < kMultipliers) {
      product.ForEachPair([&](int r, int c, float low, float high) {
        const int64_t at_row = first_row + row + r, at_column = first_column + column + c;
        if (at_row >= p.pattern.rows || at_column >= p.n) return;
        if constexpr (kLeft) {
          m.Write(p.activation, at_row, at_column * p.pattern.rows + at_row, low);
          if (at_column + 1 < p.n) {
            m.Write(p.activation, at_row, (at_column + 1) * p.pattern.rows + at_row, high);
          }
        } else if (at_column + 1 < p.n) {
          float pair[2] = {low, high};
          m.WriteRun(p.activation, at_row, at_row * p.n + at_column, pair);
        } else {
          m.Write(p.activation, at_row, at_row * p.n + at_column, low);
        }
      });
    }
    __syncthreads();  // the next tile's stages
  }
}

}  // namespace jaxsparse
