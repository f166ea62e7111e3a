// Where the cells of a thread lie in the arrays of a scan (arrays.cuh), moved on from step to step.
// A step adds to each address, where ScanArrays multiplies by strides: for kernels whose steps are
// so short that the multiplications would be felt. The cells of a thread lie at the same distances
// from its first one in all threads, so that an array takes one address.
//
// Plan, besides what arrays.cuh says:
//   kSizes.cells                  of a thread
//   kSizes.EntryFromFirst(cell), kSizes.UnitFromFirst(cell)   those distances
#pragma once

#include "recurrent/arrays.cuh"

namespace jaxsparse {

// What a step reads is brought to the L2 cache so many steps before.
constexpr int kStepsToCache = 8;

// The batch entry of a scan and the unit of a thread's first cell.
struct CellPlace {
  int entry, unit;
};

// What a step reads.
template <typename Step, typename Plan>
class InputCursor {
  using State = typename Plan::State;
  using Arrays = typename Plan::Arrays;
  static constexpr int kArrays = Arrays::kInputs > 0 ? Arrays::kInputs : 1;
  static constexpr int kCells = Plan::kSizes.cells;
  static constexpr int kSlots = ScanArrays<Step, Plan>::kInputSlots;

 public:
  __device__ __forceinline__ InputCursor(const RecurrentScanProblem& p, CellPlace first) : p_(p) {
    const int64_t t = ScanArrays<Step, Plan>::TimeOf(p, 0);
#pragma unroll
    for (int i = 0; i < Arrays::kInputs; ++i) {
      const ScanInput& in = p.inputs[i];
      const int64_t at = DirectionOf<Plan>(p) * in.direction_stride + t * in.step_stride +
                         EntryOfBatch<Plan>(p, first.entry) * in.row_stride +
                         first.unit * in.unit_stride;
      at_[i] = static_cast<const char*>(in.data) + at * SizeOf(i);
      step_bytes_[i] = (IsReversed<Plan>(p) ? -in.step_stride : in.step_stride) * SizeOf(i);
      KeepInRegister(step_bytes_[i]);
      // Lane g of the 8 with neighbouring units brings their values of part g.
      const int g = first.unit % 8, part = g < Arrays::kInputParts[i] ? g : 0;
      cached_at_[i] = at_[i] + (part * in.part_stride - g * in.unit_stride) * SizeOf(i);
      const int64_t steps = kStepsToCache < p.steps ? kStepsToCache : p.steps - 1;
      cached_at_[i] += steps * step_bytes_[i];
    }
  }

  // Brings what a step reads to the cache, kStepsToCache after the first one; then goes on by a
  // step if there is one.
  template <typename IsReal>
  __device__ __forceinline__ void Prefetch(bool goes_on, IsReal is_real) {
#pragma unroll
    for (int i = 0; i < Arrays::kInputs; ++i) {
      const ScanInput& in = p_.inputs[i];
#pragma unroll
      for (int c = 0; c < kCells; ++c) {
        if (is_real(c)) PrefetchToL2(cached_at_[i] + FromFirst(in, c) * SizeOf(i));
      }
      if (goes_on) cached_at_[i] += step_bytes_[i];
    }
  }

  // As ScanArrays::LoadInputs, of the cells for which is_real(cell); then goes on by a step if
  // there is one.
  template <typename IsReal>
  __device__ __forceinline__ void Load(bool goes_on, IsReal is_real,
                                       uint32_t (&to)[kCells][kSlots]) {
    int slot = 0;
#pragma unroll
    for (int i = 0; i < Arrays::kInputs; ++i) {
      const ScanInput& in = p_.inputs[i];
#pragma unroll
      for (int c = 0; c < kCells; ++c) {
#pragma unroll
        for (int part = 0; part < Arrays::kInputParts[i]; ++part) {
          const char* at = at_[i] + (FromFirst(in, c) + part * in.part_stride) * SizeOf(i);
          if (is_real(c)) {
            to[c][slot + part] = SizeOf(i) == 4 ? *reinterpret_cast<const uint32_t*>(at)
                                                : *reinterpret_cast<const uint16_t*>(at);
          }
        }
      }
      slot += Arrays::kInputParts[i];
      if (goes_on) at_[i] += step_bytes_[i];
    }
  }

