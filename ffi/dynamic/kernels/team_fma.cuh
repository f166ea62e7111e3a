// Products of a tile's 8 rows in exact float32. Lanes receive states as for tensor cores
// (team_mma.cuh), and leave them to their warp in shared memory. There a warp's lanes form row
// groups; lane (group, i) holds the weights of its group's rows of the matrix in the i-th 4 columns
// of a chunk. So each value serves a group's rows, and each weight kBatchTile rows of the tile.
#pragma once

#include "dynamic/kernels/team_mma.cuh"
#include "recurrent/kernels/dense_fma.cuh"

namespace jaxsparse {

// The matrix of a kind, as DenseRow takes it.
template <typename Plan>
struct TeamMatrix {
  static constexpr int kColumns = Plan::kSizes.columns;
  __device__ __forceinline__ static DenseWeights Of(const DenseWeights& of_kind) { return of_kind; }
  // A part of rows: a product, or a slot.
  __device__ __forceinline__ static int PlaceOf(int part) { return part; }
};

template <typename Plan>
class TeamFma {
  using Row = DenseRow<Plan, TeamMatrix<Plan>>;
  static constexpr auto kSizes = Plan::kSizes;
  static constexpr int kGroupLanes = kSizes.group_lanes, kLaneRows = kSizes.lane_rows;
  static constexpr int kChunks = kSizes.weight_chunks, kRegisterChunks = kSizes.register_chunks;
  static constexpr int kRegisterKinds = kRegisterChunks > 0 ? kSizes.kinds : 1;
  static constexpr int kColumns = kSizes.states_per_load;  // of a lane in a chunk
  static constexpr int kBatchTile = kSizes.batch_tile;
  static constexpr int kSums = kLaneRows * kBatchTile;
  static constexpr int kSumsLeft = Scattered(kSums, kGroupLanes);
  static_assert(sizeof(typename Plan::State) == 4 && kColumns == 4);

 public:
  using States = Words4[kSizes.loads];

  __device__ __forceinline__ explicit TeamFma(Words4* shared)
      : warp_(threadIdx.x / kWarp),
        lane_(threadIdx.x % kWarp),
        states_(shared + (kSizes.states_at - kSizes.weights_at) / 16 + warp_ * kSizes.warp_states),
        shared_(reinterpret_cast<float4*>(shared) + threadIdx.x) {}

  // As TeamMma.
  __device__ __forceinline__ void LoadWeights(const GraphScanProblem& p) {
#pragma unroll
    for (int kind = 0; kind < kRegisterKinds; ++kind) {
#pragma unroll
      for (int chunk = 0; chunk < kRegisterChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) weights_[kind][chunk][i] = Load(p, kind, chunk, i);
      }
    }
#pragma unroll 1
    for (int kind = 0; kind < kSizes.kinds; ++kind) {
#pragma unroll
      for (int chunk = kRegisterChunks; chunk < kChunks; ++chunk) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
          SharedWeights(kind, chunk, i) = Load(p, kind, chunk, i);
        }
      }
    }
  }

  __device__ __forceinline__ int TileRow() const { return lane_ / 4; }
  __device__ __forceinline__ int Column(int j) const { return ColumnOfGroup(j * 4 + lane_ % 4); }
  __device__ __forceinline__ bool HasColumn(int j) const { return Column(j) < kSizes.columns; }

  __device__ __forceinline__ void Multiply(int kind, const States& x, float* partials) const {
    __syncwarp();  // all lanes are done with the last tile's states
#pragma unroll
    for (int j = 0; j < kSizes.loads; ++j) StateOf(j * 4 + lane_ % 4, TileRow()) = x[j];
    __syncwarp();
    float* part = partials + warp_ * kSizes.warp_part;
#pragma unroll
    for (int first_row = 0; first_row < kTileRows; first_row += kBatchTile) {
      MultiplyRows(kind, first_row, part);
    }
  }

 private:
  // Of the lane, in a chunk.
  __device__ __forceinline__ float4 Load(const GraphScanProblem& p, int kind, int chunk,
                                         int i) const {
    const int first_column = ColumnOfGroup(chunk * kGroupLanes + lane_ % kGroupLanes);
    float row[kColumns];
    Row(WeightsOf(p, kind), lane_ / kGroupLanes * kLaneRows + i).Load(first_column, row);
    return make_float4(row[0], row[1], row[2], row[3]);
  }

  // By the registers of kKind, or of a later one.
  template <int kKind>
  __device__ __forceinline__ void AddProducts(int kind, int tile_row, float (&sums)[kSums]) const {
    if constexpr (kKind + 1 < kRegisterKinds) {
      if (kind != kKind) return AddProducts<kKind + 1>(kind, tile_row, sums);
    }
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int group = chunk * kGroupLanes + lane_ % kGroupLanes;
      // Where a warp's loads are odd, half of its last chunk has no states.
      const bool exists = kSizes.loads % 2 == 0 || group < kSizes.loads * 4;
      float4 x[kBatchTile];
#pragma unroll
      for (int b = 0; b < kBatchTile; ++b) {
        const Words4 words = exists ? StateOf(group, tile_row + b) : Words4{0, 0, 0, 0};
        x[b] = make_float4(__uint_as_float(words.x), __uint_as_float(words.y),
                           __uint_as_float(words.z), __uint_as_float(words.w));
      }
#pragma unroll
      for (int i = 0; i < kLaneRows; ++i) {
        const float4 w = chunk < kRegisterChunks
                             ? weights_[kKind][chunk < kRegisterChunks ? chunk : 0][i]
                             : SharedWeights(kind, chunk, i);
#pragma unroll
        for (int b = 0; b < kBatchTile; ++b) {
          float& sum = sums[i * kBatchTile + b];
          sum += w.x * x[b].x;
          sum += w.y * x[b].y;
          sum += w.z * x[b].z;
          sum += w.w * x[b].w;
        }
      }
    }
  }

  __device__ __forceinline__ void MultiplyRows(int kind, int tile_row, float* part) const {
    float sums[kSums] = {};
    AddProducts<0>(kind, tile_row, sums);
    int first = 0;
    bool owner = true;
    SumAndScatter<kSums, kGroupLanes>(lane_, sums, &first, &owner);
#pragma unroll
    for (int i = 0; i < kSumsLeft; ++i) {
      const int row = lane_ / kGroupLanes * kLaneRows + (first + i) / kBatchTile;
      if (owner && row < kSizes.rows) {
        part[PlaceOfProduct(row, tile_row + (first + i) % kBatchTile)] = sums[i];
      }
    }
  }

  // The first column of a group of the warp's.
  __device__ __forceinline__ int ColumnOfGroup(int group) const {
    return ((group / 4 * kSizes.warps + warp_) * 4 + group % 4) * kColumns;
  }
  // Groups lie so far apart that lanes with neighbouring ones read different banks.
  __device__ __forceinline__ Words4& StateOf(int group, int tile_row) const {
    return states_[group * kSizes.group_distance + tile_row];
  }
  __device__ __forceinline__ float4& SharedWeights(int kind, int chunk, int i) const {
    const int place = kind * (kChunks - kRegisterChunks) + chunk - kRegisterChunks;
    return shared_[(place * kLaneRows + i) * kSizes.product_threads];
  }

  const int warp_, lane_;
  Words4* const states_;
  float4* const shared_;
  float4 weights_[kRegisterKinds][kRegisterChunks > 0 ? kRegisterChunks : 1][kLaneRows];
};

}  // namespace jaxsparse
