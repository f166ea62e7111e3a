// Steps of a matrix that is packed by gaps (packed/problem.h): how they come from memory, and how
// their numbers become float32, exactly. Those of 8 bits come without the scales of their rows.
#pragma once

#include "cuda/vector_access.cuh"
#include "packed/kernels/lane_bytes.cuh"
#include "packed/kernels/packed_gaps.h"

namespace jaxsparse {

// Where a step's numbers stand, and what they are.
template <PackedNumbers kNumbers>
struct GapStep {
  static constexpr int kWords = GapNumberWords(kNumbers);
  uint32_t numbers[kWords];
  uint32_t gaps;

  // The numbers of a round, one of each stream, as a pair of T over PairOfBytes' factor.
  template <typename T>
  __device__ __forceinline__ uint32_t PairAt(int round) const {
    if constexpr (kNumbers == PackedNumbers::kPlain) {
      return numbers[round];
    } else {
      const uint32_t places = round % 2 == 0 ? 0x4140u : 0x4342u;
      return PairOfBytes<T, kNumbers>::Make(PickBytes(numbers[round / 2], places));
    }
  }

  // Number e in float32, where those of 16 bits are of type T. `power` has the bits of 2^23.
  template <typename T, bool kConverts = kConvertsE4M3>
  __device__ __forceinline__ float NumberAt(int e, uint32_t power) const {
    constexpr int kOfWord = NumbersOfWord(kNumbers);
    const uint32_t word = numbers[e / kOfWord];
    const int i = e % kOfWord;
    if constexpr (kNumbers == PackedNumbers::kPlain) {
      return NumberOfHalf(T(), word, i == 1);
    } else if constexpr (kNumbers == PackedNumbers::kInt8) {
      // u = number + 128, put below the bits of 2^23, gives 2^23 + u.
      const uint32_t bits = PickBytes(word ^ 0x80808080u, power, 0x7440u + i);
      return __uint_as_float(bits) - (8388608.0f + 128.0f);
    } else if constexpr (kConverts) {
      const auto bytes = static_cast<uint16_t>(i < 2 ? word : word >> 16);
      return NumberOfHalf(float16(), HalvesOfE4M3(bytes), i % 2 == 1);
    } else {
      const uint32_t bytes = PickBytes(word, i < 2 ? 0x4140u : 0x4342u);
      return NumberOfHalf(float16(), PairOfBytes<float16, kNumbers>::Make(bytes), i % 2 == 1);
    }
  }
};

// A piece's steps as they come from memory.
template <PackedNumbers kNumbers>
class GapSteps {
  using Words = Vector<uint32_t, GapNumberWords(kNumbers)>;
  const Words* numbers_;  // the lane's, of the next step
  const uint32_t* gaps_;
  uint32_t left_;

 public:
  __device__ GapSteps(const PackedProblem& p, int64_t piece, bool exists) {
    const int32_t* starts = static_cast<const int32_t*>(p.starts.data) + (exists ? piece : 0);
    const uint32_t begin = RowBounds::Clamp(starts[0], p.words);
    const uint32_t end = exists ? RowBounds::Clamp(starts[1], p.words) : begin;
    const int64_t first = int64_t{begin} * kWarp + threadIdx.x % kWarp;
    left_ = end > begin ? end - begin : 0;
    numbers_ = static_cast<const Words*>(p.values.data) + first;
    gaps_ = static_cast<const uint32_t*>(p.masks.data) + first;
  }
  __device__ __forceinline__ bool Exists(uint32_t step) const { return step < left_; }
  __device__ __forceinline__ void Load(int step, GapStep<kNumbers>* to) const {
    if (!Exists(step)) return;
    LoadOnce(numbers_[step * kWarp].elements, to->numbers);
    to->gaps = LoadOnce(gaps_ + step * kWarp);
  }
  // Behind so many steps, all of which exist.
  __device__ __forceinline__ void Advance(int steps) {
    numbers_ += steps * kWarp;
    gaps_ += steps * kWarp;
    left_ -= steps;
  }
};

// Calls add(step) for all steps in turn; `ahead` has the first ones. ptxas gives all loads of steps
// one scoreboard: a wait for one of them is a wait for all. So half of the steps are asked for at
// once, behind the first step of the other half, and have the time that its other steps take.
template <PackedNumbers kNumbers, int kAhead, typename Add>
__device__ __forceinline__ void ForEachStep(GapSteps<kNumbers> steps,
                                            GapStep<kNumbers> (&ahead)[kAhead], const Add& add) {
  constexpr int kHalf = kAhead / 2;
  bool has_second_half = true;
#pragma unroll 1
  for (;; steps.Advance(kAhead)) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (!steps.Exists(i)) return;
      add(ahead[i]);
      if (i == 0 && !has_second_half) {
#pragma unroll
        for (int j = kHalf; j < kAhead; ++j) steps.Load(j, &ahead[j]);
      }
      if (i == kHalf) {
#pragma unroll
        for (int j = 0; j < kHalf; ++j) steps.Load(j + kAhead, &ahead[j]);
      }
    }
    has_second_half = false;
  }
}

// Has the L2 cache fetch steps while it is not known yet where a piece begins: from where it would
// begin if all pieces had as many. Most of these steps are other pieces', which are read soon.
template <PackedNumbers kNumbers, int kSteps>
__device__ __forceinline__ void PrefetchSteps(const PackedGapsProblem& p, uint32_t piece) {
  constexpr int kLine = 128, kStep = kWarp * 4 * GapNumberWords(kNumbers);
  constexpr int kLines = kSteps * kStep / kLine;
  const uint64_t begin = MultiplyWide(piece, p.steps) / PackedGapsProblem::kMeanSteps;
  const uint32_t lane = threadIdx.x % kWarp;
  if (begin + kSteps > static_cast<uint64_t>(p.words)) return;
  const char* numbers = static_cast<const char*>(p.values.data) + begin * kStep;
#pragma unroll
  for (uint32_t line = lane; line < kLines; line += kWarp) PrefetchToL2(numbers + line * kLine);
  const char* gaps = static_cast<const char*>(p.masks.data) + begin * kWarp * 4;
  if (lane < kSteps) PrefetchToL2(gaps + lane * kLine);
}

}  // namespace jaxsparse
