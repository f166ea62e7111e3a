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

bool FitsTensorCores(const SddmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return p.dtype != DType::kFloat64 && p.pattern.nse < kMost && p.pattern.columns < kMost &&
         p.pattern.rows < kMost;
}

KernelSource TensorInstance(const SddmmProblem& p) {
  return {"sddmm/sddmm_tensor_cores.cu",
          "jaxsparse::SddmmTensorCores<" + TypeName(p.dtype) + ", " + TypeName(p.out_dtype) + ", " +
              TypeName(p.pattern.index_type) + ", " +
              (p.d <= kSddmmTensorKeptInner ? "true" : "false") + ">"};
}

LaunchShape TensorShape(const SddmmProblem& p) {
  const SddmmParts parts = SddmmPartsOf(p);
  const int planes = p.dtype == DType::kFloat32 ? 3 : 1;
  return {p.batch.count * parts.down * parts.across, kSddmmTensorThreads, SddmmSharedBytes(planes)};
}

// Nanoseconds on an H200, fitted to 20 problems in float32: positions 1024 x 1024 to 16384 x 4096,
// d 32 and 128, 10 and 30 % stored.
double EntriesCost(const SddmmProblem& p) {
  return static_cast<double>(p.pattern.nse) * (0.125 + 0.00063 * static_cast<double>(p.d));
}
double TensorCost(const SddmmProblem& p) {
  const double positions =
      static_cast<double>(p.pattern.rows) * static_cast<double>(p.pattern.columns);
  return positions * (0.0016 + 0.000036 * static_cast<double>(p.d)) +
         0.01 * static_cast<double>(p.pattern.nse);
}

constexpr CudaVariant<SddmmProblem> kVariants[] = {
    {"generic_entries", [](const SddmmProblem&) { return true; }, EntriesCost, Entries,
     EntriesShape},
    {"tensor_cores", FitsTensorCores, TensorCost, TensorInstance, TensorShape},
};

}  // namespace

extern constinit const Table<CudaVariant<SddmmProblem>> kSddmmCudaVariants = MakeTable(kVariants);

}  // namespace jaxsparse
