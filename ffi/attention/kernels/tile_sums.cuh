// Sums of cotangents of operands of scores by columns and by distances (tile_sums.h). In the kernel
// of rows each warp of the consumers sums its 16 rows of a tile by exchanges between lanes, and
// hands what it has to a warp of the producers by a slot in shared memory; that warp adds up the
// eight, in their order, and stores the tile's numbers while the next tile is multiplied. The
// kernel of keys adds up those of all tiles once the kernel of rows is done.
//
// Floors, for a tile of 128 x 128 and a cotangent: a warp has 28 exchanges for columns, 32 for
// distances, and a multiprocessor does one of a warp in a clock: 256 clocks for eight warps, and as
// much again for additions and selections. To memory go 0.5 KiB for columns and 1 KiB for
// distances, which are read once more.
#pragma once

#include "attention/kernels/cotangent.cuh"
#include "attention/kernels/tile_sums.h"
#include "cuda/vector_access.cuh"

namespace jaxsparse {

// Whether cotangents are summed over rows of tiles.
__device__ constexpr bool IsSummedByTiles(ScoreSums sums) { return TileSumsOf(sums) > 0; }
template <typename Function>
__device__ constexpr int CountTileSums() {
  int count = 0;
  for (int i = 0; i < Function::kGradients; ++i) count += IsSummedByTiles(Function::kSums[i]);
  return count;
}

// Of sums that pairs of lanes have parts of, a lane keeps the first kHalf, or the others if it is
// the `upper` one, and adds what lane `other` has of them; from the first place on.
template <int kHalf, int kCount>
__device__ __forceinline__ void ExchangeHalves(float (&sums)[kCount], bool upper, int other) {
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float low = sums[i], high = i + kHalf < kCount ? sums[i + kHalf] : 0.0f;
    sums[i] = (upper ? high : low) + __shfl_sync(kAllLanes, upper ? low : high, other);
  }
}

// `numbers` are a thread's of 64 rows and 128 columns, as tensor cores give them: number
// 4 j + 2 h + e of lane 4 r + q is in row r + 8 h of the warp's 16 and in column 8 j + 2 q + e.

// Stores the warp's sums of columns.
__device__ __forceinline__ void StoreSumsOfColumns(const float (&numbers)[kMaskTile / 2],
                                                   uint32_t to) {
  const int lane = threadIdx.x % kWarp, r = lane / 4, q = lane % 4;
  float sums[kMaskTile / 4];  // of number 2 j + e
#pragma unroll
  for (int i = 0; i < kMaskTile / 4; ++i) {
    const int at = i / 2 * 4 + i % 2;
    sums[i] = numbers[at] + numbers[at + 2];
  }
  ExchangeHalves<16>(sums, (r & 4) != 0, lane ^ 16);
  ExchangeHalves<8>(sums, (r & 2) != 0, lane ^ 8);
  ExchangeHalves<4>(sums, (r & 1) != 0, lane ^ 4);
  // Numbers 4 r to 4 r + 3 are left.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    SharedAt<float>(to + ((2 * r + i / 2) * 8 + 2 * q + i % 2) * 4) = sums[i];
  }
}

