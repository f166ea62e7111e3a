// The epilogue of the tensor core kernel of the sampled dense-dense product (tensor_cores.cu):
// picks the stored entries of rows from products of tiles.
#pragma once

#include "sddmm/kernels/tensor_cores_schedule.cuh"

namespace jaxsparse {

// The stored entries of a warp's rows of a unit in one tile after another. Eight lanes have four
// neighbouring rows; each has every eighth entry of the next tile in registers, which come while
// that tile is multiplied. Where they end is loaded a tile earlier.
template <typename T, typename Out, typename Index, bool kScaled>
class SampledRows {
  static constexpr int kOfRow = 8;                               // lanes
  static constexpr int kRows = kSddmmWarpRows * kOfRow / kWarp;  // of a lane
  static constexpr int kSlots = 4;                               // entries of each row
  static constexpr int kPitch = kSddmmProductPitch * static_cast<int>(sizeof(float));
  using Places = Vector<int32_t, kRows>;
  const SddmmUnit& unit_;
  const int nse_;
  const int lane_ = threadIdx.x % kOfRow;                             // of those of a row
  const int row_ = threadIdx.x % kSddmmRoleThreads / kOfRow * kRows;  // the first one
  const int32_t* starts_;
  uint32_t tiles_;                            // whose ends are not on their way yet
  int place_[kRows] = {}, left_[kRows] = {};  // of the lane's first entry; of the row from there on
  Places after_ = {};                         // ends of the rows in the tile behind
  int slots_;                     // that the next tile takes, or one more than there are
  float told_ = 0;                // NaN if a sum is not finite
  uint32_t held_[kRows][kSlots];  // columns, then sums
  T scales_[kRows][kSlots];

 public:
  __device__ __forceinline__ SampledRows(const Preparation& prepared, const SddmmUnit& unit,
                                         int nse)
      : unit_(unit),
        nse_(nse),
        starts_(StartsOfRow(prepared, unit, row_)),
        tiles_(starts_ == nullptr ? 0 : unit.tiles) {
    if (tiles_ != 0) {
      const Places begin = StartsOf(__ffs(static_cast<int>(tiles_)) - 1);
#pragma unroll
      for (int row = 0; row < kRows; ++row) place_[row] = begin.elements[row];
    }
    LoadEnds();
    Load();
  }

