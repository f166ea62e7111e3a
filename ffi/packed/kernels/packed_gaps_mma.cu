// The product by a matrix that is packed by gaps (packed/problem.h) on tensor cores, for several
// columns of x. A warp has a piece: 8 rows, of each of which four lanes have two streams each. A
// word of numbers, one of each stream, is what mma.m16n8k16 takes of its second factor, where
// places 2 t and 2 t + 1 of the inner dimension are the lane's: it takes the words of a fourth of
// the lanes, one of each row, and zeros of the others. Its first factor are the rows of x that
// these numbers are multiplied by, transposed. ldmatrix gathers them from shared memory, 8 at a
// time, each of another residue of columns modulo 8, so that all banks are read. A lane has the
// address of one of them, which gaps move: those of the streams that the lane reads for, which come
// from their lanes by shuffles, once a step.
//
// Tensor cores multiply rows of x by the zeros of other lanes, too. If that gave a NaN, the warp
// adds up its piece once more, number by number.
//
// Floors: 2.5 bytes of memory for each number, or 1.5 of 8 bits, padding included; 16 bytes of
// shared memory for each number and 8 columns; for 16 numbers a product of 16 x 8 x 16; for 64 of
// them and 8 columns 20 issue slots.
#include "cuda/activation.cuh"
#include "cuda/device.cuh"
#include "cuda/warpgroup.cuh"
#include "packed/kernels/packed_gaps_mma.h"
#include "packed/kernels/packed_gaps_steps.cuh"
#include "packed/kernels/packed_gaps_x.cuh"

namespace jaxsparse {

// The lane's part of the work on a piece.
template <typename T, PackedGapsMmaConfig kConfig>
class GapProducts {
  static constexpr int kAddresses = kConfig.Addresses(), kProducts = kConfig.kProducts;
  static constexpr int kPlanes = kConfig.Planes(), kSums = kConfig.Sums();
  static constexpr int kRowBytes = kConfig.kRowBytes;
  using Step = GapStep<kConfig.numbers>;

  int lane_ = static_cast<int>(threadIdx.x % kWarp);
  uint32_t plane_bytes_;
  int from_[kAddresses];          // the lane that has the stream which each address is of
  uint32_t before_[kAddresses];   // the row in front of the range, of residue and plane
  uint32_t last_[kAddresses];     // row of x
  uint32_t taken_[kProducts][2];  // which words each product takes, for either half of its places

  // Which matrix of 8 x 8 the lane reads a row of: lanes 0 to 7 that of the first one.
  __device__ __forceinline__ int Matrix() const { return lane_ / 8; }
  // What a matrix is of: those of two products of one plane come at once, or those of one product
  // of two planes, as mma.m16n8k16 takes them.
  __device__ __forceinline__ int ProductOf(int address) const {
    return kPlanes == 1 ? address * 2 + Matrix() % 2 : address;
  }
  __device__ __forceinline__ int HalfOf() const { return Matrix() / 2; }
  __device__ __forceinline__ int PlaneOf() const { return kPlanes == 1 ? 0 : Matrix() % 2; }

 public:
  float sums[kSums];  // of column lane / 4 in rows 2 (lane % 4) and one more; of each plane

  // `x`: the first row, in shared memory, of which there are so many bytes, with the row of zeros
  // in front.
  __device__ __forceinline__ GapProducts(uint32_t x, uint32_t range_bytes, uint32_t all_bytes,
                                         uint32_t plane_bytes)
      : plane_bytes_(plane_bytes) {
    const int slot = lane_ % 8, t = slot / 2, stream = slot % 2;  // of the product's half
#pragma unroll
    for (int i = 0; i < kAddresses; ++i) {
      const int row = 4 * HalfOf() + ((t - ProductOf(i)) & 3);
      from_[i] = 4 * row + t;
      const uint32_t at = x + PlaneOf() * plane_bytes + GapResidue(from_[i], stream) * 16;
      before_[i] = at + range_bytes - kRowBytes;
      last_[i] = at + all_bytes - kRowBytes;
    }
    const int row = lane_ / 4;
#pragma unroll
    for (int i = 0; i < kProducts; ++i) {
      const uint32_t taken = lane_ % 4 == (row + i) % 4 ? ~0u : 0;
      taken_[i][0] = row < 4 ? taken : 0;
      taken_[i][1] = row < 4 ? 0 : taken;
    }
  }