// Stores the warp's sums of diagonals, that of column - row in place column - row + 16.
//
// A diagonal is 8 J + f with f from 0 to 7. A lane's number of column 2 q + e of 8 belongs to f =
// (2 q + e - r) % 8 and, where 2 q + e < r, to the J of the block in front. Once numbers are where
// their J is, those of the same f are added without regard to it. First a lane keeps number e = 0
// and gets e = 1 of the next row's lane with the same q, or, in an odd row, of the row in front and
// q - 1. Then rows r and r + 2 have the same f in lanes whose q differs by 1, and rows r and r + 4
// in those whose q differs by 2.
__device__ __forceinline__ void StoreSumsOfDiagonals(const float (&numbers)[kMaskTile / 2],
                                                     uint32_t to) {
  constexpr int kBlocks = kMaskTile / 8, kPlaces = kDiagonals / 8;
  const int lane = threadIdx.x % kWarp, r = lane / 4, q = lane % 4;
  // Of block j, from -1 on, and number e: rows that are 8 apart meet in neighbouring blocks.
  const auto of_block = [&](int j, int e) {
    const float upper = 0 <= j && j < kBlocks ? numbers[j * 4 + e] : 0.0f;
    const float lower = 0 <= j + 1 && j + 1 < kBlocks ? numbers[(j + 1) * 4 + 2 + e] : 0.0f;
    return upper + lower;
  };
  const auto lane_of = [](int row, int column) { return row * 4 + (column & 3); };
  const bool moved[] = {2 * q < r, 2 * q + 1 < r};
  const int odd = r & 1, other = odd != 0 ? lane_of(r - 1, q - 1) : lane_of(r + 1, q);
  float sums[kPlaces];  // of J, from -2 on
#pragma unroll
  for (int i = 0; i < kPlaces; ++i) {
    const int block = i - 2;
    const float own = moved[0] ? of_block(block + 1, 0) : of_block(block, 0);
    const float given = moved[1] ? of_block(block + 1, 1) : of_block(block, 1);
    sums[i] = own + __shfl_sync(kAllLanes, given, other);
  }
  const bool third = (r & 2) != 0, fifth = (r & 4) != 0;
  ExchangeHalves<9>(sums, third, third ? lane_of(r - 2, q - 1) : lane_of(r + 2, q + 1));
  float rest[9];
#pragma unroll
  for (int i = 0; i < 9; ++i) rest[i] = sums[i];
  ExchangeHalves<5>(rest, fifth, lane_of(r ^ 4, q + 2));
  const int first = (third ? 9 : 0) + (fifth ? 5 : 0), diagonal = (2 * q - r) & 7;
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    if (i == 4 && fifth) continue;
    SharedAt<float>(to + ((first + i) * 8 + diagonal) * 4) = rest[i];
  }
}

// Sums on their way from consumers to the warp that adds them up.
struct TileSumsControl {
  uint64_t full[kTileSumSlots], empty[kTileSumSlots];
  float* to[kTileSumSlots];        // where the tile's numbers belong; null: there are no more
  uint32_t states[kTileSumSlots];  // of the tile's cells, as an entry has them

  using State = PipelineState<kTileSumSlots>;
  __device__ __forceinline__ PipelineStage SlotAt(State at) {
    return {&full[at.stage], &empty[at.stage], at.phase};
  }
  // By one thread.
  __device__ __forceinline__ void Init() {
    for (uint32_t i = 0; i < kTileSumSlots; ++i) SlotAt({i}).Init(kSummingWarps * kWarp, kWarp);
  }
};

// One of the consumers' warps, all of which fill each slot.
class TileSumsFiller {
  TileSumsControl& control_;
  uint32_t slots_;  // in shared memory
  TileSumsControl::State at_;

 public:
  __device__ __forceinline__ TileSumsFiller(TileSumsControl& control, uint32_t slots)
      : control_(control), slots_(slots) {}

  // store(to) has the warp's sums stored; those of all warps belong to place().
  template <typename Place, typename Store>
  __device__ __forceinline__ void Fill(uint32_t states, Place place, Store store) {
    const PipelineStage slot = control_.SlotAt(at_);
    slot.WaitUntilEmpty();
    if (threadIdx.x == 0) {
      control_.to[at_.stage] = place();
      control_.states[at_.stage] = states;
    }
    store(slots_ + at_.stage * kTileSumBytes + threadIdx.x / kWarp * kTileSumsOfWarp);
    slot.Filled();
    at_.Advance();
  }
};

// Which warps have rows of cells that are stored.
__device__ __forceinline__ bool HasSums(uint32_t states, int warp) {
  return (states >> (kMaskStatesAt + 4 * (warp / (kSummingWarps / 2))) & 15) != 0;
}

