// The tables of CUDA variants of products by packed matrices, and of writing these out; ties in the
// choice take their order.
#include "packed/packed_cuda.h"

#include "packed/packed.h"

namespace jaxsparse {
namespace {

// Copies of constants, which are initialised before any code runs.
const PackedVariant kProducts[] = {kPackedMma, kPackedWgmma, kPackedGaps, kPackedGapsMma};
const PackedVariant kUnpackings[] = {kPackedUnpack, kPackedUnpackGaps};

}  // namespace

extern constinit const Table<PackedVariant> kPackedCudaVariants = MakeTable(kProducts);
extern constinit const Table<PackedVariant> kUnpackCudaVariants = MakeTable(kUnpackings);

}  // namespace jaxsparse
