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

// kNear neighbouring units of a batch entry are read and written together.
template <typename Step, typename Plan, int kNear = 1>
struct ScanArrays {
  using State = typename Plan::State;
  using Arrays = typename Plan::Arrays;

  // Arrays of a step that has no such values still need one element.
  static constexpr int kInputSlots = Step::kInputs > 0 ? Step::kInputs : 1;
  static constexpr int kOutputSlots = Step::kOutputs > 0 ? Step::kOutputs : 1;
  static constexpr int kCarrySlots = Step::kCarries > 0 ? Step::kCarries : 1;

  // Words that hold kNear values of an array as they lie in memory.
  static constexpr int WordsOf(bool is_float) {
    return is_float || sizeof(State) == 4 ? kNear : (kNear + 1) / 2;
  }
  // Words of the inputs before one.
  static constexpr int WordsBefore(int input) {
    int words = 0;
    for (int i = 0; i < input; ++i) {
      words += Arrays::kInputParts[i] * WordsOf(Arrays::kInputIsFloat[i]);
    }
    return words;
  }
  static constexpr int kInputWords =
      WordsBefore(Arrays::kInputs) > 0 ? WordsBefore(Arrays::kInputs) : 1;

  __device__ __forceinline__ static int64_t TimeOf(const RecurrentScanProblem& p, int64_t step) {
    return IsReversed<Plan>(p) ? p.steps - 1 - step : step;
  }

  // Not a loop over the arrays, in which the compiler would keep the one over an array's parts as a
  // loop, and wait for each load. `again`: what is the same in every step is there already.
  template <int kInput = 0>
  __device__ __forceinline__ static void LoadInputs(const RecurrentScanProblem& p, int64_t t,
                                                    int64_t b, int64_t unit, uint32_t* inputs,
                                                    bool again = false) {
    if constexpr (kInput < Arrays::kInputs) {
      if (!again || p.inputs[kInput].step_stride != 0) {
        LoadInput<kInput>(p, t, b, unit, inputs + WordsBefore(kInput));
      }
      LoadInputs<kInput + 1>(p, t, b, unit, inputs, again);
    }
  }

  // Of the neighbour with number `i`.
  __device__ __forceinline__ static void ConvertInputs(const uint32_t* inputs, int i, float* to) {
    ConvertInputs(inputs, i, to, [](int) { return false; });
  }
  // `repeats(input)`: whether LoadRepeated has brought it.
  template <typename Repeats>
  __device__ __forceinline__ static void ConvertInputs(const uint32_t* inputs, int i, float* to,
                                                       Repeats repeats) {
    int slot = 0, word = 0;
#pragma unroll
    for (int in = 0; in < Arrays::kInputs; ++in) {
#pragma unroll
      for (int part = 0; part < Arrays::kInputParts[in]; ++part, ++slot) {
        to[slot] = Arrays::kInputIsFloat[in] ? __uint_as_float(inputs[word + i])
                                             : FromWords(State(), inputs + word, i, repeats(in));
        word += WordsOf(Arrays::kInputIsFloat[in]);
      }
    }
  }

