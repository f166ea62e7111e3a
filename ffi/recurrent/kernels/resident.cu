// Recurrent scans with 16-bit dense weights that the registers of one block hold, on tensor cores
// (problem.h): heads, small layers. A block makes a whole scan, of a part of the batch; the state
// stays in its shared memory, so that a step waits for no other block. Of a step, with h = 64, 4
// gates and 8 rows, on one multiprocessor:
//
//   bytes: 8 warps read the state of 1 KB, 64 clock cycles at 128 bytes a cycle
//   operations: 64 products of 16 x 16 x 8, 16 on each tensor core, about 150 cycles
//
// and, one after the other, the latencies of a load, of two or four products, of the cell and of a
// barrier, which should take longer than both.
#include "cuda/instructions.cuh"
#include "persistent/delay.cuh"
#include "persistent/exchange.cuh"
#include "recurrent/arrays.cuh"
#include "recurrent/kernels/resident.h"

namespace jaxsparse {

// Plan: State, Weight, Arrays, kSizes (resident.h), kMostDelay, and those of scan_of_block.cuh.
template <typename Step, typename Plan>
class ResidentScan {
  using State = typename Plan::State;
  using Arrays = ScanArrays<Step, Plan>;
  static constexpr ResidentSizes kSizes = Plan::kSizes;
  static constexpr int kCells = kSizes.cells;

 public:
  __device__ __forceinline__ ResidentScan(const RecurrentScanProblem& p, Words4* slots)
      : p_(p),
        slots_(slots),
        g_(threadIdx.x % kWarp / 4),
        q_(threadIdx.x % 4),
        unit_(static_cast<int>(threadIdx.x) / kWarp * 8 + g_) {
#pragma unroll
    for (int m = 0; m < kSizes.row_tiles; ++m) {
#pragma unroll
      for (int j = 0; j < kSizes.chunks; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // The order of columns within a product is free: a lane has 8 neighbours in a chunk.
          const int column = j * 32 + q_ * 8 + 4 * half, gate = 2 * m;
          weights_[j][half][m] = {WeightsAt(gate, column), WeightsAt(gate + 1, column),
                                  WeightsAt(gate, column + 2), WeightsAt(gate + 1, column + 2)};
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      if (IsReal(c)) Arrays::LoadCarry(p, BatchEntry(c), unit_, carry_[c]);
    }
    LoadInputs(0, input_);
    FillSlots();
  }

  __device__ __forceinline__ void Run() {
    for (int64_t step = 0; step < p_.steps; ++step) {
      // Of the slot that was read in the step before all have read, and all of this one is there.
      WaitAt<kSizes.threads>(kAllThreads);
      Delay<Plan::kMostDelay>(step);
      float products[kCells][kSizes.row_tiles * 2];
      Multiply(slots_ + (step & 1) * kSizes.slot, products);
      // What nothing waits for, while tensor cores multiply.
      if (step > 0) Store(step - 1);
      uint32_t next[kCells][Arrays::kInputSlots] = {};
      if (step + 1 < p_.steps) LoadInputs(step + 1, next);
#pragma unroll
      for (int c = 0; c < kCells; ++c) {
        float input[Arrays::kInputSlots];
        Arrays::ConvertInputs(input_[c], 0, input);
        Step::Apply(products[c], carry_[c], input, state_[c], output_[c]);
        Publish(slots_ + (step + 1 & 1) * kSizes.slot, c);
#pragma unroll
        for (int i = 0; i < Arrays::kInputSlots; ++i) input_[c][i] = next[c][i];
      }
    }
    Store(p_.steps - 1);
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      if (IsReal(c)) Arrays::StoreCarry(p_, BatchEntry(c), unit_, carry_[c]);
    }
  }

 private:
  __device__ __forceinline__ int BatchEntry(int cell) const {
    return kSizes.handed_on ? q_ : cell / 2 * 8 + 2 * q_ + cell % 2;
  }
  __device__ __forceinline__ bool IsReal(int cell) const {
    return unit_ < kSizes.hidden && BatchEntry(cell) < kSizes.batch;
  }

