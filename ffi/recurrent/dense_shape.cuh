// How a dense recurrent scan is dealt to blocks, warps and lanes. All sizes are known at compile
// time, because what lies in registers has to.
//
// Plan, of a dense scan:
//   State, Weight          element types
//   kHidden, kBatch        h, B
//   kUnits                 units of a block, all gates of each; even where states have 16 bits
//   kWarps                 warps that make products; the columns (s, k) are split over them
//   kPointwiseWarps        warps that sum the warps' parts and make the pointwise step
//   kTensorCores           mma.sync (16 bits only), or FMA
//   kRegisterChunks        chunks of columns of a warp whose weights stay in registers; the others'
//                          are read from shared memory in every step
//   kProductRegisters      registers of a product thread, or 0 for an equal share; if not 0, both
//                          numbers of warps have to be multiples of 4
//   kPointwiseRegisters    the same of a pointwise thread
//   kRowGroups             FMA: groups of lanes that share a warp's columns, each with its own rows
//   kBatchTile             FMA: batch entries that are summed at a time
//   kScans, kBlocks        scans of the launch, and blocks of each
//   kResident              blocks that share a multiprocessor
//   kBarrier               blocks meet after each step, instead of looking for each other's data
//   kPrefetch              the scan is so long that its exchange buffer leaves the L2 cache
//   kMostDelay             clock cycles by which warps are held up, in tests
//   kLaunchSharedBytes, kLaunchSlot    what the launch was planned with
#pragma once

#include "recurrent/scan_of_block.cuh"

namespace jaxsparse {

template <typename Step, typename Plan>
struct DenseShape {
  using State = typename Plan::State;

  static constexpr int Ceil(int a, int b) { return (a + b - 1) / b; }
  static constexpr int AtLeast(int size, int least) { return size < least ? least : size; }
  static constexpr int PowerOf2(int size) {
    int power = 1;
    while (power < size) power *= 2;
    return power;
  }

  static constexpr int kRows = Step::kProducts * Plan::kUnits;
  static constexpr int kStatesPerLoad = 16 / static_cast<int>(sizeof(State));

  // The batch in tiles of a tensor core's 8 columns.
  static constexpr int kTileBatch = Plan::kBatch > 8 ? 8 : AtLeast(PowerOf2(Plan::kBatch), 2);
  static constexpr int kBatchTiles = Ceil(Plan::kBatch, 8);
  static constexpr int kBatchSlots = kBatchTiles * kTileBatch;

  // A slot of the exchange buffer is [column / kStatesPerLoad][b][column % kStatesPerLoad]: what a
  // block publishes lies together, so that its stores cover whole sectors and few cache lines.
  // Stores of parts of sectors to lines that all blocks poll are slow. A state part is padded to
  // whole groups; the last block publishes zeros there.
  static constexpr int kPart = Ceil(Plan::kHidden, kStatesPerLoad) * kStatesPerLoad;
  static constexpr int kColumns = Step::kStates * kPart;
  // Batch entries of a slot: padded so that a block's part is whole sectors of 32 bytes.
  static constexpr int ExchangeBatch() {
    for (int b = Plan::kBatch; Plan::kTensorCores && b <= kBatchSlots; ++b) {
      if (Plan::kUnits * b * static_cast<int>(sizeof(State)) % 32 == 0) return b;
    }
    return Plan::kBatch;
  }
  static constexpr int kExchangeBatch = ExchangeBatch();
  static constexpr int kSlot = kExchangeBatch * kColumns;
  __device__ __forceinline__ static int Offset(int b, int column) {
    return (column / kStatesPerLoad * kExchangeBatch + b) * kStatesPerLoad +
           column % kStatesPerLoad;
  }

  // Parts of products in shared memory: [warp][b][unit][gate], the gates of a unit in one vector.
  // Four gates are rotated by half the batch entry, so that a tensor core's tile, 8 units by 4
  // pairs of batch entries, is written to different banks.
  static constexpr int kGateSlots = Step::kProducts == 3 ? 4 : Step::kProducts;
  static constexpr bool kRotated = kGateSlots == 4;
  static constexpr int kRowSlots =
      kRotated ? Ceil(Plan::kUnits, 8) * 32 : Ceil(Plan::kUnits * kGateSlots, 16) * 16 + 4;
  static constexpr int kWarpPart = kBatchSlots * kRowSlots;
  static constexpr int kPartials = Plan::kWarps * kWarpPart;
  // Neighbouring rows are units, because these lie together in the weights of a forward pass.
  __device__ __forceinline__ static int SlotOfRow(int row, int b) {
    const int gate = row / Plan::kUnits;
    return row % Plan::kUnits * kGateSlots + (kRotated ? (gate + b / 2) % 4 : gate);
  }