  __device__ __forceinline__ void AddStep(const Step& step, uint32_t (&at)[kAddresses]) {
    const int shift = kGapBits * (lane_ % 2);
    uint32_t gaps[kAddresses];
#pragma unroll
    for (int i = 0; i < kAddresses; ++i) {
      const uint32_t all = __shfl_sync(kAllLanes, step.gaps, from_[i]);
      gaps[i] = all >> shift & 0x0f0f0f0fu;
      at[i] = at[i] < last_[i] ? at[i] : last_[i];
    }
    // Tensor cores cut off what does not fit when they add, so only a step is summed there, and
    // products do not wait for one another.
    float of_step[kProducts][4] = {};
#pragma unroll
    for (int round = 0; round < kConfig.kRounds; ++round) {
      uint32_t rows[kAddresses][4];
#pragma unroll
      for (int i = 0; i < kAddresses; ++i) {
        at[i] = AddProductsOfBytes(gaps[i], uint32_t{kRowBytes} << 8 * round, at[i]);
        LoadTransposedMatrices(rows[i], &SharedAt<char>(at[i]));
      }
      const uint32_t word = step.template PairAt<T>(round);
#pragma unroll
      for (int i = 0; i < kProducts; ++i) {
        // Of one plane either product has half of the rows of its result, and in the others what
        // nobody reads.
        MultiplyAdd(T(), of_step[i], rows[kPlanes == 1 ? i / 2 : i], word & taken_[i][0],
                    word & taken_[i][1]);
      }
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      constexpr int kOdd = kPlanes == 1 ? 2 : 0;
      sums[s] += (of_step[0][s] + of_step[1][s + kOdd]) + (of_step[2][s] + of_step[3][s + kOdd]);
    }
  }

  __device__ __forceinline__ void Begin() {
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s] = 0;
  }
  // `ahead`: the first steps.
  template <int kAhead>
  __device__ __forceinline__ void AddPiece(const GapSteps<kConfig.numbers>& steps,
                                           Step (&ahead)[kAhead]) {
    uint32_t at[kAddresses];
#pragma unroll
    for (int i = 0; i < kAddresses; ++i) at[i] = before_[i];
    ForEachStep(steps, ahead, [&](const Step& step) { AddStep(step, at); });
  }
  __device__ __forceinline__ bool AreFinite() const {
    float not_finite = 0;
#pragma unroll
    for (int s = 0; s < kSums; ++s) not_finite += sums[s] * 0.0f;
    return !__any_sync(kAllLanes, not_finite != 0);
  }
};

// The sums of a lane, as GapProducts has them.
template <PackedGapsMmaConfig kConfig>
using PieceSums = Vector<float, kConfig.Sums()>;

