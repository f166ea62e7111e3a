// The product by a matrix that is packed by gaps (packed/problem.h), by multiply-adds in float32. A
// warp has a piece: each lane walks over the numbers that it has of a row, and adds up their
// products with x, which lies in shared memory so that lanes read banks of their own. Numbers and
// gaps come from memory to registers, some steps ahead. Eight lanes then add up their sums, and
// warps of a team those of their ranges.
//
// Floors: 2.5 bytes of memory for each number, or 1.5 for one of 8 bits, padding included; an issue
// slot for each of some 6 instructions a number with one column, and 21 with eight, and one more of
// 8 bits; a wavefront of shared memory for each number and 4 bytes of a unit of x.
#include "cuda/activation.cuh"
#include "cuda/vector_access.cuh"
#include "cuda/warpgroup.cuh"
#include "packed/kernels/packed_gaps.h"
#include "packed/kernels/packed_gaps_steps.cuh"
#include "packed/kernels/packed_gaps_x.cuh"

namespace jaxsparse {

// A unit of x: so many columns' numbers of one row.
template <typename T, int kColumns>
struct GapUnit {
  float numbers[kColumns];

  __device__ __forceinline__ explicit GapUnit(uint32_t address) {
    if constexpr (kColumns == 1) {
      numbers[0] = SharedAt<const float>(address);
    } else {
      uint32_t words[kColumns / 2];
      LoadShared(address, words);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) numbers[i] = NumberOfHalf(T(), words[i / 2], i % 2);
    }
  }
};

// The lane's sums: numbers of pieces times x.
template <typename T, PackedGapsConfig kConfig>
class GapSums {
  static constexpr int kColumns = kConfig.columns, kAhead = kConfig.Ahead();
  using Step = GapStep<kConfig.numbers>;

  uint32_t power_;

  __device__ __forceinline__ void AddStep(const Step& step, uint32_t last, uint32_t& at) {
    const uint32_t even = step.gaps & 0x0f0f0f0fu, odd = step.gaps >> kGapBits & 0x0f0f0f0fu;
    static_assert(kConfig.kRowBytes < 256 && 2 * kGapBits == 8);
    at = at < last ? at : last;
#pragma unroll
    for (int e = 0; e < kGapNumbers; ++e) {
      const uint32_t row = static_cast<uint32_t>(kConfig.kRowBytes) << 8 * (e / 2);
      at = AddProductsOfBytes(e % 2 == 0 ? even : odd, row, at);
      const GapUnit<T, kColumns> x(at);
      const float number = step.template NumberAt<T>(e, power_);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) AddProductUnlessZero(number, x.numbers[i], &sums[i]);
    }
  }

 public:
  float sums[kColumns] = {};

  __device__ __forceinline__ explicit GapSums(const PackedGapsProblem& p) : power_(p.power) {}

  // `before`: the row in front of the piece's first one, for the lane; `last`: that of x. `ahead`:
  // the first steps.
  __device__ __forceinline__ void AddPiece(GapSteps<kConfig.numbers> steps, Step (&ahead)[kAhead],
                                           uint32_t before, uint32_t last) {
    uint32_t at = before;
#pragma unroll 1
    for (;; steps.Advance(kAhead)) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (!steps.Exists(i)) return;
        AddStep(ahead[i], last, at);
        steps.Load(i + kAhead, &ahead[i]);
      }
    }
  }
};

// Adds up what the eight lanes of a row have of each column: lane i % kColumns receives column i.
template <int kColumns>
__device__ __forceinline__ float SumOfRow(float (&sums)[kColumns]) {
  float sum = ExchangeSums(sums);
#pragma unroll
  for (int distance = kColumns; distance < kGapLanes; distance *= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, distance);
  }
  return sum;
}

