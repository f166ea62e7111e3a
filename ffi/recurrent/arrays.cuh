// What a scan reads and writes beside the state that its blocks exchange. How many arrays there
// are, and of how many parts each, is printed into the plan:
//
//   struct Arrays {
//     static constexpr int kInputs = ..., kOutputs = ...;  // arrays
//     static constexpr int kInputParts[] = {...}, kOutputParts[] = {...};
//     // float32, or else the state's dtype
//     static constexpr bool kInputIsFloat[] = {...}, kOutputIsFloat[] = {...};
//   };
//
// Addresses are made anew for each step: this happens while the block waits for the others anyway,
// and the registers are better spent on weights.
#pragma once

#include "cuda/device.cuh"
#include "recurrent/scan_of_block.cuh"

namespace jaxsparse {

// What a step reads is brought to the L2 cache so many steps before.
constexpr int kStepsAhead = 4;

template <typename Step, typename Plan>
struct ScanArrays {
  using State = typename Plan::State;
  using Arrays = typename Plan::Arrays;

  // Arrays of a step that has no such values still need one element.
  static constexpr int kInputSlots = Step::kInputs > 0 ? Step::kInputs : 1;
  static constexpr int kOutputSlots = Step::kOutputs > 0 ? Step::kOutputs : 1;
  static constexpr int kCarrySlots = Step::kCarries > 0 ? Step::kCarries : 1;

  __device__ __forceinline__ static int64_t TimeOf(const RecurrentScanProblem& p, int64_t step) {
    return IsReversed<Plan>(p) ? p.steps - 1 - step : step;
  }

  // visit(slot, address, is_float) for all inputs of a step at one place.
  template <typename Visit>
  __device__ __forceinline__ static void ForEachInput(const RecurrentScanProblem& p, int64_t t,
                                                      int64_t b, int64_t unit, Visit visit) {
    int slot = 0;
#pragma unroll
    for (int i = 0; i < Arrays::kInputs; ++i) {
      const ScanInput& in = p.inputs[i];
      const int64_t at = DirectionOf<Plan>(p) * in.direction_stride + t * in.step_stride +
                         EntryOfBatch<Plan>(p, b) * in.row_stride + unit * in.unit_stride;
      const int64_t size = Arrays::kInputIsFloat[i] ? sizeof(float) : sizeof(State);
#pragma unroll
      for (int part = 0; part < Arrays::kInputParts[i]; ++part) {
        visit(slot++, static_cast<const char*>(in.data) + (at + part * in.part_stride) * size,
              Arrays::kInputIsFloat[i]);
      }
    }
  }

  // As they lie in memory: a conversion would wait for the load.
  __device__ __forceinline__ static void LoadInputs(const RecurrentScanProblem& p, int64_t t,
                                                    int64_t b, int64_t unit, uint32_t* inputs) {
    ForEachInput(p, t, b, unit, [&](int slot, const char* from, bool is_float) {
      inputs[slot] = is_float || sizeof(State) == 4 ? *reinterpret_cast<const uint32_t*>(from)
                                                    : *reinterpret_cast<const uint16_t*>(from);
    });
  }

  __device__ __forceinline__ static void ConvertInputs(const uint32_t* inputs, float* to) {
    int slot = 0;
#pragma unroll
    for (int i = 0; i < Arrays::kInputs; ++i) {
#pragma unroll
      for (int part = 0; part < Arrays::kInputParts[i]; ++part, ++slot) {
        to[slot] = Arrays::kInputIsFloat[i] ? __uint_as_float(inputs[slot])
                                            : FromBits(State(), inputs[slot]);
      }
    }
  }

  __device__ __forceinline__ static void PrefetchInputs(const RecurrentScanProblem& p, int64_t t,
                                                        int64_t b, int64_t unit) {
    ForEachInput(p, t, b, unit, [](int, const char* from, bool) { PrefetchToL2(from); });
  }

  __device__ __forceinline__ static void StoreResults(const RecurrentScanProblem& p, int64_t t,
                                                      int64_t b, int64_t unit, const float* state,
                                                      const float* output) {
    const int64_t step = DirectionOf<Plan>(p) * p.steps + t;
    const int64_t row = step * p.batch + EntryOfBatch<Plan>(p, b);
    auto* states = static_cast<State*>(p.states) + row * Step::kStates * p.hidden + unit;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) FromAccumulator(state[s], states + s * p.hidden);
    int slot = 0;
#pragma unroll
    for (int i = 0; i < Arrays::kOutputs; ++i) {
      const int64_t at = row * Arrays::kOutputParts[i] * p.hidden + unit;
#pragma unroll
      for (int part = 0; part < Arrays::kOutputParts[i]; ++part, ++slot) {
        if (Arrays::kOutputIsFloat[i]) {
          static_cast<float*>(p.outputs[i])[at + part * p.hidden] = output[slot];
        } else {
          FromAccumulator(output[slot], static_cast<State*>(p.outputs[i]) + at + part * p.hidden);
        }
      }
    }
  }

  __device__ __forceinline__ static void LoadCarry(const RecurrentScanProblem& p, int64_t b,
                                                   int64_t unit, float* carry) {
#pragma unroll
    for (int k = 0; k < Step::kCarries; ++k) {
      carry[k] = p.initial_carry[k][RowOf<Plan>(p, b) * p.hidden + unit];
    }
  }

  __device__ __forceinline__ static void StoreCarry(const RecurrentScanProblem& p, int64_t b,
                                                    int64_t unit, const float* carry) {
#pragma unroll
    for (int k = 0; k < Step::kCarries; ++k) {
      p.final_carry[k][RowOf<Plan>(p, b) * p.hidden + unit] = carry[k];
    }
  }

 private:
  __device__ __forceinline__ static float FromBits(float, uint32_t bits) {
    return __uint_as_float(bits);
  }
  template <typename Half>
  __device__ __forceinline__ static float FromBits(Half, uint32_t bits) {
    return ToAccumulator(Half{static_cast<uint16_t>(bits)});
  }
};

}  // namespace jaxsparse
