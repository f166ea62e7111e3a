// What CPU kernels of the sparse-dense product read, and how they end. Compiled once for each
// instruction set, as the kernels are.
#pragma once

#include "cpu/activation.h"
#include "cpu/pattern.h"
#include "spmm/problem.h"

namespace jaxsparse::JAXSPARSE_ISA {
namespace {

// The arrays of one batch entry.
template <typename T>
struct Matrices {
  const T* values;
  const int32_t* row_offsets;
  IndexReader column_indices;
  const int32_t* permutation;
  const T* x;
  const T* bias;
  OutWriter<T> out;
  OutWriter<T> preactivation;
  uint32_t columns, nse;

  JAXSPARSE_INLINE Matrices(const SpmmProblem& p, int64_t entry)
      : values(p.values.At<const T>(p.batch, entry)),
        row_offsets(p.pattern.row_offsets.At<const int32_t>(p.batch, entry)),
        column_indices(p.pattern, p.batch, entry),
        permutation(p.pattern.permutation.data == nullptr
                        ? nullptr
                        : p.pattern.permutation.At<const int32_t>(p.batch, entry)),
        x(p.x.At<const T>(p.batch, entry)),
        bias(p.bias.data == nullptr ? nullptr : p.bias.At<const T>(p.batch, entry)),
        out(p.out, p.out_dtype, p.batch, entry),
        preactivation(p.preactivation, p.out_dtype, p.batch, entry),
        columns(static_cast<uint32_t>(p.pattern.columns)),
        nse(static_cast<uint32_t>(p.pattern.nse)) {}

  // kLanes values of entries from `i` on, as accumulators.
  template <int kLanes, bool kPermuted>
  JAXSPARSE_INLINE auto Values(int64_t i) const {
    if constexpr (kPermuted) return Gather<kLanes>(values, nse, permutation + i);
    else return Load<kLanes>(values + i);
  }
};

// What is stored of sums that stand side by side in the result.
template <int kLanes, typename T, typename Acc>
JAXSPARSE_INLINE void Finish(const SpmmProblem& problem, const Matrices<T>& matrices,
                             Vector<Acc, kLanes> z, int64_t at) {
  matrices.preactivation.template Write<kLanes>(z, at);
  matrices.out.template Write<kLanes>(Activate<kLanes, Acc>(problem.activation, z), at);
}

}  // namespace
}  // namespace jaxsparse::JAXSPARSE_ISA