  // Ways to load kNear neighbours of all parts of an input, as they lie in memory: a conversion
  // would wait for the load. First, where they lie side by side at a place for wide loads.
  __device__ __forceinline__ static bool LiesTogether(const ScanInput& in) {
    return kNear > 1 && in.unit_stride == 1 && IsAligned(in.data);
  }
  template <int kInput>
  __device__ __forceinline__ static void LoadTogether(const ScanInput& in, const char* from,
                                                      uint32_t* to) {
#pragma unroll
    for (int part = 0; part < Arrays::kInputParts[kInput]; ++part) {
      LoadWords<kWords<kInput>>(from + part * in.part_stride * kSize<kInput>,
                                to + part * kWords<kInput>);
    }
  }
  // One value, alone in each word.
  template <int kInput>
  __device__ __forceinline__ static void LoadRepeated(const ScanInput& in, const char* from,
                                                      uint32_t* to) {
#pragma unroll
    for (int part = 0; part < Arrays::kInputParts[kInput]; ++part) {
#pragma unroll
      for (int i = 0; i < kWords<kInput>; ++i) {
        to[part * kWords<kInput> + i] =
            LoadValue<kInput>(from + part * in.part_stride * kSize<kInput>);
      }
    }
  }
  // Any others.
  template <int kInput>
  __device__ __forceinline__ static void LoadApart(const ScanInput& in, const char* from,
                                                   uint32_t* to) {
    constexpr int kParts = Arrays::kInputParts[kInput];
    uint32_t values[kParts][kNear];
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kNear; ++i) {
        values[part][i] =
            LoadValue<kInput>(from + (part * in.part_stride + i * in.unit_stride) * kSize<kInput>);
      }
    }
    // All loads are on their way: the first pair waits for them together.
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < kWords<kInput>; ++i) {
        to[part * kWords<kInput> + i] = kWords<kInput> == kNear
                                            ? values[part][i]
                                            : values[part][2 * i] | values[part][2 * i + 1] << 16;
      }
    }
  }

  // Not what is the same in every step: where all units and layers read one value, such as zeros,
  // all of their prefetches would queue at one line of the cache.
  template <int kInput = 0>
  __device__ __forceinline__ static void PrefetchInputs(const RecurrentScanProblem& p, int64_t t,
                                                        int64_t b, int64_t unit) {
    if constexpr (kInput < Arrays::kInputs) {
      const ScanInput& in = p.inputs[kInput];
      if (in.step_stride != 0) {
        const char* from = AddressOf<kInput>(p, t, b, unit);
#pragma unroll
        for (int part = 0; part < Arrays::kInputParts[kInput]; ++part) {
          PrefetchToL2(from + part * in.part_stride * kSize<kInput>);
        }
      }
      PrefetchInputs<kInput + 1>(p, t, b, unit);
    }
  }

  // Of kNear neighbours.
  __device__ __forceinline__ static void StoreResults(const RecurrentScanProblem& p, int64_t t,
                                                      int64_t b, int64_t unit,
                                                      const float (*state)[Step::kStates],
                                                      const float (*output)[kOutputSlots]) {
    const int64_t step = DirectionOf<Plan>(p) * p.steps + t;
    const int64_t row = step * p.batch + EntryOfBatch<Plan>(p, b);
    auto* states = static_cast<State*>(p.states) + row * Step::kStates * p.hidden + unit;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) {
      StoreValues(state, s, p.states, states + s * p.hidden);
    }
    int slot = 0;
