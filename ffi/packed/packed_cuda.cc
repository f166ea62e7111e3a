// The table of CUDA variants of the product by a packed matrix; ties in the choice take its order.
#include "packed/packed_cuda.h"

#include "packed/packed.h"

namespace jaxsparse {
namespace {

// Copies of constants, which are initialised before any code runs.
const PackedVariant kVariants[] = {kPackedMma};

}  // namespace

extern constinit const Table<PackedVariant> kPackedCudaVariants = MakeTable(kVariants);

}  // namespace jaxsparse
