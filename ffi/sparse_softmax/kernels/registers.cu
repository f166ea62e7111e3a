// The softmax over stored entries and its derivative with rows in registers: a group of lanes
// of a warp, or a block where rows are longer than that, owns a row, reads it once by wide loads,
// and writes it once. Rows that find no room there, that reach to the end of their array, or whose
// arrays are not aligned are read again for each pass, by a warp.
//
// Floor: values in and out once, 2 or 3 times nse elements; one exponential for each entry, where
// the generic kernel takes two.
#include "cuda/vector_access.cuh"
#include "sparse_softmax/kernels/registers.h"
#include "sparse_softmax/kernels/rows.cuh"

namespace jaxsparse {

// The entries of a row in a lane's registers: vectors, as many apart as lanes own the row. A row's
// first vector begins in front of the row, where a load is aligned, and its last one may reach into
// the next row: what does not belong to the row is read, but not used.
template <typename T, SparseSoftmaxRegistersConfig kConfig>
class LaneEntries {
  static constexpr int kLanes = kConfig.lanes, kVectors = kConfig.vectors;
  using Acc = Accumulator<T>;

 public:
  static constexpr int kCount = 16 / static_cast<int>(sizeof(T));

  __device__ __forceinline__ static bool Fits(RowBounds bounds, int64_t nse) {
    constexpr int64_t kMost = (int64_t{kLanes} * kVectors - 1) * kCount;
    return bounds.end - bounds.begin <= kMost && CeilDivide(bounds.end, kCount) * kCount <= nse;
  }

  __device__ __forceinline__ LaneEntries(RowBounds bounds, int lane)
      : first_(bounds.begin / kCount * kCount),
        place_(lane * kCount),
        begin_(static_cast<int>(bounds.begin - first_)),
        end_(static_cast<int>(bounds.end - first_)) {}

  // Times `factor`; what is not stored is `missing`.
  __device__ __forceinline__ void Load(const T* from, Acc factor, Acc missing,
                                       Acc (&to)[kVectors][kCount]) const {
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      Vector<T, kCount> vector;
      if (Place(r, 0) < end_) vector = LoadVector<kCount>(from + first_ + Place(r, 0), true);
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        to[r][e] = IsStored(r, e) ? factor * ToAccumulator(vector.elements[e]) : missing;
      }
    }
  }

  __device__ __forceinline__ void Store(T* to, const Acc (&from)[kVectors][kCount]) const {
#pragma unroll
    for (int r = 0; r < kVectors; ++r) {
      Vector<T, kCount> vector;
#pragma unroll
      for (int e = 0; e < kCount; ++e) FromAccumulator(from[r][e], &vector.elements[e]);
      T* run = to + first_ + Place(r, 0);
      if (IsStored(r, 0) && Place(r, kCount) <= end_) {
        *reinterpret_cast<Vector<T, kCount>*>(run) = vector;
      } else {
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          if (IsStored(r, e)) run[e] = vector.elements[e];
        }
      }
    }
  }

 private:
  // From where the first vector of the row begins.
  __device__ __forceinline__ int Place(int r, int e) const {
    return place_ + r * (kLanes * kCount) + e;
  }
  __device__ __forceinline__ bool IsStored(int r, int e) const {
    return (r > 0 || Place(r, e) >= begin_) && Place(r, e) < end_;
  }

  int64_t first_;
  int place_, begin_, end_;
};

// What the lanes that own a row have together, in a fixed order.
template <typename Acc, int kLanes>
class LanesOfRow {
  static constexpr int kWarps = (kLanes + kWarp - 1) / kWarp;
  Acc (&parts_)[2][kWarps];  // warps', for one time and the next
  int turn_ = 0;

 public:
  __device__ __forceinline__ explicit LanesOfRow(Acc (&parts)[2][kWarps]) : parts_(parts) {}

  __device__ __forceinline__ Acc Max(Acc x) {
    const auto greater = [](Acc a, Acc b) { return b > a ? b : a; };
    return OfWarps(MaxOverLanes(x, kLanes < kWarp ? kLanes : kWarp), greater);
  }
  __device__ __forceinline__ Acc Sum(Acc x) {
    const auto sum = [](Acc a, Acc b) { return a + b; };
    return OfWarps(SumOverLanes(x, kLanes < kWarp ? kLanes : kWarp), sum);
  }

 private:
  template <typename Function>
  __device__ __forceinline__ Acc OfWarps(Acc x, Function function) {
    if constexpr (kWarps == 1) return x;
    Acc* parts = parts_[turn_];
    turn_ ^= 1;  // parts of the last time may still be read
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
    __syncthreads();
    Acc all = parts[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) all = function(all, parts[warp]);
    return all;
  }
};

// All lanes of a warp call these, those of groups without a row with empty bounds; or all threads
// of a block.
template <SparseSoftmaxRegistersConfig kConfig, typename T>
__device__ __forceinline__ void ForwardInRegisters(
    const T* values, T* out, RowBounds bounds, int lane, Accumulator<T> scale,
    LanesOfRow<Accumulator<T>, kConfig.lanes>& lanes) {
  constexpr int kVectors = kConfig.vectors;
  using Acc = Accumulator<T>;
  using Entries = LaneEntries<T, kConfig>;
  const Entries entries(bounds, lane);
  Acc x[kVectors][Entries::kCount], max = -kInfinity<Acc>, sum = 0;
  entries.Load(values, scale, max, x);
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
#pragma unroll
    for (int e = 0; e < Entries::kCount; ++e) {
      max = x[r][e] > max ? x[r][e] : max;  // a NaN is skipped here and reaches the sum below
    }
  }
  max = lanes.Max(max);
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
#pragma unroll
    for (int e = 0; e < Entries::kCount; ++e) {
      x[r][e] = exp(x[r][e] - max);
      sum += x[r][e];
    }
  }
  const Acc factor = Acc(1) / lanes.Sum(sum);  // a division for each would take longer
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
#pragma unroll
    for (int e = 0; e < Entries::kCount; ++e) x[r][e] *= factor;
  }
  entries.Store(out, x);
}

