// What a graph scan reads and writes beside states and carries. How many arrays there are, and what
// they look like, is printed into the plan:
//
//   struct Arrays {
//     static constexpr int kInputs = ..., kOutputs = ...;  // arrays
//     static constexpr int kInputParts[] = {...}, kOutputParts[] = {...};
//     // float32, or else the state's dtype
//     static constexpr bool kInputIsFloat[] = {...}, kOutputIsFloat[] = {...};
//   };
#pragma once

#include "cuda/device.cuh"
#include "dynamic/problem.h"

namespace jaxsparse {

template <typename Step, typename Plan>
struct GraphArrays {
  using State = typename Plan::State;
  using Arrays = typename Plan::Arrays;

  // Arrays of a step that has no such values still need one element.
  static constexpr int kInputSlots = Step::kInputs > 0 ? Step::kInputs : 1;
  static constexpr int kOutputSlots = Step::kOutputs > 0 ? Step::kOutputs : 1;

  // Of one unit of a row, as they lie in memory: a conversion would wait for the load. Not a loop
  // over the arrays, in which the compiler would keep the one over an array's parts as a loop, and
  // wait for each load. `again`: what all rows read is there already.
  template <int kInput = 0, int kSlot = 0>
  __device__ __forceinline__ static void LoadInputs(const GraphScanProblem& p, int64_t row,
                                                    int64_t unit, uint32_t* to, bool again) {
    if constexpr (kInput < Arrays::kInputs) {
      const GraphInput& in = p.inputs[kInput];
      if (!again || in.row_stride != 0) {
        // In 32 bits, which all numbers have room in but the distance from the array's beginning.
        constexpr uint32_t kBytes = Arrays::kInputIsFloat[kInput] ? sizeof(float) : sizeof(State);
        const auto bytes_of = [](int64_t stride) { return static_cast<uint32_t>(stride) * kBytes; };
        const char* at = static_cast<const char*>(in.data) +
                         MultiplyWide(static_cast<uint32_t>(row), bytes_of(in.row_stride)) +
                         static_cast<uint32_t>(unit) * bytes_of(in.unit_stride);
#pragma unroll
        for (int part = 0; part < Arrays::kInputParts[kInput]; ++part) {
          to[kSlot + part] = LoadValue<kBytes>(at);
          at += bytes_of(in.part_stride);
        }
      }
      LoadInputs<kInput + 1, kSlot + Arrays::kInputParts[kInput]>(p, row, unit, to, again);
    }
  }

  __device__ __forceinline__ static void ConvertInputs(const uint32_t* inputs, float* to) {
    int slot = 0;
#pragma unroll
    for (int in = 0; in < Arrays::kInputs; ++in) {
#pragma unroll
      for (int part = 0; part < Arrays::kInputParts[in]; ++part, ++slot) {
        to[slot] = Arrays::kInputIsFloat[in] ? __uint_as_float(inputs[slot])
                                             : FromWord(State(), inputs[slot]);
      }
    }
  }

  __device__ __forceinline__ static void StoreOutputs(const GraphScanProblem& p, int64_t row,
                                                      int64_t unit, const float* outputs) {
    int slot = 0;
#pragma unroll
    for (int out = 0; out < Arrays::kOutputs; ++out) {
#pragma unroll
      for (int part = 0; part < Arrays::kOutputParts[out]; ++part, ++slot) {
        const int64_t at = (row * Arrays::kOutputParts[out] + part) * Plan::kSizes.hidden + unit;
        if constexpr (sizeof(State) == 4) {
          static_cast<float*>(p.outputs[out])[at] = outputs[slot];
        } else if (Arrays::kOutputIsFloat[out]) {
          static_cast<float*>(p.outputs[out])[at] = outputs[slot];
        } else {
          FromAccumulator(outputs[slot], static_cast<State*>(p.outputs[out]) + at);
        }
      }
    }
  }

  // Bytes of an output's row.
  __device__ __forceinline__ static int64_t OutputRowBytes(int out) {
    const int64_t values = int64_t{Arrays::kOutputParts[out]} * Plan::kSizes.hidden;
    return values * (Arrays::kOutputIsFloat[out] ? sizeof(float) : sizeof(State));
  }

 private:
  template <uint32_t kBytes>
  __device__ __forceinline__ static uint32_t LoadValue(const void* at) {
    if constexpr (kBytes == sizeof(float)) return *static_cast<const uint32_t*>(at);
    else return *static_cast<const uint16_t*>(at);
  }
  __device__ __forceinline__ static float FromWord(float, uint32_t word) {
    return __uint_as_float(word);
  }
  template <typename Half>
  __device__ __forceinline__ static float FromWord(Half, uint32_t word) {
    return ToAccumulator(Half{static_cast<uint16_t>(word)});
  }
};

}  // namespace jaxsparse
