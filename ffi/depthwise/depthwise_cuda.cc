// The tables of CUDA variants of depthwise convolutions and their transposes.
#include "depthwise/depthwise.h"

namespace jaxsparse {

extern constinit const Table<CudaVariant<DepthwiseProblem>> kDepthwiseCudaVariants = {nullptr, 0};
extern constinit const Table<CudaVariant<DepthwiseProblem>> kDepthwiseInputCudaVariants = {nullptr,
                                                                                           0};
extern constinit const Table<CudaVariant<DepthwiseProblem>> kDepthwiseKernelCudaVariants = {nullptr,
                                                                                            0};

}  // namespace jaxsparse
