// Where the cells of a thread lie in the arrays of a scan (arrays.cuh), moved on from step to step.
// A step adds to each address, where ScanArrays multiplies by strides: for kernels whose steps are
// so short that the multiplications would be felt. The cells of a thread lie at the same distances
// from its first one in all threads, so that an array takes one address.
//
// Plan, besides what arrays.cuh says:
//   kSizes.cells   of a thread
//   kSizes.near    of them, one after the other, are neighbouring units of a batch entry, which are
//                  read and written together
//   kSizes.EntryFromFirst(cell), kSizes.UnitFromFirst(cell)   those distances
#pragma once

#include "recurrent/arrays.cuh"

namespace jaxsparse {

// What a step reads is brought to the L2 cache so many steps before.
constexpr int kStepsToCache = 8;

// The batch entry of a scan and the unit of a thread's first cell, and its warp's first unit.
struct CellPlace {
  int entry, unit, warp_unit;
};

// What a step reads.
template <typename Step, typename Plan>
class InputCursor {
  using State = typename Plan::State;
  using Arrays = typename Plan::Arrays;
  static constexpr int kArrays = Arrays::kInputs > 0 ? Arrays::kInputs : 1;
  static constexpr int kCells = Plan::kSizes.cells, kNear = Plan::kSizes.near;
  using NearArrays = ScanArrays<Step, Plan, kNear>;

 public:
  // What a step reads for the cells of a thread, as it lies in memory.
  using Words = uint32_t[kCells / kNear][NearArrays::kInputWords];

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
      // Each of the 8 lanes with the same batch entries brings another part, of all of the warp's
      // units: these have a line of the cache to themselves, or share it.
      const int g = static_cast<int>(threadIdx.x) % kWarp / 4;
      const int part = g < Arrays::kInputParts[i] ? g : 0;
      cached_at_[i] =
          at_[i] +
          (part * in.part_stride - (first.unit - first.warp_unit) * in.unit_stride) * SizeOf(i);
      const int64_t steps = kStepsToCache < p.steps ? kStepsToCache : p.steps - 1;
      cached_at_[i] += steps * step_bytes_[i];
    }
  }

  // Brings what a step reads to the cache, kStepsToCache after the first one; then goes on by a
  // step if there is one.
  template <typename IsReal>
  __device__ __forceinline__ void Prefetch(bool goes_on, IsReal is_real) {
#pragma unroll
    for (int i = 0; i < Arrays::kInputs; ++i) PrefetchOf(i, goes_on, is_real);
  }
  template <typename IsReal>
  __device__ __forceinline__ void PrefetchOf(int input, bool goes_on, IsReal is_real) {
#pragma unroll
    for (int c = 0; c < kCells; ++c) {
      if (Plan::kSizes.UnitFromFirst(c) == 0 && is_real(c)) {
        PrefetchToL2(cached_at_[input] + FromFirst(p_.inputs[input], c) * SizeOf(input));
      }
    }
    if (goes_on) cached_at_[input] += step_bytes_[input];
  }

  // What a step reads for the cells for which is_real(cell), or is_real of the first of neighbours;
  // then goes on by a step if there is one. Not a loop over the arrays, as in
  // ScanArrays::LoadInputs.
  template <int kInput = 0, typename IsReal>
  __device__ __forceinline__ void Load(bool goes_on, IsReal is_real, Words& to) {
    if constexpr (kInput < Arrays::kInputs) {
      const ScanInput& in = p_.inputs[kInput];
      const auto load_all = [&](auto load) {
#pragma unroll
        for (int c = 0; c < kCells; c += kNear) {
          if (!is_real(c)) continue;
          load(at_[kInput] + FromFirst(in, c) * SizeOf(kInput),
               to[c / kNear] + NearArrays::WordsBefore(kInput));
        }
      };
      // One branch for all cells.
      if (NearArrays::LiesTogether(in)) {
        load_all([&](const char* from, uint32_t* words) {
          NearArrays::template LoadTogether<kInput>(in, from, words);
        });
      } else if (Repeats(kInput)) {
        load_all([&](const char* from, uint32_t* words) {
          NearArrays::template LoadRepeated<kInput>(in, from, words);
        });
      } else {
        load_all([&](const char* from, uint32_t* words) {
          NearArrays::template LoadApart<kInput>(in, from, words);
        });
      }
      if (goes_on) at_[kInput] += step_bytes_[kInput];
      Load<kInput + 1>(goes_on, is_real, to);
    }
  }

  // As ScanArrays::ConvertInputs, of what was loaded for a cell and its neighbours.
  __device__ __forceinline__ void Convert(const uint32_t* words, int i, float* to) const {
    NearArrays::ConvertInputs(words, i, to, [&](int input) { return Repeats(input); });
  }

 private:
  // Whether neighbours have one value, which then lies alone in their words: a step would wait for
  // it to make pairs.
  __device__ __forceinline__ bool Repeats(int input) const {
    return kNear > 1 && p_.inputs[input].unit_stride == 0;
  }

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
  static constexpr int kNear = Plan::kSizes.near;
  using NearArrays = ScanArrays<Step, Plan, kNear>;
  static constexpr int64_t kHidden = Plan::kSizes.hidden;

 public:
  __device__ __forceinline__ ResultCursor(const RecurrentScanProblem& p, CellPlace first)
      : p_(p), step_rows_(IsReversed<Plan>(p) ? -p.batch : p.batch) {
    const int64_t step = DirectionOf<Plan>(p) * p.steps + ScanArrays<Step, Plan>::TimeOf(p, 0);
    const int64_t row = step * p.batch + EntryOfBatch<Plan>(p, first.entry);
    states_ = static_cast<State*>(p.states) + row * kStatesOfRow + first.unit;
#pragma unroll
    for (int i = 0; i < Arrays::kOutputs; ++i) {
      const int64_t at = row * Arrays::kOutputParts[i] * kHidden + first.unit;
      outputs_[i] = static_cast<char*>(p.outputs[i]) + at * SizeOf(i);
    }
  }

  // Of a cell and its neighbours.
  __device__ __forceinline__ void Store(int c, const float (*state)[Step::kStates],
                                        const float (*output)[NearArrays::kOutputSlots]) const {
    const int64_t entry = Plan::kSizes.EntryFromFirst(c), unit = Plan::kSizes.UnitFromFirst(c);
#pragma unroll
    for (int s = 0; s < Step::kStates; ++s) {
      NearArrays::StoreValues(state, s, p_.states,
                              states_ + entry * kStatesOfRow + s * kHidden + unit);
    }
    int slot = 0;
#pragma unroll
    for (int i = 0; i < Arrays::kOutputs; ++i) {
#pragma unroll
      for (int part = 0; part < Arrays::kOutputParts[i]; ++part, ++slot) {
        const int64_t from_first = (entry * Arrays::kOutputParts[i] + part) * kHidden + unit;
        char* at = outputs_[i] + from_first * SizeOf(i);
        if (Arrays::kOutputIsFloat[i]) {
          NearArrays::StoreValues(output, slot, p_.outputs[i], reinterpret_cast<float*>(at));
        } else {
          NearArrays::StoreValues(output, slot, p_.outputs[i], reinterpret_cast<State*>(at));
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

  const RecurrentScanProblem& p_;
  const int64_t step_rows_;
  State* states_;
  char* outputs_[kArrays];
};

}  // namespace jaxsparse