// A lane's share of a tile's numbers.
template <ScoreSums kSums>
__device__ __forceinline__ void AddUpWarps(uint32_t slot, uint32_t states, float* to) {
#pragma unroll 1
  for (int i = threadIdx.x % kWarp; i < TileSumsOf(kSums); i += kWarp) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kSummingWarps; ++warp) {
      // A warp's first row is row 16 warp of the tile.
      const int place = kSums == ScoreSums::kByColumn ? i : 16 * warp - (i - kMaskTile) + 16;
      if (place < 0 || place >= kDiagonals || !HasSums(states, warp)) continue;
      sum += SharedAt<const float>(slot + warp * kTileSumsOfWarp + place * 4);
    }
    to[i] = sum;
  }
}

// The warp that adds up what the others have.
template <typename Function>
__device__ __forceinline__ void AddUpTileSums(TileSumsControl& control, uint32_t slots) {
  TileSumsControl::State at;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < Function::kGradients; ++i) {
      if (!IsSummedByTiles(Function::kSums[i])) continue;
      const PipelineStage slot = control.SlotAt(at);
      slot.WaitUntilFull();
      float* to = control.to[at.stage];
      if (to == nullptr) return;
      const uint32_t states = control.states[at.stage], from = slots + at.stage * kTileSumBytes;
      if (Function::kSums[i] == ScoreSums::kByColumn) {
        AddUpWarps<ScoreSums::kByColumn>(from, states, to);
      } else {
        AddUpWarps<ScoreSums::kByDistance>(from, states, to);
      }
      slot.Emptied();
      at.Advance();
    }
  }
}

// ---- The sums of all tiles ----

// Adds up the sums of tiles of a column, or of a diagonal, by so many threads of each block.
template <int kThreads>
class TilesAdder {
  using Numbers = Vector<float, 4>;
  static constexpr int kBarrier = 1;
  static constexpr int kLanes = kMaskTile / 4;  // threads with a row of 128 sums
  static constexpr int kParts = kThreads / kLanes;
  struct Shared {
    BatchPlace place;
    int32_t tiles[2][kThreads];  // of rows; -1: there is none
    Numbers sums[kParts][kLanes];
  };

  const AttentionCotangentWork& p_;
  Shared& shared_;
  const float* sums_;  // of the workspace

  // Finds the tiles of a row in two neighbouring columns, of which there may be none.
  __device__ __forceinline__ void FindTiles(uint32_t head, uint32_t row, int column) {
    const auto per_group = static_cast<uint32_t>(p_.per_group);
    const auto own = static_cast<uint32_t>(p_.mask.Own(head / per_group, head % per_group));
    MaskRow mask;
    mask.Set(p_.mask, p_.batch, shared_.place, own, row);
    const uint32_t first = FirstEntryOf(p_.mask, p_.batch, shared_.place, own, row);
    uint32_t found = 0, end = mask.count;
    while (found < end) {
      const uint32_t middle = (found + end) / 2;
      if (static_cast<int>(mask.ColumnOf(mask.entries[middle])) < column) found = middle + 1;
      else end = middle;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int32_t tile = -1;
      if (found < mask.count) {
        const uint32_t entry = WithWords(mask, mask.entries[found]);
        if (static_cast<int>(mask.ColumnOf(entry)) == column + i) {
          if (entry >> kMaskStatesAt != 0) tile = static_cast<int32_t>(first + found);
          ++found;
        }
      }
      shared_.tiles[i][threadIdx.x] = tile;
    }
  }

