// Writes a matrix that is packed by gaps (packed/problem.h) out, zeros in place. A warp has a
// piece: lanes put their numbers in rows of a panel in shared memory, from where whole rows are
// written. Numbers of 8 bits become those of T, without their scales.
//
// Floor: the matrix passes through memory once, packed and written out.
#include "cuda/vector_access.cuh"
#include "packed/kernels/lane_bytes.cuh"
#include "packed/kernels/packed_unpack.h"

namespace jaxsparse {

// The type in which a number is stored.
template <typename T, PackedNumbers kNumbers>
struct StoredNumber {
  using Type = unsigned char;
};
template <typename T>
struct StoredNumber<T, PackedNumbers::kPlain> {
  using Type = T;
};

// The numbers of one of a lane's streams, one after another.
template <typename T, PackedNumbers kNumbers>
class GapNumbers {
  using Stored = typename StoredNumber<T, kNumbers>::Type;
  const Stored* numbers_;
  const uint32_t* gaps_;
  uint32_t stream_, next_, end_;  // numbers of the stream

 public:
  uint32_t place = ~uint32_t{0};  // of the number, in front of the range at first
  Stored number = {};

  __device__ GapNumbers(const PackedProblem& p, int64_t piece, uint32_t stream)
      : numbers_(static_cast<const Stored*>(p.values.data)),
        gaps_(static_cast<const uint32_t*>(p.masks.data)),
        stream_(stream) {
    const int32_t* starts = static_cast<const int32_t*>(p.starts.data) + piece;
    next_ = RowBounds::Clamp(starts[0], p.words) * kGapStreamNumbers;
    end_ = RowBounds::Clamp(starts[1], p.words) * kGapStreamNumbers;
  }
  // Goes to the next one; false if there is none.
  __device__ __forceinline__ bool Advance() {
    if (next_ >= end_) return false;
    const int64_t step = int64_t{next_ / kGapStreamNumbers} * kWarp + threadIdx.x % kWarp;
    const uint32_t e = next_++ % kGapStreamNumbers * kGapStreams + stream_;
    const uint32_t gap = gaps_[step] >> kGapBits * e & kMostGap;
    place += gap;
    number = numbers_[step * kGapNumbers + e];
    return gap > 0;
  }
  // Bits of the number as one of T.
  __device__ __forceinline__ uint16_t Bits() const {
    if constexpr (kNumbers == PackedNumbers::kPlain) {
      return number.bits;
    } else {
      return static_cast<uint16_t>(WholePair<T, kNumbers>(PairOfBytes<T, kNumbers>::Make(number)));
    }
  }
};

template <typename T, PackedNumbers kNumbers>
__global__ void __launch_bounds__(UnpackGapsConfig::kWarps* kWarp)
    PackedUnpackGaps(const __grid_constant__ PackedProblem p) {
  using Config = UnpackGapsConfig;
  constexpr int kPanel = Config::kPanelColumns, kLine = Config::kLineBytes, kVector = 8;
  extern __shared__ __align__(16) unsigned char unpack_gaps_panels[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t piece = static_cast<int64_t>(blockIdx.x) * Config::kWarps + warp;
  if (piece >= GapStrips(p) * p.parts) return;
  const int64_t width = GapRangeColumns(p.k, p.parts), first_column = piece % p.parts * width;
  const uint32_t panel = AddressOfShared(unpack_gaps_panels) + warp * Config::kPanelBytes;
  const uint32_t row_of_panel = panel + lane / kGapRowLanes * kLine;
  const bool wide = p.k % kVector == 0 && IsAligned<Words4>(p.out.data);
  GapNumbers<T, kNumbers> streams[kGapStreams] = {{p, piece, 0}, {p, piece, 1}};
  bool more[kGapStreams];
#pragma unroll
  for (int s = 0; s < kGapStreams; ++s) more[s] = streams[s].Advance();
#pragma unroll 1
  for (int64_t first = 0; first < width; first += kPanel) {
#pragma unroll 1
    for (int at = lane * 16; at < Config::kPanelBytes; at += kWarp * 16) {
      StoreShared(panel + at, Words4{});
    }
    __syncwarp();
    const auto place = static_cast<uint32_t>(first / kGapLanes);
#pragma unroll
    for (int s = 0; s < kGapStreams; ++s) {
      const uint32_t own = row_of_panel + GapResidue(lane, s) * 2;
      GapNumbers<T, kNumbers>& numbers = streams[s];
#pragma unroll 1
      while (more[s] && numbers.place - place < kPanel / kGapLanes) {
        SharedAt<uint16_t>(own + (numbers.place - place) * kGapLanes * 2) = numbers.Bits();
        more[s] = numbers.Advance();
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int r = 0; r < kGapStripRows; ++r) {
      const int64_t place_of_row = piece / p.parts * kGapStripRows + r;
      if (place_of_row >= p.m) break;
      const int64_t row = Within(static_cast<const int32_t*>(p.rows.data)[place_of_row], p.m);
#pragma unroll 1
      for (int c = lane * kVector; c < kPanel; c += kWarp * kVector) {
        const int64_t column = first_column + first + c;
        if (first + c >= width || column >= p.k) break;
        uint32_t words[4];
        LoadShared(panel + r * kLine + c * 2, words);
        uint16_t* out = static_cast<uint16_t*>(p.out.data) + row * p.k + column;
        StoreNumbers(out, words, wide, p.k - column);
      }
    }
    __syncwarp();
  }
}

}  // namespace jaxsparse