// The sums of a piece, number by number: each lane adds up its own streams.
// `x`: the first row of the range, in shared memory; the last row of x is so many bytes behind it.
template <typename T, PackedGapsMmaConfig kConfig>
__device__ PieceSums<kConfig> ExactPiece(const PackedGapsProblem& p, int64_t piece, uint32_t x,
                                         uint32_t last_bytes, uint32_t plane_bytes) {
  constexpr int kRowBytes = kConfig.kRowBytes;
  const int lane = threadIdx.x % kWarp;
  PieceSums<kConfig> sums = {};
#pragma unroll 1
  for (int plane = 0; plane < kConfig.Planes(); ++plane) {
    float of_lane[8] = {};
    uint32_t at[2], last[2];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint32_t first = x + plane * plane_bytes + GapResidue(lane, s) * 16;
      at[s] = first - kRowBytes;
      last[s] = first + last_bytes;
    }
#pragma unroll 1
    for (GapSteps<kConfig.numbers> steps(p, piece, true); steps.Exists(0); steps.Advance(1)) {
      GapStep<kConfig.numbers> step;
      steps.Load(0, &step);
#pragma unroll
      for (int s = 0; s < 2; ++s) at[s] = at[s] < last[s] ? at[s] : last[s];
#pragma unroll
      for (int e = 0; e < kGapNumbers; ++e) {
        at[e % 2] += (step.gaps >> kGapBits * e & kMostGap) * kRowBytes;
        uint32_t row[4];
        LoadShared(at[e % 2], row);
        const float number = step.template NumberAt<T>(e, p.power);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          AddProductUnlessZero(number, NumberOfHalf(T(), row[i / 2], i % 2), &of_lane[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float sum = of_lane[i];
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      sum /= PairOfBytes<T, kConfig.numbers>::kFactor;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float of_row = __shfl_sync(kAllLanes, sum, 4 * (lane % 4 * 2 + j));
        if (lane / 4 == i) sums.elements[plane == 0 ? j : kConfig.Sums() - 2 + j] = of_row;
      }
    }
  }
  return sums;
}

// Rows of 8 columns of x; zeros where x has none of these.
template <typename T, PackedGapsMmaConfig kConfig>
__device__ __forceinline__ void BringPlane(const PackedProblem& p, int first_row, int first_column,
                                           uint32_t to, int rows) {
  if (first_column < p.n) {
    GapX<T, kConfig.Plane()>(p, first_row, first_column).Store(to, rows);
    return;
  }
#pragma unroll 1
  for (auto row = static_cast<int>(threadIdx.x); row < rows; row += blockDim.x) {
    StoreShared(to + row * 16, Words4{});
  }
}

// Writes a strip's sums.
template <typename T, typename Out, PackedGapsMmaConfig kConfig>
__device__ __forceinline__ void WriteStrip(const PackedProblem& p, int strip, int first_column,
                                           const float (&sums)[kConfig.Sums()]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int64_t place = int64_t{strip} * kGapStripRows + lane % 4 * 2 + i;
    if (place >= p.m) return;
    const int64_t row = Within(static_cast<const int32_t*>(p.rows.data)[place], p.m);
    float scale = 1, bias = 0;
    if constexpr (kConfig.numbers != PackedNumbers::kPlain) {
      scale =
          PairOfBytes<T, kConfig.numbers>::kFactor * static_cast<const float*>(p.scales.data)[row];
    }
    if (p.bias.data != nullptr) bias = ToAccumulator(static_cast<const T*>(p.bias.data)[row]);
#pragma unroll
    for (int plane = 0; plane < kConfig.Planes(); ++plane) {
      const int64_t column = first_column + 8 * plane + lane / 4;
      if (column >= p.n) break;
      FromAccumulator(Activate(p.activation, sums[2 * plane + i] * scale + bias),
                      static_cast<Out*>(p.out.data) +
                          (kConfig.x_on_left ? column * p.m + row : row * p.n + column));
    }
  }
}

// Sums of the parts of a strip: each warp leaves its own.
template <PackedGapsMmaConfig kConfig>
__device__ __forceinline__ void LeaveSums(uint32_t space, const float (&sums)[kConfig.Sums()]) {
  uint32_t words[4] = {};
#pragma unroll
  for (int s = 0; s < kConfig.Sums(); ++s) words[s] = __float_as_uint(sums[s]);
  StoreShared(space + threadIdx.x % kWarp * 16, {words[0], words[1], words[2], words[3]});
}
template <PackedGapsMmaConfig kConfig>
__device__ __forceinline__ void AddSums(const uint32_t (&words)[4], float (&sums)[kConfig.Sums()]) {
#pragma unroll
  for (int s = 0; s < kConfig.Sums(); ++s) sums[s] += __uint_as_float(words[s]);
}

