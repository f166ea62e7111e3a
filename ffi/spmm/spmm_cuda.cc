// The table of CUDA variants of the sparse-dense product; ties in the choice take its order.
#include "spmm/spmm_cuda.h"

#include "spmm/spmm.h"

namespace jaxsparse {
namespace {

// Copies of constants, which are initialised before any code runs.
const SpmmVariant kVariants[] = {
    kSpmmGenericRows,     kSpmmGenericDots,        kSpmmTiledRows,
    kSpmmTiledRowsScalar, kSpmmTiledRowsUnshared,  kSpmmTiledRowsUnordered,
    kSpmmTiledRowsRolled, kSpmmTiledRowsPrescaled, kSpmmStagedRows,
    kSpmmTensorCores,     kSpmmTensorCoresUnsplit, kSpmmTensorCoresSplitK,
    kSpmmSplitRows,
};

}  // namespace

extern constinit const Table<SpmmVariant> kSpmmCudaVariants = MakeTable(kVariants);

}  // namespace jaxsparse