 private:
  static constexpr int64_t SizeOf(int array) {
    return Arrays::kInputIsFloat[array] ? sizeof(float) : sizeof(State);
  }

  __device__ __forceinline__ static int64_t FromFirst(const ScanInput& in, int c) {
    return Plan::kSizes.EntryFromFirst(c) * in.row_stride +
           Plan::kSizes.UnitFromFirst(c) * in.unit_stride;
  }

  const RecurrentScanProblem& p_;
  const char* at_[kArrays];
  const char* cached_at_[kArrays];
  int64_t step_bytes_[kArrays];
};

// What a step writes: the states, and its outputs.
template <typename Step, typename Plan>
class ResultCursor {
  using State = typename Plan::State;
  using Arrays = typename Plan::Arrays;
  static constexpr int kArrays = Arrays::kOutputs > 0 ? Arrays::kOutputs : 1;
  static constexpr int kSlots = ScanArrays<Step, Plan>::kOutputSlots;
  static constexpr int64_t kHidden = Plan::kSizes.hidden;

 public:
  __device__ __forceinline__ ResultCursor(const RecurrentScanProblem& p, CellPlace first)
      : step_rows_(IsReversed<Plan>(p) ? -p.batch : p.batch) {
    const int64_t step = DirectionOf<Plan>(p) * p.steps + ScanArrays<Step, Plan>::TimeOf(p, 0);
    const int64_t row = step * p.batch + EntryOfBatch<Plan>(p, first.entry);
    states_ = static_cast<State*>(p.states) + row * kStatesOfRow + first.unit;
#pragma unroll
    for (int i = 0; i < Arrays::kOutputs; ++i) {
      const int64_t at = row * Arrays::kOutputParts[i] * kHidden + first.unit;
      outputs_[i] = static_cast<char*>(p.outputs[i]) + at * SizeOf(i);
    }
  }

  // Of one cell.
  __device__ __forceinline__ void Store(int c, const float (&state)[Step::kStates],
                                        const float (&output)[kSlots]) const {
    const int64_t entry = Plan::kSizes.EntryFromFirst(c), unit = Plan::kSizes.UnitFromFirst(c);
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) {
      FromAccumulator(state[s], states_ + entry * kStatesOfRow + s * kHidden + unit);
    }
    int slot = 0;
#pragma unroll
    for (int i = 0; i < Arrays::kOutputs; ++i) {
#pragma unroll
      for (int part = 0; part < Arrays::kOutputParts[i]; ++part, ++slot) {
        const int64_t from_first = (entry * Arrays::kOutputParts[i] + part) * kHidden + unit;
        char* at = outputs_[i] + from_first * SizeOf(i);
        if (Arrays::kOutputIsFloat[i]) {
          *reinterpret_cast<float*>(at) = output[slot];
        } else {
          FromAccumulator(output[slot], reinterpret_cast<State*>(at));
        }
      }
    }
  }

  // Goes on by a step.
  __device__ __forceinline__ void Advance() {
    states_ += step_rows_ * kStatesOfRow;
#pragma unroll
    for (int i = 0; i < Arrays::kOutputs; ++i) {
      outputs_[i] += step_rows_ * Arrays::kOutputParts[i] * kHidden * SizeOf(i);
    }
  }

 private:
  static constexpr int64_t kStatesOfRow = Step::kStates * kHidden;
  static constexpr int64_t SizeOf(int array) {
    return Arrays::kOutputIsFloat[array] ? sizeof(float) : sizeof(State);
  }

  const int64_t step_rows_;
  State* states_;
  char* outputs_[kArrays];
};

}  // namespace jaxsparse