  // Loads the entries of the next tile.
  __device__ __forceinline__ void Load() {
    int most = 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      // The complements that stand in the end are no places: nothing is left behind them.
      const uint32_t begin = static_cast<uint32_t>(place_[row] + left_[row]);
      place_[row] = static_cast<int>(Within(begin, int64_t{nse_} + 1)) + lane_;
      left_[row] = Clamp(after_.elements[row], ~nse_, nse_) - place_[row];
      if (left_[row] > most) most = left_[row];
    }
    LoadEnds();
    slots_ = 0;
#pragma unroll
    for (int j = 0; j <= kSlots; ++j) slots_ += __any_sync(kAllLanes, most > j * kOfRow) ? 1 : 0;
    // What was there before would stay in registers while it was written.
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int j = 0; j < kSlots; ++j) held_[row][j] = 0, scales_[row][j] = T();
    }
    const Index* column_indices = Columns();
    const T* scale_by = Scales();
    ForEach([&](int row, int j, int at) {
      held_[row][j] = static_cast<uint32_t>(column_indices[at]);
      if constexpr (kScaled) scales_[row][j] = scale_by[at];
    });
  }

  // Reads their sums from the product of the tile, and writes those that there are no registers
  // for.
  __device__ __forceinline__ void Read(uint32_t product) {
    product += row_ * kPitch;
    // All sums are on their way, where the columns were, before the first one is written.
    ForEach([&](int row, int j, int) {
      held_[row][j] = __float_as_uint(SumAt(product, row, held_[row][j]));
    });
    if (slots_ > kSlots) WriteMore(product);
  }
  // Writes the others.
  __device__ __forceinline__ void Write() {
    Out* out = Result();
    ForEach([&](int row, int j, int at) {
      WriteSum(__uint_as_float(held_[row][j]), scales_[row][j], &out[at]);
    });
  }

  // Writes what tiles did not tell, entry by entry; called behind the last one.
  __device__ void WriteOthers(const SddmmProblem& p) {
    bool is_told = kComponents<T> == 1 || told_ == 0;
#pragma unroll
    for (int row = 0; row < kRows; ++row) is_told = is_told && place_[row] + left_[row] >= 0;
    if (!__any_sync(kAllLanes, !is_told)) return;
    __syncwarp();  // what other lanes have written is read
    const T* of_x = p.x.At<const T>(p.batch, unit_.entry);
    const T* of_y = p.y.At<const T>(p.batch, unit_.entry);
    const int of_lane = row_ % kSddmmWarpRows;
#pragma unroll 1
    for (int r = 0; r < kSddmmWarpRows; ++r) {
      const int64_t row = int64_t{unit_.first_row} + row_ - of_lane + r;
      if (row >= p.pattern.rows) break;
      const int32_t* starts = starts_ - of_lane + r;
      const int end = starts[unit_.count * kTileSize];
      const int begin = Clamp(starts[0], 0, nse_), behind = Clamp(end < 0 ? ~end : end, 0, nse_);
      const T* x = of_x + row * p.d;
#pragma unroll 1
      for (int i = begin + static_cast<int>(threadIdx.x % kWarp); i < behind; i += kWarp) {
        if (end >= 0) {
          const float before = ToAccumulator(Result()[i]);
          if (before - before == 0) continue;
        }
        const auto column = static_cast<int64_t>(Columns()[i]);
        if (static_cast<uint64_t>(column) >= p.pattern.columns) continue;
        const T* y = of_y + column * p.d;
        float sum = 0;
#pragma unroll 1
        for (int64_t d = 0; d < p.d; ++d) sum += ToAccumulator(x[d]) * ToAccumulator(y[d]);
        if constexpr (kScaled) sum *= ToAccumulator(Scales()[i]);
        FromAccumulator(sum, &Result()[i]);
      }
    }
  }

 private:
  __device__ const Index* Columns() const {
    return static_cast<const Index*>(unit_.column_indices);
  }
  __device__ const T* Scales() const { return static_cast<const T*>(unit_.scale_by); }
  __device__ Out* Result() const { return static_cast<Out*>(unit_.out); }

  __device__ __forceinline__ Places StartsOf(int tile) const {
    return LoadVector<kRows>(starts_ + tile * kTileSize, true);
  }

  // Of the next tile that has entries, and so of those before it.
  __device__ __forceinline__ void LoadEnds() {
    if (tiles_ != 0) after_ = StartsOf(__ffs(static_cast<int>(tiles_)));
    tiles_ &= tiles_ - 1;
  }

  // Calls with each entry that the lane has in registers.
  template <typename Function>
  __device__ __forceinline__ void ForEach(Function function) const {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      if (j >= slots_) continue;
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
        if (j * kOfRow < left_[row]) function(row, j, place_[row] + j * kOfRow);
      }
    }
  }

  __device__ __forceinline__ static float SumAt(uint32_t product, int row, uint32_t column) {
    return SharedAt<const float>(product + row * kPitch +
                                 column % kSddmmTileColumns * sizeof(float));
  }
  __device__ __forceinline__ void WriteSum(float sum, T scale, Out* to) {
    if constexpr (kComponents<T> > 1) told_ += sum * 0.0f;
    if constexpr (kScaled) sum *= ToAccumulator(scale);
    FromAccumulator(sum, to);
  }

  // Writes the entries that lanes do not have in registers.
  __device__ void WriteMore(uint32_t product) {
    const Index* column_indices = Columns();
    const T* scale_by = Scales();
    Out* out = Result();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll 1
      for (int j = kSlots * kOfRow; j < left_[row]; j += kOfRow) {
        const int at = place_[row] + j;
        const float sum = SumAt(product, row, static_cast<uint32_t>(column_indices[at]));
        WriteSum(sum, kScaled ? scale_by[at] : T(), &out[at]);
      }
    }
  }
};

}  // namespace jaxsparse
