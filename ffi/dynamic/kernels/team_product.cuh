// How the product warps of a block multiply: on tensor cores, or by exact multiply-adds.
#pragma once

#include "dynamic/kernels/team_fma.cuh"
#include "dynamic/kernels/team_mma.cuh"

namespace jaxsparse {

// By a block's part of a matrix.
template <bool kTensorCores, typename Plan, typename Matrix>
struct TeamProductOf {
  using type = TeamFma<Plan, Matrix>;
};
template <typename Plan, typename Matrix>
struct TeamProductOf<true, Plan, Matrix> {
  using type = TeamMma<Plan, Matrix>;
};
template <typename Plan, typename Matrix>
using TeamProduct = typename TeamProductOf<Plan::kSizes.tensor_cores, Plan, Matrix>::type;

}  // namespace jaxsparse