// Writes a strip's sums, of a row and a column in each lane.
template <typename T, typename Out, PackedGapsConfig kConfig>
__device__ __forceinline__ void WriteRow(const PackedProblem& p, int strip, int first_column,
                                         float sum) {
  const int lane = threadIdx.x % kWarp;
  const int64_t place = int64_t{strip} * kGapStripRows + lane / kGapLanes;
  const int64_t column = first_column + lane % kGapLanes;
  if (place >= p.m || lane % kGapLanes >= kConfig.columns || column >= p.n) return;
  const int64_t row = Within(static_cast<const int32_t*>(p.rows.data)[place], p.m);
  if constexpr (kConfig.numbers != PackedNumbers::kPlain) {
    sum *= static_cast<const float*>(p.scales.data)[row];
  }
  if (p.bias.data != nullptr) sum += ToAccumulator(static_cast<const T*>(p.bias.data)[row]);
  FromAccumulator(Activate(p.activation, sum),
                  static_cast<Out*>(p.out.data) +
                      (kConfig.x_on_left ? column * p.m + row : row * p.n + column));
}

// A block has some teams, each of which makes a strip of the tile of columns at once, then the next
// one. Strips are dealt out to blocks one by one, as the first ones have the most numbers. If there
// are more parts than warps of a team, x comes anew for each of them.
template <typename T, typename Out, PackedGapsConfig kConfig>
__global__ void __launch_bounds__(kConfig.MostWarps() * kWarp, 1)
    PackedGaps(const __grid_constant__ PackedGapsProblem p) {
  constexpr int kColumns = kConfig.columns, kTeam = kConfig.team, kAhead = kConfig.Ahead();
  constexpr int kTeamBarriers = kAllThreads + 1;
  extern __shared__ __align__(128) unsigned char packed_gaps[];
  const int warp = WarpOfBlock(), lane = threadIdx.x % kWarp;
  const int team = warp / kTeam, range = warp % kTeam;
  const int teams = static_cast<int>(blockDim.x) / (kTeam * kWarp);
  auto block = static_cast<int>(blockIdx.x);
  int first_column = 0;
  for (; block >= p.blocks; block -= p.blocks) first_column += kColumns;
  const int width = p.width, rows = kTeam * width, strips = p.strips, rounds = p.rounds;
  const uint32_t shared = AddressOfShared(packed_gaps), x = shared + kConfig.kXAt;
  const uint32_t own = lane % (kConfig.kRowBytes / kConfig.UnitBytes()) * kConfig.UnitBytes();
  const uint32_t before = x - kConfig.kRowBytes + range * width / kGapLanes * kConfig.kRowBytes;
  const uint32_t end = x + rows / kGapLanes * kConfig.kRowBytes;  // of x
  const uint32_t space = end + kConfig.kBehindBytes + warp * kWarp * 4;
  const int first_strip = team * p.blocks + block;
  if (first_strip < strips) {
    PrefetchSteps<kConfig.numbers, kAhead>(p, first_strip * static_cast<int>(p.parts) + range);
  }
  if (warp == 0) StoreShared(shared + lane * 4, 0.0f);

  bool is_first = true;
#pragma unroll 1
  for (int first = block; first < strips; first += teams * p.blocks) {
    const int strip = first + team * p.blocks;
    GapSums<T, kConfig> sums(p);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      const int64_t piece = int64_t{strip} * p.parts + round * kTeam + range;
      GapStep<kConfig.numbers> ahead[kAhead];
      const GapSteps<kConfig.numbers> steps(p, piece, strip < strips);
      if (rounds > 1 || is_first) {
        GapX<T, kConfig> rows_of_x(p, round * rows, first_column);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) steps.Load(i, &ahead[i]);
        if (!is_first) __syncthreads();  // all have read what was there
        rows_of_x.Store(x, rows);
        __syncthreads();
        is_first = false;
      } else {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) steps.Load(i, &ahead[i]);
      }
      sums.AddPiece(steps, ahead, before + own, end - kConfig.kRowBytes + own);
    }
    float sum = SumOfRow(sums.sums);
    if constexpr (kTeam > 1) {
      StoreShared(space + lane * 4, sum);
      WaitAt<kTeam * kWarp>(kTeamBarriers + team);
      if (range == 0) {
#pragma unroll
        for (int i = 1; i < kTeam; ++i) {
          sum += SharedAt<const float>(space + (i * kWarp + lane) * 4);
        }
      }
      WaitAt<kTeam * kWarp>(kTeamBarriers + team);
    }
    if (range == 0 && strip < strips) WriteRow<T, Out, kConfig>(p, strip, first_column, sum);
  }
}

}  // namespace jaxsparse