template <SparseSoftmaxRegistersConfig kConfig, typename T>
__device__ __forceinline__ void BackwardInRegisters(
    const T* y, const T* tangent, T* out, RowBounds bounds, int lane, Accumulator<T> scale,
    LanesOfRow<Accumulator<T>, kConfig.lanes>& lanes) {
  constexpr int kVectors = kConfig.vectors;
  using Acc = Accumulator<T>;
  using Entries = LaneEntries<T, kConfig>;
  const Entries entries(bounds, lane);
  Acc of_y[kVectors][Entries::kCount], t[kVectors][Entries::kCount], sum = 0;
  entries.Load(y, Acc(1), Acc(0), of_y);
  entries.Load(tangent, Acc(1), Acc(0), t);
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
#pragma unroll
    for (int e = 0; e < Entries::kCount; ++e) sum += of_y[r][e] * t[r][e];
  }
  sum = lanes.Sum(sum);
#pragma unroll
  for (int r = 0; r < kVectors; ++r) {
#pragma unroll
    for (int e = 0; e < Entries::kCount; ++e) t[r][e] = scale * of_y[r][e] * (t[r][e] - sum);
  }
  entries.Store(out, t);
}

template <typename T, SparseSoftmaxRegistersConfig kConfig>
__global__ void __launch_bounds__(kConfig.Threads())
    SparseSoftmaxInRegisters(const __grid_constant__ SparseSoftmaxProblem p) {
  using Entries = LaneEntries<T, kConfig>;
  constexpr bool kBackward = kConfig.backward;
  constexpr int kLanes = kConfig.lanes, kThreads = kConfig.OwnerThreads();
  constexpr int kGroups = kConfig.OwnerRows(), kOwners = kConfig.Owners();
  static_assert(kThreads == kWarp || kOwners == 1);
  const int64_t rows = p.pattern.rows, nse = p.pattern.nse;
  const int64_t of_entry = rows > 0 ? CeilDivide(rows, kGroups) : 1;
  const int64_t owners = static_cast<int64_t>(gridDim.x) * kOwners;
  const int64_t own = static_cast<int64_t>(blockIdx.x) * kOwners + threadIdx.x / kThreads;
  const int lane = threadIdx.x % kLanes, group = threadIdx.x % kThreads / kLanes;
  static __shared__ Accumulator<T> parts[2][kThreads / kWarp];
  LanesOfRow<Accumulator<T>, kLanes> lanes(parts);
  const Accumulator<T> scale = static_cast<Accumulator<T>>(p.scale);
  for (int64_t unit = own; unit < p.batch.count * of_entry; unit += owners) {
    const int64_t entry = unit / of_entry, place = unit % of_entry * kGroups + group;
    const int32_t* row_offsets = p.pattern.row_offsets.At<const int32_t>(p.batch, entry);
    const int32_t* order = p.pattern.row_order.At<const int32_t>(p.batch, entry);
    const T* values = p.values.At<const T>(p.batch, entry);
    const T* tangent = kBackward ? p.tangent.At<const T>(p.batch, entry) : nullptr;
    T* out = p.out.At<T>(p.batch, entry);
    if (unit % of_entry == of_entry - 1 && threadIdx.x % kThreads < kWarp) {
      ClearPadding(out, row_offsets, rows, nse);
      __syncwarp();
    }
    if (rows == 0) continue;
    // A row that there is not, as indices may say of any, has no entries.
    const uint32_t row = place < rows ? static_cast<uint32_t>(order[place]) : ~0u;
    const bool exists = row < static_cast<uint32_t>(rows);
    RowBounds bounds(row_offsets, exists ? row : 0, exists ? nse : 0);
    using Wide = Vector<T, Entries::kCount>;
    const bool aligned =
        IsAligned<Wide>(values) && IsAligned<Wide>(out) && (!kBackward || IsAligned<Wide>(tangent));
    const bool fits = aligned && Entries::Fits(bounds, nse);
    // Rows are in the order of their lengths, so that few warps have both kinds.
    for (unsigned left = __ballot_sync(kAllLanes, !fits && lane == 0); left != 0;
         left &= left - 1) {
      const int owner = __ffs(static_cast<int>(left)) - 1;
      RowBounds of_long = bounds;
      of_long.begin = __shfl_sync(kAllLanes, bounds.begin, owner);
      of_long.end = __shfl_sync(kAllLanes, bounds.end, owner);
      if constexpr (kBackward) {
        BackwardRow(values, tangent, out, of_long, scale);
      } else {
        ForwardRow(values, out, of_long, scale);
      }
      __syncwarp();
    }
    if (!fits) bounds.begin = bounds.end = 0;
    if (!__any_sync(kAllLanes, bounds.begin < bounds.end)) continue;  // in all of a block's warps
    if constexpr (kBackward) {
      BackwardInRegisters<kConfig>(values, tangent, out, bounds, lane, scale, lanes);
    } else {
      ForwardInRegisters<kConfig>(values, out, bounds, lane, scale, lanes);
    }
  }
}

}  // namespace jaxsparse
