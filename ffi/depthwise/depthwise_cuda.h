// The CUDA variants of depthwise convolutions and their transposes, each defined with its kernel in
// kernels/.
#pragma once

#include "depthwise/problem.h"
#include "host/variant.h"

namespace jaxsparse {

// kernels/depthwise_planes.cc
extern const CudaVariant<DepthwiseProblem> kDepthwisePlanes;
extern const CudaVariant<DepthwiseProblem> kDepthwiseInputPlanes;
// kernels/depthwise_staged.cc
extern const CudaVariant<DepthwiseProblem> kDepthwiseStaged;
extern const CudaVariant<DepthwiseProblem> kDepthwiseInputStaged;
// kernels/depthwise_sums.cc
extern const CudaVariant<DepthwiseProblem> kDepthwiseSums;

}  // namespace jaxsparse
