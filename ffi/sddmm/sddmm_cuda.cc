// The table of CUDA variants of the sampled dense-dense product.
#include "sddmm/sddmm_cuda.h"

#include "sddmm/sddmm.h"

namespace jaxsparse {
namespace {

// The rows are constant-initialised in their files, so they can be copied here at start-up, in
// whatever order files are initialised.
const CudaVariant<SddmmProblem> kVariants[] = {
    kSddmmGenericEntries,         kSddmmTiledEntries,  kSddmmTiledEntriesScalar,
    kSddmmTiledEntriesUnbalanced, kSddmmStagedEntries, kSddmmTensorCores,
};

}  // namespace

extern constinit const Table<CudaVariant<SddmmProblem>> kSddmmCudaVariants = MakeTable(kVariants);

}  // namespace jaxsparse