  // Two neighbouring columns of this lane's unit; zeros where the matrix has none.
  __device__ __forceinline__ uint32_t WeightsAt(int gate, int column) const {
    using Weight = typename Plan::Weight;
    const auto* weights = static_cast<const Weight*>(p_.weights) +
                          DirectionOf<Plan>(p_) * p_.weights_size +
                          (gate * kSizes.hidden + unit_) * p_.weight_row_stride;
    uint32_t pair = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int part = (column + i) / kSizes.part, k = (column + i) % kSizes.part;
      if (gate < kSizes.products && unit_ < kSizes.hidden && part < kSizes.state_parts &&
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
    for (int c = 0; c < kCells; ++c) {
      if (!IsReal(c)) continue;
      const auto* from = static_cast<const State*>(p_.initial_state) +
                         RowOf<Plan>(p_, BatchEntry(c)) * Step::kStates * p_.hidden + unit_;
#pragma unroll
      for (int s = 0; s < Step::kStates; ++s) *StateAt(slots_, c, s) = from[s * p_.hidden];
    }
  }

  // Where a slot has this lane's unit.
  __device__ __forceinline__ State* StateAt(Words4* slot, int cell, int state_part) const {
    const int group = state_part * (kSizes.part / 8) + unit_ / 8;
    return reinterpret_cast<State*>(slot + group * kSizes.group_distance + BatchEntry(cell)) + g_;
  }

  __device__ __forceinline__ void Multiply(const Words4* slot,
                                           float (&products)[kCells][kSizes.row_tiles * 2]) const {
    float sums[kSizes.chains][kSizes.row_tiles][kSizes.batch_tiles][4] = {};
#pragma unroll
    for (int j = 0; j < kSizes.chunks; ++j) {
      Words4 x[kSizes.batch_tiles];
#pragma unroll
      for (int n = 0; n < kSizes.batch_tiles; ++n) {
        x[n] = slot[(j * 4 + q_) * kSizes.group_distance + n * 8 + g_];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int m = 0; m < kSizes.row_tiles; ++m) {
          const Words4 a = weights_[j][half][m];
#pragma unroll
          for (int n = 0; n < kSizes.batch_tiles; ++n) {
            MultiplyAdd(State(), sums[(2 * j + half) % kSizes.chains][m][n], {a.x, a.y, a.z, a.w},
                        half == 0 ? x[n].x : x[n].z, half == 0 ? x[n].y : x[n].w);
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
#pragma unroll
          for (int c = 1; c < kSizes.chains; ++c) sums[0][m][n][e] += sums[c][m][n][e];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float first = sums[0][m][n][2 * half], second = sums[0][m][n][2 * half + 1];
          if constexpr (kSizes.handed_on) {
            products[0][m * 2 + half] = OwnOf(first, second);
          } else {
            products[n * 2][m * 2 + half] = first;
            products[n * 2 + 1][m * 2 + half] = second;
          }
        }
      }
    }
  }

  // What belongs to batch entry q, of what lanes have for their entries 2 q and 2 q + 1.
  __device__ __forceinline__ float OwnOf(float first, float second) const {
    const int from = g_ * 4 + q_ / 2;
    const float even = __shfl_sync(kAllLanes, first, from);
    const float odd = __shfl_sync(kAllLanes, second, from);
    return q_ % 2 == 0 ? even : odd;
  }

  __device__ __forceinline__ void Publish(Words4* slot, int cell) const {
    if (!IsReal(cell)) return;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) {
      FromAccumulator(state_[cell][s], StateAt(slot, cell, s));
    }
  }

  __device__ __forceinline__ void LoadInputs(int64_t step,
                                             uint32_t (&to)[kCells][Arrays::kInputSlots]) const {
    if (Step::kInputs == 0) return;
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      if (!IsReal(c)) continue;
      const int64_t b = BatchEntry(c);
      Arrays::LoadInputs(p_, Arrays::TimeOf(p_, step), b, unit_, to[c]);
      if (step + kStepsAhead < p_.steps) {
        Arrays::PrefetchInputs(p_, Arrays::TimeOf(p_, step + kStepsAhead), b, unit_);
      }
    }
  }

  __device__ __forceinline__ void Store(int64_t step) const {
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      if (!IsReal(c)) continue;
      Arrays::StoreResults(p_, Arrays::TimeOf(p_, step), BatchEntry(c), unit_, state_ + c,
                           output_ + c);
    }
  }

  const RecurrentScanProblem& p_;
  Words4* const slots_;
  const int g_, q_, unit_;
  Words4 weights_[kSizes.chunks][2][kSizes.row_tiles];
  float carry_[kCells][Arrays::kCarrySlots] = {};
  uint32_t input_[kCells][Arrays::kInputSlots] = {};
  float state_[kCells][Step::kStates], output_[kCells][Arrays::kOutputSlots];
};

template <typename Step, typename Plan>
__global__ void __launch_bounds__(Plan::kSizes.threads, 1)
    RecurrentScan(const __grid_constant__ RecurrentScanProblem p) {
  constexpr ResidentSizes kSizes = Plan::kSizes;
  static_assert(kSizes.products == Step::kProducts && kSizes.state_parts == Step::kStates &&
                kSizes.state_bytes == sizeof(typename Plan::State) && !Plan::kBarrier);
  extern __shared__ Words4 shared[];
  ResidentScan<Step, Plan>(p, shared).Run();
}

}  // namespace jaxsparse
