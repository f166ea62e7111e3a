// CUDA variants of the sampled dense-dense product: which kernel, and how it is launched.
#include "nvrtc/type_names.h"
#include "sddmm/sddmm.h"

namespace jaxsparse {
namespace {

KernelSource Entries(const SddmmProblem& p) {
  return {"sddmm/sddmm.cu", "jaxsparse::SddmmEntries<" + TypeName(p.dtype) + ", " +
                                TypeName(p.out_dtype) + ", " + TypeName(p.pattern.index_type) +
                                ">"};
}

LaunchShape EntriesShape(const SddmmProblem& p) {
  const int64_t groups = p.batch.count * CeilDivide(p.pattern.nse, SddmmRun(p));
  return {CeilDivide(groups, kSddmmThreads / LanesFor(p.d)), kSddmmThreads};
}

constexpr CudaVariant<SddmmProblem> kVariants[] = {
    {"generic_entries", [](const SddmmProblem&) { return true; },
     [](const SddmmProblem&) { return 1.0; }, Entries, EntriesShape},
};

}  // namespace

extern constinit const Table<CudaVariant<SddmmProblem>> kSddmmCudaVariants = MakeTable(kVariants);

}  // namespace jaxsparse
