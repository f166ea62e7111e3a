// CUDA variants of the softmax over stored entries: which kernel, and how it is launched.
#include <string>

#include "nvrtc/expression.h"
#include "sparse_softmax/sparse_softmax.h"

namespace jaxsparse {
namespace {

KernelSource Rows(const SparseSoftmaxProblem& p) {
  return {"sparse_softmax/sparse_softmax.cu", "jaxsparse::SparseSoftmaxRows<" + TypeName(p.dtype) +
                                                  (p.backward ? ", true>" : ", false>")};
}

// A warp a row, and one for the padding.
LaunchShape RowsShape(const SparseSoftmaxProblem& p) {
  const int64_t units = p.pattern.nse == 0 ? 0 : p.batch.count * (p.pattern.rows + 1);
  return {CeilDivide(units, kSoftmaxThreads / kWarp), kSoftmaxThreads};
}

// Lanes that own a row, and vectors of 16 bytes that each of them keeps.
struct Keeping {
  int lanes = 1;
  int runs = 1;
};

// Room for rows of twice the mean length, by few lanes as long as they have few vectors. Where
// those of a warp have no room for rows somewhat longer than the mean, by as few of a block as
// have.
Keeping KeepingOf(const SparseSoftmaxProblem& p) {
  constexpr int kFewRuns = 2, kMostRuns = 8, kMostLanes = 256;
  const int64_t vector = 16 / SizeOf(p.dtype);
  const auto vectors_of = [&](int64_t eighths) {  // of the mean length
    return CeilDivide(eighths * p.pattern.nse, 8 * (p.pattern.rows + 1) * vector) + 1;
  };
  Keeping keeping;
  while (keeping.lanes < kWarp && keeping.lanes * kFewRuns < vectors_of(16)) keeping.lanes *= 2;
  while (keeping.lanes < kMostLanes && keeping.lanes * kMostRuns < vectors_of(9)) {
    keeping.lanes *= 2;
  }
  while (keeping.runs < kMostRuns && keeping.lanes * keeping.runs < vectors_of(16)) {
    keeping.runs *= 2;
  }
  return keeping;
}

KernelSource Kept(const SparseSoftmaxProblem& p) {
  const Keeping keeping = KeepingOf(p);
  return {"sparse_softmax/sparse_softmax_kept.cu",
          "jaxsparse::SparseSoftmaxKept<" + TypeName(p.dtype) +
              (p.backward ? ", true, " : ", false, ") + std::to_string(keeping.lanes) + ", " +
              std::to_string(keeping.runs) + ">"};
}

LaunchShape KeptShape(const SparseSoftmaxProblem& p) {
  if (p.pattern.nse == 0) return {0, kSoftmaxThreads};
  const int lanes = KeepingOf(p).lanes, threads = SoftmaxKeptThreads(lanes);
  const int rows = lanes < kWarp ? kWarp / lanes : 1;            // of an owner
  const int owners = threads / (lanes < kWarp ? kWarp : lanes);  // of a block
  const int64_t of_entry = CeilDivide(p.pattern.rows, rows);
  const int64_t all = p.batch.count * (of_entry > 0 ? of_entry : 1);  // one for padding alone
  return {CeilDivide(all, owners), threads};
}

// Microseconds on an H200, fitted to 3 problems of float32: 0.1, 0.3 and 7 million entries. So rows
// are always kept, unless the other kernel is asked for.
double Cost(const SparseSoftmaxProblem& p, double start, double of_entry) {
  return start + of_entry * static_cast<double>(p.batch.count * p.pattern.nse);
}

constexpr CudaVariant<SparseSoftmaxProblem> kVariants[] = {
    {"generic_rows", [](const SparseSoftmaxProblem&) { return true; },
     [](const SparseSoftmaxProblem& p) { return Cost(p, 4.2, 3e-6); }, Rows, RowsShape},
    {"kept_rows", [](const SparseSoftmaxProblem&) { return true; },
     [](const SparseSoftmaxProblem& p) { return Cost(p, 3.0, 2.3e-6); }, Kept, KeptShape},
};

}  // namespace

extern constinit const Table<CudaVariant<SparseSoftmaxProblem>> kSparseSoftmaxCudaVariants =
    MakeTable(kVariants);

}  // namespace jaxsparse
