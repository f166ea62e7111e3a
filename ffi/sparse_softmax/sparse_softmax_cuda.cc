// The table of CUDA variants of the softmax over stored entries.
#include "sparse_softmax/sparse_softmax_cuda.h"

#include "sparse_softmax/sparse_softmax.h"

namespace jaxsparse {
namespace {

// The rows are constant-initialised in their files, so they can be copied here at start-up, in
// whatever order files are initialised.
const CudaVariant<SparseSoftmaxProblem> kVariants[] = {
    kSparseSoftmaxGenericRows, kSparseSoftmaxRowsInRegisters, kSparseSoftmaxRunsOfRows};

}  // namespace

extern constinit const Table<CudaVariant<SparseSoftmaxProblem>> kSparseSoftmaxCudaVariants =
    MakeTable(kVariants);

}  // namespace jaxsparse
