// Recurrent scans with 16-bit dense weights whose warps have all gates of their units, on tensor
// cores (problem.h): heads, small layers, large batches. A warp multiplies by the whole state,
// which lies in shared memory, so that products need no sums over warps and the cell follows in the
// registers that hold them. A layer that one block has room for takes one barrier a step and no
// word with other blocks; larger ones are shared by a few blocks, which exchange states
// (resident_exchange.cuh).
//
// Of a step of a head of 64 units, 4 gates and 2 rows, on one multiprocessor:
//
//   bytes: 4 warps read the state of 256 bytes in 8 loads, 32 clock cycles
//   operations: 64 products of 16 x 16 x 8, 16 on each tensor core, about 130 cycles
//
// and, one after the other, the latencies of a load, of four products, of the cell and of a
// barrier, some 350 cycles, which take longer than both. So a step has no branch and few
// instructions: where arrays lie is kept in registers (array_cursors.cuh), inputs are asked for
// steps ahead and come to registers of their own, for which the loop is written out, and few rows
// lie in columns of the tensor core so that every lane has a cell, without a shuffle. Of more rows
// a lane has cells of neighbouring units, which it reads and writes together.
#include "cuda/instructions.cuh"
#include "persistent/delay.cuh"
#include "recurrent/array_cursors.cuh"
#include "recurrent/kernels/resident.h"
#include "recurrent/kernels/resident_exchange.cuh"

namespace jaxsparse {

// Plan: State, Weight, Arrays, kSizes (resident.h), kMostDelay, and those of scan_of_block.cuh.
template <typename Step, typename Plan>
class ResidentScan {
  using State = typename Plan::State;
  static constexpr ResidentSizes kSizes = Plan::kSizes;
  static constexpr int kCells = kSizes.cells, kNear = kSizes.near, kAhead = kSizes.steps_ahead;
  using Arrays = ScanArrays<Step, Plan, kNear>;
  using Inputs = InputCursor<Step, Plan>;
  static constexpr bool kAllReal = kSizes.hidden == kSizes.part &&
                                   kSizes.batch == kSizes.entry_slots &&
                                   kSizes.unit_groups % kSizes.spread_groups == 0;
  static constexpr bool kExchanges = kSizes.blocks > 1;
  static constexpr int kUnrolled = kAhead > 2 ? kAhead : 2;  // slots alternate
  static_assert(kUnrolled % 2 == 0);

 public:
  __device__ __forceinline__ ResidentScan(const RecurrentScanProblem& p, Words4* slots)
      : p_(p),
        steps_(static_cast<int>(p.steps)),
        slots_(slots),
        g_(threadIdx.x % kWarp / 4),
        q_(threadIdx.x % 4),
        first_unit_(BlockOfScan<Plan>() * kSizes.block_units +
                    static_cast<int>(threadIdx.x) / kWarp * kSizes.warp_units),
        first_group_(kSizes.spread ? q_ / kSizes.entry_slots : 0),
        first_({kSizes.spread ? q_ % kSizes.entry_slots : 2 * q_, UnitOfGroup(first_group_),
                first_unit_}),
        inputs_(p, first_),
        results_(p, first_),
        exchange_(p, slots) {
#pragma unroll
    for (int j = 0; j < kSizes.register_part; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int m = 0; m < kSizes.row_tiles; ++m) weights_[j][half][m] = Fragment(j, half, m);
      }
    }
#pragma unroll 1  // which the compiler takes less time for
    for (int i = kSizes.register_part * 2 * kSizes.row_tiles;
         i < kSizes.chunks * 2 * kSizes.row_tiles; ++i) {
      const int j = i / (2 * kSizes.row_tiles), m = i % kSizes.row_tiles;
      const int half = i / kSizes.row_tiles % 2;
      slots_[SharedWeights(j, half, m)] = Fragment(j, half, m);
    }
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      if (IsReal(c)) Arrays::LoadCarry(p, EntryOf(c), UnitOf(c), carry_[c]);
    }
