// How the product warps of a block multiply: on tensor cores, or by exact multiply-adds.
#pragma once

#include "dynamic/kernels/team_fma.cuh"
#include "dynamic/kernels/team_mma.cuh"

namespace jaxsparse {

// Loads: how tensor cores' weights are loaded, by the order of the matrix in memory.
template <bool kTensorCores, typename Plan, typename Loads>
struct TeamProductOf {
  using type = TeamFma<Plan>;
};
template <typename Plan, typename Loads>
struct TeamProductOf<true, Plan, Loads> {
  using type = TeamMma<Plan, Loads>;
};
template <typename Plan, typename Loads>
using TeamProduct = typename TeamProductOf<Plan::kSizes.tensor_cores, Plan, Loads>::type;

}  // namespace jaxsparse