#pragma unroll
    for (int out = 0; out < Arrays::kOutputs; ++out) {
      const int64_t at = row * Arrays::kOutputParts[out] * p.hidden + unit;
#pragma unroll
      for (int part = 0; part < Arrays::kOutputParts[out]; ++part, ++slot) {
        if (Arrays::kOutputIsFloat[out]) {
          StoreValues(output, slot, p.outputs[out],
                      static_cast<float*>(p.outputs[out]) + at + part * p.hidden);
        } else {
          StoreValues(output, slot, p.outputs[out],
                      static_cast<State*>(p.outputs[out]) + at + part * p.hidden);
        }
      }
    }
  }

  // Value `number` of each of kNear neighbours, to a place of an array.
  template <typename T, int kCount>
  __device__ __forceinline__ static void StoreValues(const float (*values)[kCount], int number,
                                                     const void* array, T* to) {
    if constexpr (kNear > 1) {
      if (IsAligned(array)) {
        constexpr int kOfWord = 4 / sizeof(T);
        uint32_t words[kNear / kOfWord];
#pragma unroll
        for (int i = 0; i < kNear / kOfWord; ++i) {
          if constexpr (kOfWord == 1) words[i] = __float_as_uint(values[i][number]);
          else words[i] = PairOf(T(), values[2 * i][number], values[2 * i + 1][number]);
        }
        StoreWords(words, to);
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kNear; ++i) FromAccumulator(values[i][number], to + i);
  }

  // Before the first step.
  __device__ __forceinline__ static void LoadState(const RecurrentScanProblem& p, int64_t b,
                                                   int64_t unit, float* state) {
    const auto* from = static_cast<const State*>(p.initial_state) +
                       RowOf<Plan>(p, b) * Step::kStates * p.hidden + unit;
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) state[s] = ToAccumulator(from[s * p.hidden]);
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
  // Bytes of an input's value, and words of its kNear values.
  template <int kInput>
  static constexpr int64_t kSize =
      Arrays::kInputIsFloat[kInput] || sizeof(State) == 4 ? sizeof(float) : sizeof(State);
  template <int kInput>
  static constexpr int kWords = WordsOf(Arrays::kInputIsFloat[kInput]);

  template <int kInput>
  __device__ __forceinline__ static const char* AddressOf(const RecurrentScanProblem& p, int64_t t,
                                                          int64_t b, int64_t unit) {
    const ScanInput& in = p.inputs[kInput];
    const int64_t at = DirectionOf<Plan>(p) * in.direction_stride + t * in.step_stride +
                       EntryOfBatch<Plan>(p, b) * in.row_stride + unit * in.unit_stride;
    return static_cast<const char*>(in.data) + at * kSize<kInput>;
  }

  template <int kInput>
  __device__ __forceinline__ static void LoadInput(const RecurrentScanProblem& p, int64_t t,
                                                   int64_t b, int64_t unit, uint32_t* to) {
    const ScanInput& in = p.inputs[kInput];
    const char* from = AddressOf<kInput>(p, t, b, unit);
    if (LiesTogether(in)) {
      LoadTogether<kInput>(in, from, to);
    } else {
      LoadApart<kInput>(in, from, to);
    }
  }
  template <int kInput>
  __device__ __forceinline__ static uint32_t LoadValue(const char* from) {
    return kSize<kInput> == 4 ? *reinterpret_cast<const uint32_t*>(from)
                              : *reinterpret_cast<const uint16_t*>(from);
  }

  // Of an array's beginning: then so are all places of kNear units, whose number divides that of
  // the layer's units.
  __device__ __forceinline__ static bool IsAligned(const void* data) {
    return reinterpret_cast<uint64_t>(data) % 16 == 0;
  }

  template <int kWords>
  __device__ __forceinline__ static void LoadWords(const char* from, uint32_t* to) {
    if constexpr (kWords == 1) {
      to[0] = *reinterpret_cast<const uint32_t*>(from);
    } else if constexpr (kWords == 2) {
      const auto x = *reinterpret_cast<const Words2*>(from);
      to[0] = x.x, to[1] = x.y;
    } else {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        const auto x = *reinterpret_cast<const Words4*>(from + i * 4);
        to[i] = x.x, to[i + 1] = x.y, to[i + 2] = x.z, to[i + 3] = x.w;
      }
    }
  }

  __device__ __forceinline__ static void StoreWords(const uint32_t (&x)[1], void* to) {
    *static_cast<uint32_t*>(to) = x[0];
  }
  __device__ __forceinline__ static void StoreWords(const uint32_t (&x)[2], void* to) {
    *static_cast<Words2*>(to) = {x[0], x[1]};
  }
  __device__ __forceinline__ static void StoreWords(const uint32_t (&x)[4], void* to) {
    *static_cast<Words4*>(to) = {x[0], x[1], x[2], x[3]};
  }
  __device__ __forceinline__ static void StoreWords(const uint32_t (&x)[8], void* to) {
    static_cast<Words4*>(to)[0] = {x[0], x[1], x[2], x[3]};
    static_cast<Words4*>(to)[1] = {x[4], x[5], x[6], x[7]};
  }

  __device__ __forceinline__ static float FromWords(float, const uint32_t* words, int i, bool) {
    return __uint_as_float(words[i]);
  }
  template <typename Half>
  __device__ __forceinline__ static float FromWords(Half, const uint32_t* words, int i,
                                                    bool repeats) {
    const int half = repeats ? 0 : i % 2;
    return ToAccumulator(Half{static_cast<uint16_t>(words[i / 2] >> half * 16)});
  }
};

}  // namespace jaxsparse