#pragma unroll
    for (int k = 0; k + 1 < kAhead; ++k) LoadInputs(k + 1 < steps_, input_[k]);
    FillSlots();
    read_at_ = AddressOfShared(slots + q_ * kSizes.group_distance +
                               (kSizes.spread ? g_ / 2 % kSizes.entry_slots : g_));
    written_at_ = AddressOfShared(StateAt(first_.entry, first_.unit));
    KeepInRegister(read_at_);
    KeepInRegister(written_at_);
  }

  __device__ __forceinline__ void Run() {
    for (int first = 0; first < steps_; first += kUnrolled) {
#pragma unroll
      for (int k = 0; k < kUnrolled; ++k) {
        if (first + k >= steps_) break;
        MakeStep(first + k, k);
      }
    }
    if (!kExchanges) StoreAndAdvance();
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      if (IsReal(c)) Arrays::StoreCarry(p_, EntryOf(c), UnitOf(c), carry_[c]);
    }
  }

 private:
  static constexpr int kSlotBytes = kSizes.slot * 16, kStateBytes = kSizes.state_bytes;

  // `k`: the step's place among kUnrolled ones, known at compile time.
  __device__ __forceinline__ void MakeStep(int step, int k) {
    // Of the slot that was read in the step before all have read, and all of this one is there.
    WaitAt<kSizes.threads>(kAllThreads);
    Delay<Plan::kMostDelay>(step);
    float sums[kSizes.row_tiles][kSizes.batch_tiles][4];
    Multiply(read_at_ + k % 2 * kSlotBytes, sums);
    // What nothing waits for, while tensor cores multiply or other blocks do. Inputs come to where
    // those of the step before were: the compiler would have to copy what comes while its place is
    // in use.
    if (!kExchanges && (k > 0 || step > 0)) StoreAndAdvance();
    LoadInputs(step + kAhead < steps_, input_[(k + kAhead - 1) % kAhead]);
    inputs_.Prefetch(step + kStepsToCache + 1 < steps_, [&](int c) { return IsReal(c); });
    const bool stopped = exchange_.HasStopped();
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      float own[Arrays::kInputSlots], products[kSizes.products];
      inputs_.Convert(input_[k % kAhead][c / kNear], c % kNear, own);
      TakeProducts(sums, c, products);
      Step::Apply(products, carry_[c], own, state_[c], output_[c]);
      if (kExchanges && stopped) SpoilCell(c);
      // With its neighbours before it.
      if ((c + 1) % kNear == 0) Publish(written_at_ + (k + 1) % 2 * kSlotBytes, c + 1 - kNear);
    }
    if constexpr (kExchanges) {
      // Nothing is sent that doesn't stem from all of the last state. The other blocks time out by
      // themselves.
      const bool goes_on = !stopped && step + 1 < steps_;
      __syncwarp();
      if (goes_on) exchange_.Send(step + 1, (k + 1) % 2);
      StoreAndAdvance();
      if (goes_on) exchange_.Receive(step + 1, (k + 1) % 2);
    }
  }

  // A step that lacks a part of the last state has no result.
  __device__ __forceinline__ void SpoilCell(int c) {
    const float nan = __uint_as_float(0x7fffffffu);
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) state_[c][s] = nan;
#pragma unroll
    for (int o = 0; o < Step::kOutputs; ++o) output_[c][o] = nan;
