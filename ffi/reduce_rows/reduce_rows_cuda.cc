// The table of CUDA variants of reductions of rows.
#include "reduce_rows/reduce_rows_cuda.h"

#include "reduce_rows/reduce_rows.h"

namespace jaxsparse {
namespace {

// The rows are constant-initialised in their files, so they can be copied here at start-up, in
// whatever order files are initialised.
const CudaVariant<ReduceRowsProblem> kVariants[] = {kReduceRowsByRows, kReduceRowsByRuns};

}  // namespace

extern constinit const Table<CudaVariant<ReduceRowsProblem>> kReduceRowsCudaVariants =
    MakeTable(kVariants);

}  // namespace jaxsparse