// A block has some teams, each of which makes a strip of the tile of columns at once, then the next
// one. Strips are dealt out to blocks one by one, as the first ones have the most numbers. If there
// are more parts than warps of a team, the blocks of a cluster have one each, or x comes anew for
// each of them.
template <typename T, typename Out, PackedGapsMmaConfig kConfig>
__global__ void __launch_bounds__(kConfig.kMostWarps* kWarp, 1)
    PackedGapsMma(const __grid_constant__ PackedGapsProblem p) {
  constexpr int kTeam = kConfig.team, kCluster = kConfig.cluster, kSums = kConfig.Sums();
  constexpr int kAhead = kConfig.Ahead(), kRowBytes = kConfig.kRowBytes;
  constexpr int kTeamBarriers = kAllThreads + 1;
  extern __shared__ __align__(128) unsigned char packed_gaps_mma[];
  const int warp = WarpOfBlock(), lane = threadIdx.x % kWarp;
  const int team = warp / kTeam, range = warp % kTeam;
  const int teams = static_cast<int>(blockDim.x) / (kTeam * kWarp);
  auto block = static_cast<int>(blockIdx.x) / kCluster;
  const int rank = static_cast<int>(blockIdx.x) % kCluster;
  int first_column = 0;
  for (; block >= p.blocks; block -= p.blocks) first_column += kConfig.columns;
  const int width = p.width, rows = kTeam * width, strips = p.strips, rounds = p.rounds;
  const auto plane_bytes = static_cast<uint32_t>(kConfig.PlaneBytes(width));
  const uint32_t shared = AddressOfShared(packed_gaps_mma), x = shared + kRowBytes;
  const uint32_t range_bytes = range * width / kGapLanes * kRowBytes;
  const uint32_t all_bytes = rows / kGapLanes * kRowBytes;
  uint32_t space =
      shared + kConfig.Planes() * plane_bytes + warp * kConfig.SumsOfWarp() * kConfig.kSumsBytes;
  uint32_t other_space = space + kConfig.kSumsBytes;
  const int first_part = rank * kTeam + range;
  if (const int strip = team * p.blocks + block; strip < strips) {
    PrefetchSteps<kConfig.numbers, kAhead>(p, strip * static_cast<int>(p.parts) + first_part);
  }
  if (warp < kConfig.Planes()) StoreShared(shared + warp * plane_bytes + lane * 4, 0.0f);

  GapProducts<T, kConfig> products(x, range_bytes, all_bytes, plane_bytes);
  bool is_first = true;
#pragma unroll 1
  for (int first = block; first < strips; first += teams * p.blocks) {
    const int strip = first + team * p.blocks;
    float sums[kSums] = {};
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const int64_t piece = int64_t{strip} * p.parts + round * (kCluster * kTeam) + first_part;
      GapStep<kConfig.numbers> ahead[kAhead];
      const GapSteps<kConfig.numbers> steps(p, piece, strip < strips);
      const bool brings_x = rounds > 1 || is_first;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) steps.Load(i, &ahead[i]);
      if (brings_x && !is_first) __syncthreads();  // all have read what was there
      if (brings_x) {
#pragma unroll
        for (int plane = 0; plane < kConfig.Planes(); ++plane) {
          BringPlane<T, kConfig>(p, (round * kCluster + rank) * rows, first_column + 8 * plane,
                                 x + plane * plane_bytes, rows);
        }
        __syncthreads();
        is_first = false;
      }
      products.Begin();
      products.AddPiece(steps, ahead);
      if (!products.AreFinite() && strip < strips) {
        const PieceSums<kConfig> exact = ExactPiece<T, kConfig>(
            p, piece, x + range_bytes, all_bytes - range_bytes - kRowBytes, plane_bytes);
#pragma unroll
        for (int s = 0; s < kSums; ++s) products.sums[s] = exact.elements[s];
      }
#pragma unroll
      for (int s = 0; s < kSums; ++s) sums[s] += products.sums[s];
    }
    if constexpr (kTeam > 1) {
      LeaveSums<kConfig>(space, sums);
      WaitAt<kTeam * kWarp>(kTeamBarriers + team);
      if (range == 0) {
#pragma unroll
        for (int i = 1; i < kTeam; ++i) {
          uint32_t words[4];
          LoadShared(space + i * kConfig.kSumsBytes + lane * 16, words);
          AddSums<kConfig>(words, sums);
        }
      }
      WaitAt<kTeam * kWarp>(kTeamBarriers + team);
    }
    if constexpr (kCluster > 1) {
      __syncwarp();
      if (rank > 0) LeaveSums<kConfig>(space, sums);
      ClusterBarrier();
      if (rank == 0) {
#pragma unroll
        for (int i = 1; i < kCluster; ++i) {
          uint32_t words[4];
          LoadOfRank(AddressOfRank(space + lane * 16, i), words);
          AddSums<kConfig>(words, sums);
        }
      }
      const uint32_t left = space;  // has been read behind the next barrier
      space = other_space;
      other_space = left;
    }
    if (range == 0 && rank == 0 && strip < strips) {
      WriteStrip<T, Out, kConfig>(p, strip, first_column, sums);
    }
  }
  if constexpr (kCluster > 1) {
    __syncwarp();
    ClusterBarrier();  // all sums have been read
  }
}

}  // namespace jaxsparse