  static constexpr int kProductThreads = Plan::kWarps * kWarp;
  static constexpr int kPointwiseThreads = Plan::kPointwiseWarps * kWarp;
  static constexpr int kThreads = kProductThreads + kPointwiseThreads;
  // A block can deal its registers anew, but not get more: that would wait for ever. Each quarter
  // of a multiprocessor has 512 for every lane of its warps.
  static constexpr int kAllWarps = Plan::kWarps + Plan::kPointwiseWarps;
  static constexpr int kEqualShare = 512 / (Plan::kResident * Ceil(kAllWarps, 4)) / 8 * 8;
  static_assert(Plan::kProductRegisters == 0 ||
                (Plan::kWarps % 4 == 0 && Plan::kPointwiseWarps % 4 == 0 &&
                 Plan::kWarps * Plan::kProductRegisters +
                         Plan::kPointwiseWarps * Plan::kPointwiseRegisters <=
                     kAllWarps * kEqualShare));

  // Shared memory: two buffers of partials (a step's are read while the next one's come), a flag,
  // weights.
  static constexpr int kFlagAt = 2 * kPartials * 4;
  static constexpr int kWeightsAt = Ceil(kFlagAt + 4, 16) * 16;

  static_assert(Plan::kBlocks == Ceil(kPart, Plan::kUnits));
};

// The weights of one row of a block, zero where the matrix has none.
template <typename Step, typename Plan>
struct DenseRow {
  using Shape = DenseShape<Step, Plan>;
  using Weight = typename Plan::Weight;

  const Weight* values;  // null: no such row
  int64_t column_stride;

  // `row`: gate * kUnits + unit of the block.
  __device__ __forceinline__ DenseRow(const RecurrentScanProblem& p, int row)
      : column_stride(p.weight_column_stride) {
    const int unit = BlockOfScan<Plan>() * Plan::kUnits + row % Plan::kUnits;
    const bool exists = row < Shape::kRows && unit < Plan::kHidden;
    values = exists ? static_cast<const Weight*>(p.weights) +
                          (row / Plan::kUnits * Plan::kHidden + unit) * p.weight_row_stride
                    : nullptr;
  }

  // kCount neighbours; `column`, of the exchange buffer, is a multiple of 4. Conditions and
  // divisions that the sizes rule out would take the compiler seconds, there are so many of these
  // loads.
  template <int kCount>
  __device__ __forceinline__ void Load(int column, Weight (&to)[kCount]) const {
    constexpr bool kPadded = Shape::kPart != Plan::kHidden;
    const int part = kPadded ? column / Shape::kPart : 0;
    const int k = column - part * Shape::kPart;
    const bool exists = values != nullptr && column < Shape::kColumns;
    const Weight* from = values + (part * Plan::kHidden + k) * column_stride;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      to[i] = Weight{};
      if (exists && (!kPadded || k + i < Plan::kHidden)) to[i] = from[i * column_stride];
    }
  }
};

// The state before the first step, which nobody publishes: kStatesPerLoad elements from `column`
// on.
template <typename Step, typename Plan>
__device__ __forceinline__ Words4 LoadInitialState(const RecurrentScanProblem& p, int b,
                                                   int column) {
  using Shape = DenseShape<Step, Plan>;
  using State = typename Plan::State;
  union {
    Words4 words;
    State elements[Shape::kStatesPerLoad];
  } x = {Words4{0, 0, 0, 0}};
  const int k = column % Shape::kPart;
  const State* from = static_cast<const State*>(p.initial_state) +
                      (b * Step::kStates + column / Shape::kPart) * Plan::kHidden + k;
#pragma unroll
  for (int e = 0; e < Shape::kStatesPerLoad; ++e) {
    if (k + e < Plan::kHidden) x.elements[e] = from[e];
  }
  return x.words;
}

}  // namespace jaxsparse
