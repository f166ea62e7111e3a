// What a graph scan reads and writes beside states and carries. How many arrays there are, and what
// they look like, is printed into the plan:
//
//   struct Arrays {
//     static constexpr int kInputs = ..., kOutputs = ...;  // arrays
//     static constexpr int kInputParts[] = {...}, kOutputParts[] = {...};
//     // float32, or else the state's dtype
//     static constexpr bool kInputIsFloat[] = {...}, kOutputIsFloat[] = {...};
//   };
//   // Each row has values of its own, or else all rows read the same ones; and each unit.
//   static constexpr bool kInputIsOfRow[] = {...}, kInputIsOfUnit[] = {...};
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
  // wait for each load. `again`: what all rows read is there.
  template <int kInput = 0, int kSlot = 0>
  __device__ __forceinline__ static void LoadInputs(const GraphScanProblem& p, int64_t row,
                                                    int64_t unit, uint32_t* to, bool again) {
    if constexpr (kInput < Arrays::kInputs) {
      if (!again || Plan::kInputIsOfRow[kInput]) {
        constexpr uint32_t kBytes = Arrays::kInputIsFloat[kInput] ? sizeof(float) : sizeof(State);
        constexpr bool kIsOfUnit = Plan::kInputIsOfUnit[kInput];
        constexpr uint32_t kPartBytes = (kIsOfUnit ? Plan::kSizes.hidden : 1) * kBytes;
        const char* at = static_cast<const char*>(p.inputs[kInput]);
        if constexpr (kIsOfUnit) at += static_cast<uint32_t>(unit) * kBytes;
        if constexpr (Plan::kInputIsOfRow[kInput]) {
          at += MultiplyWide(static_cast<uint32_t>(row), Arrays::kInputParts[kInput] * kPartBytes);
        }
#pragma unroll
        for (int part = 0; part < Arrays::kInputParts[kInput]; ++part) {
          to[kSlot + part] = LoadValue<kBytes>(at + part * kPartBytes);
        }
      }
      LoadInputs<kInput + 1, kSlot + Arrays::kInputParts[kInput]>(p, row, unit, to, again);
    }
  }

  // `kOnlyOfRows`: what all rows read is a float already.
  template <bool kOnlyOfRows = false>
  __device__ __forceinline__ static void ConvertInputs(const uint32_t* inputs, float* to) {
    int slot = 0;
#pragma unroll
    for (int in = 0; in < Arrays::kInputs; ++in) {
      const bool is_float = Arrays::kInputIsFloat[in] || (kOnlyOfRows && !Plan::kInputIsOfRow[in]);
#pragma unroll
      for (int part = 0; part < Arrays::kInputParts[in]; ++part, ++slot) {
        to[slot] = is_float ? __uint_as_float(inputs[slot]) : FromWord(State(), inputs[slot]);
      }
    }
  }
  // Makes it that.
  __device__ __forceinline__ static void ConvertOfAllRows(uint32_t* inputs) {
    int slot = 0;
#pragma unroll
    for (int in = 0; in < Arrays::kInputs; ++in) {
#pragma unroll
      for (int part = 0; part < Arrays::kInputParts[in]; ++part, ++slot) {
        if (Arrays::kInputIsFloat[in] || Plan::kInputIsOfRow[in]) continue;
        inputs[slot] = __float_as_uint(FromWord(State(), inputs[slot]));
      }
    }
  }

  __device__ __forceinline__ static void StoreOutputs(const GraphScanProblem& p, int64_t row,
                                                      int64_t unit, const float* outputs) {
    int slot = 0;
#pragma unroll
    for (int out = 0; out < Arrays::kOutputs; ++out) {
      const auto bytes = static_cast<uint32_t>(OutputRowBytes(out));
      const auto part_bytes = static_cast<int>(bytes) / Arrays::kOutputParts[out];
      char* at = static_cast<char*>(p.outputs[out]) + unit * (part_bytes / Plan::kSizes.hidden) +
                 MultiplyWide(static_cast<uint32_t>(row), bytes);
#pragma unroll
      for (int part = 0; part < Arrays::kOutputParts[out]; ++part, ++slot, at += part_bytes) {
        if (sizeof(State) == 4 || Arrays::kOutputIsFloat[out]) {
          *reinterpret_cast<float*>(at) = outputs[slot];
        } else {
          FromAccumulator(outputs[slot], reinterpret_cast<State*>(at));
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
