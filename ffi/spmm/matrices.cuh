// What the CUDA kernels of the sparse-dense product share: one batch entry's arrays, the epilogue.
#pragma once

#include "cuda/activation.cuh"
#include "cuda/vector_access.cuh"
#include "spmm/problem.h"

namespace jaxsparse {

// The result of one batch entry, and the epilogue that makes its elements.
template <typename T, typename Out>
struct ResultOfEntry {
  const T* bias;
  Out* out;
  Out* preactivation;

  __device__ void Write(Activation activation, int64_t row, int64_t at, Accumulator<T> z) const {
    if (bias != nullptr) z += ToAccumulator(bias[row]);
    if (preactivation != nullptr) FromAccumulator(z, &preactivation[at]);
    FromAccumulator(Activate(activation, z), &out[at]);
  }

  // Neighbouring columns of a row, by one store where their place allows it. If that is known
  // before, kAligned says so: compilers make four stores of one where there are two ways to write
  // the same.
  template <int kCount, bool kAligned = false>
  __device__ void WriteRun(Activation activation, int64_t row, int64_t at,
                           Accumulator<T> (&z)[kCount]) const {
    const Accumulator<T> b = bias == nullptr ? Accumulator<T>(0) : ToAccumulator(bias[row]);
    Vector<Out, kCount> before, after;
#pragma unroll
    for (int c = 0; c < kCount; ++c) {
      if (bias != nullptr) z[c] += b;
      FromAccumulator(z[c], &before.elements[c]);
      FromAccumulator(Activate(activation, z[c]), &after.elements[c]);
    }
    if constexpr (kAligned) {
      if (preactivation != nullptr) StoreWords(preactivation + at, before);
      StoreWords(out + at, after);
    } else {
      if (preactivation != nullptr) StoreVector(preactivation + at, before);
      StoreVector(out + at, after);
    }
  }
  template <int kCount>
  __device__ static void StoreWords(Out* to, const Vector<Out, kCount>& vector) {
    constexpr int kWords4 = sizeof(vector) / sizeof(Words4);
    if constexpr (kWords4 == 0) {
      *reinterpret_cast<Vector<Out, kCount>*>(to) = vector;
    } else {
#pragma unroll
      for (int w = 0; w < kWords4; ++w) {
        StoreGlobal(reinterpret_cast<Words4*>(to) + w, reinterpret_cast<const Words4*>(&vector)[w]);
      }
    }
  }
};

// The arrays of one batch entry.
template <typename T, typename Out, typename Index>
struct Matrices : ResultOfEntry<T, Out> {
  const Pattern& pattern;
  const T* values;
  const int32_t* row_offsets;
  const Index* column_indices;
  const int32_t* row_order;
  const int32_t* permutation;
  const T* x;

  __device__ Matrices(const SpmmProblem& p, int64_t entry)
      : ResultOfEntry<T, Out>{
            p.bias.data == nullptr ? nullptr : p.bias.At<const T>(p.batch, entry),
            p.out.At<Out>(p.batch, entry),
            p.preactivation.data == nullptr ? nullptr : p.preactivation.At<Out>(p.batch, entry)},
        pattern(p.pattern),
        values(p.values.At<const T>(p.batch, entry)),
        row_offsets(p.pattern.row_offsets.At<const int32_t>(p.batch, entry)),
        column_indices(p.pattern.column_indices.At<const Index>(p.batch, entry)),
        row_order(p.pattern.row_order.At<const int32_t>(p.batch, entry)),
        permutation(p.pattern.permutation.data == nullptr
                        ? nullptr
                        : p.pattern.permutation.At<const int32_t>(p.batch, entry)),
        x(p.x.At<const T>(p.batch, entry)) {}

  // Rows in the order of their lengths; columns and values of entries. There is none of them
  // outside the matrix, whatever indices say.
  __device__ uint32_t RowAt(int64_t place) const { return Within(row_order[place], pattern.rows); }
  __device__ uint32_t Column(int64_t i) const { return Within(column_indices[i], pattern.columns); }
  __device__ Accumulator<T> Value(int64_t i) const {
    return ToAccumulator(values[permutation == nullptr ? i : Within(permutation[i], pattern.nse)]);
  }
};

}  // namespace jaxsparse
