// The tables of CUDA variants of depthwise convolutions and their transposes.
#include "depthwise/depthwise_cuda.h"

#include "depthwise/depthwise.h"

namespace jaxsparse {
namespace {

// Copies of constants, which are initialised before any code runs.
const CudaVariant<DepthwiseProblem> kForward[] = {kDepthwisePlanes, kDepthwiseStaged};
const CudaVariant<DepthwiseProblem> kInput[] = {kDepthwiseInputPlanes, kDepthwiseInputStaged};
const CudaVariant<DepthwiseProblem> kKernel[] = {kDepthwiseSums};

}  // namespace

extern constinit const Table<CudaVariant<DepthwiseProblem>> kDepthwiseCudaVariants =
    MakeTable(kForward);
extern constinit const Table<CudaVariant<DepthwiseProblem>> kDepthwiseInputCudaVariants =
    MakeTable(kInput);
extern constinit const Table<CudaVariant<DepthwiseProblem>> kDepthwiseKernelCudaVariants =
    MakeTable(kKernel);

}  // namespace jaxsparse