  // Writes 128 sums of a head of all: of column `number` of tiles, or of the distances from
  // 128 (number - columns) on, which the diagonals there and behind have parts of.
  template <ScoreSums kSums>
  __device__ __forceinline__ void AddUp(int gradient, uint32_t of_all, uint32_t number) {
    constexpr bool kByDistance = kSums == ScoreSums::kByDistance;
    constexpr int kSides = kByDistance ? 2 : 1;
    const auto heads = static_cast<uint32_t>(p_.groups * p_.per_group);
    const auto rows = static_cast<uint32_t>(p_.mask.rows);
    const auto columns = static_cast<int>(p_.mask.columns);
    const uint32_t head = of_all % heads;
    const int lane = threadIdx.x % kLanes, part = threadIdx.x / kLanes;
    const int diagonal = static_cast<int>(number) - columns, side = part % kSides;
    const float* from = sums_ + TileSumsAt(p_, gradient, of_all, 0) + lane * 4 +
                        (kByDistance && side == 1 ? kMaskTile : 0);
    WaitAt<kThreads>(kBarrier);
    if (threadIdx.x == 0) shared_.place.Set(p_.batch, of_all / heads);
    WaitAt<kThreads>(kBarrier);
    Numbers sum = {};
#pragma unroll 1
    for (uint32_t first = 0; first < rows; first += kThreads) {
      const uint32_t row = first + threadIdx.x;
      // The lower side's tiles are those of the diagonal behind, one column in front.
      const int column = kByDistance ? static_cast<int>(row) - diagonal - 1 : number;
      shared_.tiles[0][threadIdx.x] = shared_.tiles[1][threadIdx.x] = -1;
      if (row < rows && column + 1 >= 0 && column < columns) FindTiles(head, row, column);
      WaitAt<kThreads>(kBarrier);
      const int left = rows - first < kThreads ? static_cast<int>(rows - first) : kThreads;
#pragma unroll 4
      for (int i = part / kSides; i < left; i += kParts / kSides) {
        const int32_t tile = shared_.tiles[side][i];
        if (tile < 0) continue;
        const auto numbers =
            *reinterpret_cast<const Numbers*>(from + int64_t{tile} * TileSumsOf(kSums));
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.elements[e] += numbers.elements[e];
      }
      WaitAt<kThreads>(kBarrier);
    }
    shared_.sums[part][lane] = sum;
    WaitAt<kThreads>(kBarrier);
    if (threadIdx.x >= kMaskTile) return;
    const int64_t size = kByDistance ? p_.queries + p_.keys - 1 : p_.keys;
    const int64_t at = threadIdx.x + (kByDistance ? int64_t{kMaskTile} * diagonal + p_.keys - 1
                                                  : int64_t{kMaskTile} * number);
    float total = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      total += shared_.sums[i][threadIdx.x / 4].elements[threadIdx.x % 4];
    }
    const Array& cotangents = p_.scores.ct_values[gradient];
    float* to = shared_.place.template At<float>(p_.batch, cotangents) + head * size;
    if (0 <= at && at < size) to[at] = total;
  }

  template <ScoreSums kSums>
  __device__ __forceinline__ void AddUpAll(int gradient) {
    const int64_t heads = p_.batch.count * p_.groups * p_.per_group;
    const int64_t of_head = p_.mask.columns + (kSums == ScoreSums::kByDistance ? p_.mask.rows : 0);
#pragma unroll 1
    for (int64_t i = blockIdx.x; i < heads * of_head; i += gridDim.x) {
      AddUp<kSums>(gradient, static_cast<uint32_t>(i / of_head),
                   static_cast<uint32_t>(i % of_head));
    }
  }

 public:
  // `shared`: memory that nothing else uses any more. What tiles add is there.
  __device__ __forceinline__ TilesAdder(const AttentionCotangentWork& p, unsigned char* shared)
      : p_(p),
        shared_(*reinterpret_cast<Shared*>(shared)),
        sums_(reinterpret_cast<const float*>(static_cast<const char*>(p.workspace.data) +
                                             kCotangentWorkspaceBytes)) {}

  template <typename Function>
  __device__ __forceinline__ void Run() {
#pragma unroll
    for (int i = 0; i < Function::kGradients; ++i) {
      if (Function::kSums[i] == ScoreSums::kByColumn) AddUpAll<ScoreSums::kByColumn>(i);
      if (Function::kSums[i] == ScoreSums::kByDistance) AddUpAll<ScoreSums::kByDistance>(i);
    }
  }
};

}  // namespace jaxsparse