#pragma unroll
    for (int i = 0; i < Step::kCarries; ++i) carry_[c][i] = nan;
  }

  __device__ __forceinline__ int EntryOf(int c) const {
    return first_.entry + kSizes.EntryFromFirst(c);
  }
  __device__ __forceinline__ int UnitOf(int c) const {
    return first_.unit + kSizes.UnitFromFirst(c);
  }
  // Neighbours are real together.
  __device__ __forceinline__ bool IsReal(int c) const {
    return kAllReal || (first_group_ + kSizes.UnitFromFirst(c) < kSizes.unit_groups &&
                        UnitOf(c) < kSizes.hidden && EntryOf(c) < kSizes.batch);
  }
  // Of this lane, among a group of 8 that the warp has.
  __device__ __forceinline__ int UnitOfGroup(int group) const {
    return first_unit_ + g_ * kSizes.unit_groups + group;
  }
  __device__ __forceinline__ void LoadInputs(bool goes_on, typename Inputs::Words& to) {
    inputs_.Load(goes_on, [&](int c) { return IsReal(c); }, to);
  }

  __device__ __forceinline__ static int SharedWeights(int j, int half, int m) {
    return kSizes.weights_at +
           (((j - kSizes.register_part) * 2 + half) * kSizes.row_tiles + m) * kSizes.threads +
           static_cast<int>(threadIdx.x);
  }

  // The order of columns within a product is free: a lane has 8 neighbours in a chunk.
  __device__ __forceinline__ Words4 Fragment(int j, int half, int m) const {
    const int column = j * 32 + q_ * 8 + 4 * half, rows = 2 * m;
    return {WeightsAt(rows, column), WeightsAt(rows + 1, column), WeightsAt(rows, column + 2),
            WeightsAt(rows + 1, column + 2)};
  }

  // Two neighbouring columns of this lane's row in a group of rows; zeros where the matrix has
  // none.
  __device__ __forceinline__ uint32_t WeightsAt(int rows, int column) const {
    using Weight = typename Plan::Weight;
    const int group = rows / kSizes.products, gate = rows % kSizes.products;
    const int unit = UnitOfGroup(group);
    const auto* weights = static_cast<const Weight*>(p_.weights) +
                          DirectionOf<Plan>(p_) * p_.weights_size +
                          (gate * kSizes.hidden + unit) * p_.weight_row_stride;
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int part = (column + i) / kSizes.part, k = (column + i) % kSizes.part;
      if (group < kSizes.unit_groups && unit < kSizes.hidden && part < kSizes.state_parts &&
          k < kSizes.hidden) {
        const Weight weight = weights[(part * kSizes.hidden + k) * p_.weight_column_stride];
        pair |= static_cast<uint32_t>(weight.bits) << 16 * i;
      }
    }
    return pair;
  }

  // The initial state; zeros where no unit or batch entry is, for good.
  __device__ __forceinline__ void FillSlots() const {
    for (int i = threadIdx.x; i < 2 * kSizes.slot; i += kSizes.threads) slots_[i] = {0, 0, 0, 0};
    WaitAt<kSizes.threads>(kAllThreads);
    for (int i = threadIdx.x; i < kSizes.batch * kSizes.hidden; i += kSizes.threads) {
      const int entry = i / kSizes.hidden, unit = i % kSizes.hidden;
      const auto* from = static_cast<const State*>(p_.initial_state) +
                         RowOf<Plan>(p_, entry) * Step::kStates * kSizes.hidden + unit;
#pragma unroll
      for (int s = 0; s < Step::kStates; ++s) {
        StateAt(entry, unit)[s * kPartStates] = from[s * kSizes.hidden];
      }
    }
  }

  // Where the first slot has the first state of a unit; the next part of it lies kPartStates on.
  static constexpr int kPartStates = kSizes.part / 8 * kSizes.group_distance * 8;
  __device__ __forceinline__ State* StateAt(int entry, int unit) const {
    return reinterpret_cast<State*>(slots_ + unit / 8 * kSizes.group_distance + entry) + unit % 8;
  }

  __device__ __forceinline__ void Multiply(
      uint32_t slot, float (&to)[kSizes.row_tiles][kSizes.batch_tiles][4]) const {
    float sums[kSizes.chains][kSizes.row_tiles][kSizes.batch_tiles][4] = {};
#pragma unroll
    for (int j = 0; j < kSizes.chunks; ++j) {
      uint32_t x[kSizes.batch_tiles][4];
#pragma unroll
      for (int n = 0; n < kSizes.batch_tiles; ++n) {
        LoadShared(slot + (j * 4 * kSizes.group_distance + n * 8) * 16, x[n]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int m = 0; m < kSizes.row_tiles; ++m) {
          Words4 a;
          if (j < kSizes.register_part) {
            a = weights_[j < kSizes.register_part ? j : 0][half][m];
          } else {
            a = slots_[SharedWeights(j, half, m)];
          }
#pragma unroll
          for (int n = 0; n < kSizes.batch_tiles; ++n) {
            MultiplyAdd(State(), sums[(2 * j + half) % kSizes.chains][m][n], {a.x, a.y, a.z, a.w},
                        x[n][2 * half], x[n][2 * half + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int m = 0; m < kSizes.row_tiles; ++m) {
#pragma unroll
      for (int n = 0; n < kSizes.batch_tiles; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          to[m][n][e] = sums[0][m][n][e];
#pragma unroll
          for (int c = 1; c < kSizes.chains; ++c) to[m][n][e] += sums[c][m][n][e];
        }
      }
    }
  }

  __device__ __forceinline__ void TakeProducts(
      const float (&sums)[kSizes.row_tiles][kSizes.batch_tiles][4], int c,
      float (&products)[kSizes.products]) const {
#pragma unroll
    for (int gate = 0; gate < kSizes.products; ++gate) {
      if constexpr (kSizes.spread) {
#pragma unroll
        for (int s = 0; s < kSizes.spread_groups; ++s) {
          const int group = c * kSizes.spread_groups + s;
          if (group >= kSizes.unit_groups) break;
          const int rows = group * kSizes.products + gate;
          const float sum = sums[rows / 2][0][rows % 2 * 2];
          products[gate] = s == 0 || first_group_ == s ? sum : products[gate];
        }
      } else {
        const int rows = kSizes.UnitFromFirst(c) * kSizes.products + gate;
        const int column = kSizes.ColumnFromFirst(c);
        products[gate] = sums[rows / 2][column / 2][rows % 2 * 2 + column % 2];
      }
    }
  }

  // A cell and its neighbours. `to`: where the slot has the first cell's state. The units of a lane
  // share 16 bytes of it, as 8 is a multiple of unit_groups.
  __device__ __forceinline__ void Publish(uint32_t to, int c) const {
    if (!IsReal(c)) return;
    const int bytes = kSizes.EntryFromFirst(c) * 16 + kSizes.UnitFromFirst(c) * kStateBytes;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) {
      const uint32_t at = to + bytes + s * kPartStates * kStateBytes;
      if constexpr (kNear == 1) {
        FromAccumulator(state_[c][s], &SharedAt<State>(at));
      } else {
#pragma unroll
        for (int i = 0; i < kNear; i += 2) {
          SharedAt<uint32_t>(at + i * kStateBytes) =
              PairOf(State(), state_[c + i][s], state_[c + i + 1][s]);
        }
      }
    }
  }

  __device__ __forceinline__ void StoreAndAdvance() {
#pragma unroll
    for (int c = 0; c < kCells; c += kNear) {
      if (IsReal(c)) results_.Store(c, state_ + c, output_ + c);
    }
    results_.Advance();
  }

  const RecurrentScanProblem& p_;
  const int steps_;
  Words4* const slots_;
  const int g_, q_;
  const int first_unit_, first_group_;  // of the warp, of the lane
  const CellPlace first_;               // cell
  Inputs inputs_;
  ResultCursor<Step, Plan> results_;
  ResidentExchange<Plan> exchange_;
  uint32_t read_at_, written_at_;  // in shared memory, of the first slot and cell
  Words4 weights_[kSizes.register_part > 0 ? kSizes.register_part : 1][2][kSizes.row_tiles];
  float carry_[kCells][Arrays::kCarrySlots] = {};
  typename Inputs::Words input_[kAhead] = {};
  float state_[kCells][Step::kStates], output_[kCells][Arrays::kOutputSlots];
};

template <typename Step, typename Plan>
__global__ void __launch_bounds__(Plan::kSizes.threads, Plan::kSizes.resident)
    RecurrentScan(const __grid_constant__ RecurrentScanProblem p) {
  constexpr ResidentSizes kSizes = Plan::kSizes;
  static_assert(kSizes.products == Step::kProducts && kSizes.state_parts == Step::kStates &&
                kSizes.state_bytes == sizeof(typename Plan::State) && !Plan::kBarrier);
  extern __shared__ Words4 shared[];
  ResidentScan<Step, Plan>(p, shared).Run();
}

}  // namespace jaxsparse
