// What a scan reads and writes beside the state that its blocks exchange. How many arrays there
// are, and of how many parts each, is printed into the plan:
//
//   struct Arrays {
//     static constexpr int kInputs = ..., kOutputs = ...;  // arrays
//     static constexpr int kInputParts[] = {...}, kOutputParts[] = {...};
//   };
//
// Addresses are made anew for each step: this happens while the block waits for the others anyway,
// and the registers are better spent on weights.
#pragma once

#include "common/device.cuh"
#include "recurrent/problem.h"

namespace jaxsparse {

template <typename Step, typename Plan>
struct ScanArrays {
  using State = typename Plan::State;
  using Arrays = typename Plan::Arrays;

  // Arrays of a step that has no such values still need one element.
  static constexpr int kInputSlots = Step::kInputs > 0 ? Step::kInputs : 1;
  static constexpr int kOutputSlots = Step::kOutputs > 0 ? Step::kOutputs : 1;
  static constexpr int kCarrySlots = Step::kCarries > 0 ? Step::kCarries : 1;

  __device__ __forceinline__ static int64_t TimeOf(const RecurrentScanProblem& p, int64_t step) {
    return p.reverse ? p.steps - 1 - step : step;
  }

  // visit(slot, address) for all inputs of a step at one place.
  template <typename Visit>
  __device__ __forceinline__ static void ForEachInput(const RecurrentScanProblem& p, int64_t t,
                                                      int64_t b, int64_t unit, Visit visit) {
    int slot = 0;
#pragma unroll
    for (int i = 0; i < Arrays::kInputs; ++i) {
      const ScanInput& in = p.inputs[i];
      const State* from = static_cast<const State*>(in.data) + t * in.step_stride +
                          b * in.row_stride + unit * in.unit_stride;
#pragma unroll
      for (int part = 0; part < Arrays::kInputParts[i]; ++part) {
        visit(slot++, from + part * in.part_stride);
      }
    }
  }

  __device__ __forceinline__ static void LoadInputs(const RecurrentScanProblem& p, int64_t t,
                                                    int64_t b, int64_t unit, State* inputs) {
    ForEachInput(p, t, b, unit, [&](int slot, const State* from) { inputs[slot] = *from; });
  }

  __device__ __forceinline__ static void PrefetchInputs(const RecurrentScanProblem& p, int64_t t,
                                                        int64_t b, int64_t unit) {
    ForEachInput(p, t, b, unit, [](int, const State* from) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
    });
  }

  __device__ __forceinline__ static void StoreResults(const RecurrentScanProblem& p, int64_t t,
                                                      int64_t b, int64_t unit, const float* state,
                                                      const float* output) {
    const int64_t row = t * p.batch + b;
    auto* states = static_cast<State*>(p.states) + row * Step::kStates * p.hidden + unit;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) FromAccumulator(state[s], states + s * p.hidden);
    int slot = 0;
#pragma unroll
    for (int i = 0; i < Arrays::kOutputs; ++i) {
      auto* to =
          static_cast<State*>(p.outputs[i]) + row * Arrays::kOutputParts[i] * p.hidden + unit;
#pragma unroll
      for (int part = 0; part < Arrays::kOutputParts[i]; ++part) {
        FromAccumulator(output[slot++], to + part * p.hidden);
      }
    }
  }

  __device__ __forceinline__ static void LoadCarry(const RecurrentScanProblem& p, int64_t b,
                                                   int64_t unit, float* carry) {
#pragma unroll
    for (int k = 0; k < Step::kCarries; ++k) carry[k] = p.initial_carry[k][b * p.hidden + unit];
  }

  __device__ __forceinline__ static void StoreCarry(const RecurrentScanProblem& p, int64_t b,
                                                    int64_t unit, const float* carry) {
#pragma unroll
    for (int k = 0; k < Step::kCarries; ++k) p.final_carry[k][b * p.hidden + unit] = carry[k];
  }
};

}  // namespace jaxsparse
