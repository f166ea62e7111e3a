// The product by a matrix that is packed by gaps (packed/problem.h), by multiply-adds in float32. A
// warp has a piece: each lane walks over the two streams of numbers that it has of a row, in turn,
// and adds up their products with x, which lies in shared memory so that lanes read banks of their
// own. Numbers and gaps come from memory to registers, some steps ahead. Four lanes then add up
// their sums, and warps of a team those of their ranges.
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
  uint32_t units_[kGapStreams];  // where units of either stream are in a row of x

  // `at`: the units of the streams' last numbers; `last`: those in the last row of x.
  __device__ __forceinline__ void AddStep(const Step& step, const uint32_t (&last)[kGapStreams],
                                          uint32_t (&at)[kGapStreams]) {
    // A byte of either has a gap of its stream.
    const uint32_t gaps[] = {step.gaps & 0x0f0f0f0fu, step.gaps >> kGapBits & 0x0f0f0f0fu};
    static_assert(kConfig.kRowBytes < 256 && kGapStreams * kGapBits == 8);
#pragma unroll
    for (int s = 0; s < kGapStreams; ++s) at[s] = at[s] < last[s] ? at[s] : last[s];
#pragma unroll
    for (int e = 0; e < kGapNumbers; ++e) {
      const int s = e % kGapStreams;
      const uint32_t row = static_cast<uint32_t>(kConfig.kRowBytes) << 8 * (e / kGapStreams);
      at[s] = AddProductsOfBytes(gaps[s], row, at[s]);
      const GapUnit<T, kColumns> x(at[s]);
      const float number = step.template NumberAt<T>(e, power_);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) AddProductUnlessZero(number, x.numbers[i], &sums[i]);
    }
  }

 public:
  float sums[kColumns] = {};

  __device__ __forceinline__ explicit GapSums(const PackedGapsProblem& p) : power_(p.power) {
    const auto lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
    for (int s = 0; s < kGapStreams; ++s) units_[s] = kConfig.UnitAt(lane, s);
  }

  // `before`: the row in front of the piece's first one; `last`: that of x. `ahead`: the first
  // steps.
  __device__ __forceinline__ void AddPiece(GapSteps<kConfig.numbers> steps, Step (&ahead)[kAhead],
                                           uint32_t before, uint32_t last_row) {
    uint32_t at[kGapStreams], last[kGapStreams];
#pragma unroll
    for (int s = 0; s < kGapStreams; ++s) {
      at[s] = before + units_[s];
      last[s] = last_row + units_[s];
    }
    ForEachStep(steps, ahead, [&](const Step& step) { AddStep(step, last, at); });
  }
};

// Adds up what the four lanes of a row have of each column. Lane i then has kOfLane columns, from
// the column i kOfLane on, or, of fewer columns than lanes, column i % kColumns.
template <int kOfLane, int kColumns>
__device__ __forceinline__ void SumRows(float (&sums)[kColumns], float (&of_lane)[kOfLane]) {
  constexpr int kLanes = kColumns / kOfLane;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    float one_of_each[kLanes];
#pragma unroll
    for (int j = 0; j < kLanes; ++j) one_of_each[j] = sums[j * kOfLane + i];
    of_lane[i] = ExchangeSums(one_of_each);
#pragma unroll
    for (int distance = kLanes; distance < kGapRowLanes; distance *= 2) {
      of_lane[i] += __shfl_xor_sync(kAllLanes, of_lane[i], distance);
    }
  }
}

// Writes a strip's sums, as SumRows leaves them.
template <typename T, typename Out, PackedGapsConfig kConfig>
__device__ __forceinline__ void WriteRows(const PackedProblem& p, int strip, int first_column,
                                          const float (&sums)[kConfig.SumsOfLane()]) {
  constexpr int kOfLane = kConfig.SumsOfLane();
  const int lane = threadIdx.x % kWarp, first = lane % kGapRowLanes * kOfLane;
  const int64_t place = int64_t{strip} * kGapStripRows + lane / kGapRowLanes;
  if (place >= p.m || first >= kConfig.columns) return;
  const int64_t row = Within(static_cast<const int32_t*>(p.rows.data)[place], p.m);
  float scale = 1, bias = 0;
  if constexpr (kConfig.numbers != PackedNumbers::kPlain) {
    scale = static_cast<const float*>(p.scales.data)[row];
  }
  if (p.bias.data != nullptr) bias = ToAccumulator(static_cast<const T*>(p.bias.data)[row]);
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int64_t column = first_column + first + i;
    if (column >= p.n) return;
    FromAccumulator(Activate(p.activation, sums[i] * scale + bias),
                    static_cast<Out*>(p.out.data) +
                        (kConfig.x_on_left ? column * p.m + row : row * p.n + column));
  }
}

// A block has some teams, each of which makes a strip of the tile of columns at once, then the next
// one. Strips are dealt out to blocks one by one, as the first ones have the most numbers. If there
// are more parts than warps of a team, x comes anew for each of them.
template <typename T, typename Out, PackedGapsConfig kConfig>
__global__ void __launch_bounds__(kConfig.MostWarps() * kWarp, 1)
    PackedGaps(const __grid_constant__ PackedGapsProblem p) {
  constexpr int kColumns = kConfig.columns, kTeam = kConfig.team, kAhead = kConfig.Ahead();
  constexpr int kOfLane = kConfig.SumsOfLane(), kOfWarp = kOfLane * kWarp;  // sums
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
  const uint32_t before = x - kConfig.kRowBytes + range * width / kGapLanes * kConfig.kRowBytes;
  const uint32_t end = x + rows / kGapLanes * kConfig.kRowBytes;  // of x
  const uint32_t space = end + kConfig.kBehindBytes + (warp * kOfWarp + lane) * 4;
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
      sums.AddPiece(steps, ahead, before, end - kConfig.kRowBytes);
    }
    float of_lane[kOfLane];
    SumRows(sums.sums, of_lane);
    if constexpr (kTeam > 1) {
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) StoreShared(space + i * kWarp * 4, of_lane[i]);
      WaitAt<kTeam * kWarp>(kTeamBarriers + team);
      if (range == 0) {
#pragma unroll
        for (int other = 1; other < kTeam; ++other) {
#pragma unroll
          for (int i = 0; i < kOfLane; ++i) {
            of_lane[i] += SharedAt<const float>(space + (other * kOfWarp + i * kWarp) * 4);
          }
        }
      }
      WaitAt<kTeam * kWarp>(kTeamBarriers + team);
    }
    if (range == 0 && strip < strips) WriteRows<T, Out, kConfig>(p, strip, first_column, of_lane);
  }
}

}  // namespace jaxsparse
