// What scores become on their way to probabilities: a printed function of them, whose operands are
// read from memory by the axes that they are indexed by, and dropout of probabilities.
//
// A function is a struct that jaxsparse/ops/score_printer.py prints:
//
//   struct Score {
//     static constexpr bool kExists = true;
//     static constexpr int kOperands = 1;
//     static constexpr ScoreOperand kOperand[] = {{.by_head = true, .type = ScoreType::kFloat32}};
//     static constexpr int kGradients = 1;               // operands whose cotangents are wanted
//     static constexpr ScoreSums kSums[] = {ScoreSums::kByRow};  // what these are
//     template <typename Values> static float Apply(score, row, column, const Values& values);
//     template <typename Values>
//     static float Differentiate(score, row, column, const Values& values, float* derivative);
//     template <typename Values>                         // and its derivatives by these operands
//     static float DifferentiateAll(score, row, column, const Values& values, float* derivative,
//                                   float* gradients);
//   };
//
// in which values.template Number<0>() is what the first operand has there. Numbers are read where
// they are used; what does not change from one score to the next the compiler reads once.
#pragma once

#include "attention/kernels/batch_place.cuh"
#include "attention/kernels/dropout.cuh"
#include "attention/problem.h"
#include "cuda/pointwise.cuh"

namespace jaxsparse {

struct NoFunction {
  static constexpr bool kExists = false;
  static constexpr int kOperands = 0, kGradients = 0;
  static constexpr ScoreSums kSums[] = {{}};
};

// `kOffsets`: positions begin elsewhere than at 0.
template <typename FunctionOfScores, bool kDropsSome, bool kHasOffsets>
struct Scoring {
  using Function = FunctionOfScores;
  static constexpr bool kDrops = kDropsSome, kOffsets = kHasOffsets;
  static constexpr bool kExists = Function::kExists || kDrops;
};
using NoScoring = Scoring<NoFunction, false, false>;

// Whether a function reads operands that are not those of a head alone.
template <typename Function>
constexpr bool LoadsOfEachScore() {
  if constexpr (Function::kOperands > 0) {
    for (const ScoreOperand& operand : Function::kOperand) {
      if (operand.by_row || operand.by_column || operand.by_distance) return true;
    }
  }
  return false;
}

// The scores of a head of a batch entry.
template <typename Scoring>
class HeadScores {
  using Function = typename Scoring::Function;
  static constexpr int kOperands = Function::kOperands;

  const AttentionOperands& p_;
  uint32_t first_[kOperands > 0 ? kOperands : 1];  // elements in front of the head's
  int row_offset_ = 0, column_offset_ = 0;
  HeadDropout dropout_ = {};

  // What the function reads at a place of queries and keys; what lies beyond these reads something
  // within its operands. Of a distance the place is within, and not its row and its column: so a
  // compiler sees which scores of a thread have the same one.
  struct Values {
    const HeadScores& of;
    uint32_t row, column;

    template <int kOperand>
    __device__ __forceinline__ auto Number() const {
      constexpr ScoreOperand kHow = Function::kOperand[kOperand];
      const int64_t rows = of.p_.queries, columns = of.p_.keys;
      const auto keys = static_cast<uint32_t>(columns);
      uint32_t place = of.first_[kOperand];
      if constexpr (kHow.by_distance) place += Within(row - column + keys - 1, rows + columns - 1);
      if constexpr (kHow.by_row) place += Within(row, rows) * (kHow.by_column ? keys : 1);
      if constexpr (kHow.by_column) place += Within(column, columns);
      const void* data = of.p_.scores.values[kOperand].data;
      if constexpr (kHow.type == ScoreType::kFloat32) return static_cast<const float*>(data)[place];
      else if constexpr (kHow.type == ScoreType::kBFloat16)
        return ToAccumulator(static_cast<const bfloat16*>(data)[place]);
      else if constexpr (kHow.type == ScoreType::kFloat16)
        return ToAccumulator(static_cast<const float16*>(data)[place]);
      else if constexpr (kHow.type == ScoreType::kInt32)
        return static_cast<const int*>(data)[place];
      else if constexpr (kHow.type == ScoreType::kUint32)
        return static_cast<const unsigned*>(data)[place];
      else return static_cast<const unsigned char*>(data)[place] != 0;
    }
  };

  template <int kOperand>
  __device__ __forceinline__ void SetFirst(const BatchPlace& place, uint32_t head) {
    if constexpr (kOperand < kOperands) {
      constexpr ScoreOperand kHow = Function::kOperand[kOperand];
      const auto rows = static_cast<uint32_t>(p_.queries), keys = static_cast<uint32_t>(p_.keys);
      uint32_t of_head = kHow.by_distance ? rows + keys - 1 : 1;
      if (kHow.by_row) of_head *= rows;
      if (kHow.by_column) of_head *= keys;
      first_[kOperand] = place.ElementsBefore(p_.batch, p_.scores.values[kOperand]) +
                         (kHow.by_head ? head * of_head : 0);
      SetFirst<kOperand + 1>(place, head);
    }
  }

 public:
  __device__ __forceinline__ explicit HeadScores(const AttentionOperands& p) : p_(p) {}

  // `head`: of all of the batch entry.
  __device__ __forceinline__ void Set(const BatchPlace& place, uint32_t head) {
    if constexpr (Scoring::kExists) SetFirst<0>(place, head);
    if constexpr (Scoring::kOffsets) {
      const int* offsets = place.At<const int>(p_.batch, p_.scores.offsets);
      row_offset_ = offsets[0];
      column_offset_ = offsets[1];
    }
    if constexpr (Scoring::kDrops) {
      dropout_.Set(place.At<const uint32_t>(p_.batch, p_.scores.seeds)[head],
                   *place.At<const float>(p_.batch, p_.scores.dropout_rate));
    }
  }

  // The function of a product of a query and a key.
  __device__ __forceinline__ float Of(float product, uint32_t row, uint32_t column) const {
    const float score = product * static_cast<float>(p_.scale);
    const Values values{*this, row, column};
    return Function::Apply(score, static_cast<int>(row) + row_offset_,
                           static_cast<int>(column) + column_offset_, values);
  }
  // The same, and its derivative by the scaled product.
  __device__ __forceinline__ float Of(float product, uint32_t row, uint32_t column,
                                      float* derivative) const {
    const float score = product * static_cast<float>(p_.scale);
    const Values values{*this, row, column};
    return Function::Differentiate(score, static_cast<int>(row) + row_offset_,
                                   static_cast<int>(column) + column_offset_, values, derivative);
  }
  // The same, and its derivatives by operands whose cotangents are wanted.
  __device__ __forceinline__ float Of(float product, uint32_t row, uint32_t column,
                                      float* derivative, float* gradients) const {
    const float score = product * static_cast<float>(p_.scale);
    const Values values{*this, row, column};
    return Function::DifferentiateAll(score, static_cast<int>(row) + row_offset_,
                                      static_cast<int>(column) + column_offset_, values, derivative,
                                      gradients);
  }

  // By what probabilities that are kept are multiplied.
  __device__ __forceinline__ float KeptScale() const {
    return Scoring::kDrops ? dropout_.scale : 1.0f;
  }
  __device__ __forceinline__ uint32_t HashOfRow(uint32_t row) const {
    return dropout_.HashOfRow(static_cast<int>(row) + row_offset_);
  }
  __device__ __forceinline__ bool Keeps(uint32_t hash_of_row, uint32_t column) const {
    return dropout_.Keeps(hash_of_row, static_cast<int>(column) + column_offset_);
  }
  // Of an even column and the next one.
  __device__ __forceinline__ void KeepPair(uint32_t hash_of_row, uint32_t column,
                                           bool (&kept)[2]) const {
    if constexpr (Scoring::kOffsets) {
      kept[0] = Keeps(hash_of_row, column);
      kept[1] = Keeps(hash_of_row, column + 1);
    } else {
      const uint32_t hash = dropout_.HashOfPair(hash_of_row, static_cast<int>(column));
      kept[0] = dropout_.KeepsEven(hash);
      kept[1] = dropout_.KeepsOdd(hash);
    }
  }

  // Of numbers that a thread has of 16 rows, as tensor cores give them, from its first row and
  // column on: makes those 0 that are dropped, and multiplies the others.
  template <int kCount>
  __device__ __forceinline__ void DropPairs(uint32_t row, uint32_t column, float scale,
                                            float (&numbers)[kCount]) const {
    if constexpr (Scoring::kDrops) {
      const uint32_t hashes[] = {HashOfRow(row), HashOfRow(row + 8)};
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        bool kept[2];
        KeepPair(hashes[i / 2 % 2], column + i / 4 * 8, kept);
#pragma unroll
        for (int j = 0; j < 2; ++j) numbers[i + j] = kept[j] ? numbers[i + j] * scale : 0.0f;
      }
    }
  }
};

}  // namespace jaxsparse
