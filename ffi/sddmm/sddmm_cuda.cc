// CUDA variants of the sampled dense-dense product: which kernel, and how it is launched.
#include <string>

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

bool FitsTensorCores(const SddmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return p.dtype != DType::kFloat64 && p.pattern.nse < kMost && p.pattern.columns < kMost &&
         p.pattern.rows < kMost && p.gpu.compute_capability >= 80 &&
         TensorShape(p).shared_bytes <= p.gpu.shared_bytes;
}

// How y is staged, and the product cut into tiles.
struct Staging {
  int lanes;   // that take an entry
  int pieces;  // of 16 bytes of a lane
  int rows;    // of a warp
  int panel;   // rows of y
  int parts;   // of the columns

  int RowBytes() const;
};

// What variants differ in; see SddmmStaged.
struct StagingPlan {
  int stages;
  bool even;
};

constexpr StagingPlan kStaged{3, false}, kStagedEvenly{3, true}, kStagedInTwo{2, true};
constexpr int kStagedRowBytes = 2 << 10;  // of x, for each warp

int Staging::RowBytes() const { return lanes * pieces * 16; }

// Tiles of the same columns, whose rows are shared out evenly, or as many to each as go in.
int64_t StagedDown(const SddmmProblem& p, const StagingPlan& plan, const Staging& staging) {
  if (p.pattern.rows == 0) return 1;  // somebody writes the padding
  const int64_t down = CeilDivide(p.pattern.rows, kSddmmStagedWarps * staging.rows);
  return plan.even
             ? EvenTiles(p.batch.count * staging.parts, down, p.pattern.rows, p.gpu.multiprocessors)
             : down;
}

int64_t StagedTiles(const SddmmProblem& p, const StagingPlan& plan, const Staging& staging) {
  return p.batch.count * staging.parts * StagedDown(p, plan, staging);
}

// Clocks of the multiprocessor that has most to do, fitted to 37 problems of float32, 1024 x 1024
// to 24576 x 8192, d 32 and 128, 10 to 30 % stored.
double StagedClocks(const SddmmProblem& p, const StagingPlan& plan, const Staging& staging) {
  constexpr double kStart = 10550, kL2Bytes = 42;  // a clock and multiprocessor
  constexpr double kForVisit = 45.6;               // of a row, in a panel
  constexpr double kForTile = 3290, kForSearch = 2440;
  const double bytes = staging.RowBytes();
  const int64_t panels = CeilDivide(p.pattern.columns, staging.panel * staging.parts);
  const double inner = static_cast<double>(panels * staging.panel);  // rows of y for each tile
  const double rows = static_cast<double>(CeilDivide(p.pattern.rows, StagedDown(p, plan, staging)));
  const double mean =
      p.pattern.rows > 0 ? static_cast<double>(p.pattern.nse) / p.pattern.rows : 0;  // entries
  const double entry = 1.17 + bytes * 0.74 / 128;
  const double shared =
      rows * (mean / staging.parts * entry + static_cast<double>(panels) * kForVisit);
  const double l2 = inner * bytes / kL2Bytes;
  return static_cast<double>(CeilDivide(StagedTiles(p, plan, staging), p.gpu.multiprocessors)) *
             ((shared > l2 ? shared : l2) + kForTile + (staging.parts > 1 ? kForSearch : 0)) +
         kStart;
}

// The least clocks; among equals the most rows, for which y is read least often.
Staging StagingOf(const SddmmProblem& p, const StagingPlan& plan) {
  Staging best{2, 4, 0, 0, 1};
  while (best.RowBytes() < p.d * SizeOf(p.dtype)) {
    if (best.lanes < 8) best.lanes *= 2;
    else best.pieces *= 2;
  }
  best.panel = PanelRows(p.pattern.columns, kRingBytes / plan.stages / best.RowBytes());
  for (int parts = 1; parts <= 8; parts *= 2) {
    for (int rows = 1; rows <= 8 && rows * best.RowBytes() <= kStagedRowBytes; rows *= 2) {
      const Staging staging{best.lanes, best.pieces, rows, best.panel, parts};
      const double clocks = StagedClocks(p, plan, staging);
      const bool is_better = best.rows == 0 || clocks < StagedClocks(p, plan, best) ||
                             (parts == best.parts && clocks == StagedClocks(p, plan, best));
      if (is_better) best = staging;
    }
  }
  return best;
}

template <StagingPlan kPlan>
KernelSource StagedInstance(const SddmmProblem& p) {
  const Staging staging = StagingOf(p, kPlan);
  return {"sddmm/sddmm_staged.cu",
          "jaxsparse::SddmmStaged<" + TypeName(p.dtype) + ", " + TypeName(p.out_dtype) + ", " +
              TypeName(p.pattern.index_type) + ", " + std::to_string(staging.lanes) + ", " +
              std::to_string(staging.pieces) + ", " + std::to_string(staging.rows) + ", " +
              std::to_string(staging.panel) + ", " + std::to_string(kPlan.stages) + ", " +
              std::to_string(staging.parts) + (kPlan.even ? ", true>" : ", false>")};
}

template <StagingPlan kPlan>
LaunchShape StagedShape(const SddmmProblem& p) {
  const Staging staging = StagingOf(p, kPlan);
  const int64_t tiles = StagedTiles(p, kPlan, staging), blocks = p.gpu.multiprocessors;
  return {tiles < blocks ? tiles : blocks, kSddmmStagedThreads,
          SddmmStagedBytes(staging.RowBytes(), staging.rows, staging.panel, kPlan.stages)};
}

// Places of 32 bits; barriers that count copies. Panels are no smaller than 16 rows, or there is
// one.
template <StagingPlan kPlan>
bool FitsStaged(const SddmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t widest_row = p.dtype == DType::kFloat32 ? 1024 : 512;  // x stays in registers
  return p.dtype != DType::kFloat64 && p.d * SizeOf(p.dtype) <= widest_row &&
         p.pattern.nse < kMost && p.pattern.columns < kMost && p.pattern.rows < kMost &&
         p.batch.count < kMost / (p.pattern.rows + kWarp) &&
         p.batch.count * (p.pattern.rows / 16 + 1) < kMost / (p.pattern.columns / 16 + 1) &&
         p.gpu.compute_capability >= 90 && StagedShape<kPlan>(p).shared_bytes <= p.gpu.shared_bytes;
}

double EntriesCost(const SddmmProblem& p) {
  constexpr double kStart = 4;
  return kStart + static_cast<double>(p.batch.count * p.pattern.nse) *
                      (0.125e-3 + 0.63e-6 * static_cast<double>(p.d));
}

// Fitted to 49 problems in float32: positions 1024 x 1024 to 24576 x 8192, d 32 and 128, 10 to 30 %
// stored. With larger d, for which x is read again for each tile, it was not measured.
double TensorCost(const SddmmProblem& p) {
  if (p.d > kSddmmTensorKeptInner) return kOnDemand;
  constexpr double kStart = 6.5;
  const int64_t columns = SddmmPartsOf(p).columns;  // of a block
  const double block = static_cast<double>(
      kSddmmTensorRows * (columns < p.pattern.columns ? columns : p.pattern.columns));  // places
  const int64_t at_once = 2 * p.gpu.multiprocessors;
  const double places =
      static_cast<double>(CeilDivide(TensorShape(p).blocks, at_once) * at_once) * block;
  return kStart + places * (0.8e-6 + 0.0325e-6 * static_cast<double>(p.d)) +
         8.7e-6 * static_cast<double>(p.batch.count * p.pattern.nse);
}

// Where rows of y are not aligned they come number by number, which was not measured.
double StagedCost(const SddmmProblem& p) {
  if (p.d * SizeOf(p.dtype) % 16 != 0) return kOnDemand;
  return StagedClocks(p, kStaged, StagingOf(p, kStaged)) / kClocksOfMicrosecond;
}

constexpr CudaVariant<SddmmProblem> kVariants[] = {
    {"generic_entries", [](const SddmmProblem&) { return true; }, EntriesCost, Entries,
     EntriesShape},
    {"staged_entries", FitsStaged<kStaged>, StagedCost, StagedInstance<kStaged>,
     StagedShape<kStaged>},
    {"staged_entries_even", FitsStaged<kStagedEvenly>, kByName, StagedInstance<kStagedEvenly>,
     StagedShape<kStagedEvenly>},
    {"staged_entries_two_stages", FitsStaged<kStagedInTwo>, kByName, StagedInstance<kStagedInTwo>,
     StagedShape<kStagedInTwo>},
    {"tensor_cores", FitsTensorCores, TensorCost, TensorInstance, TensorShape},
};

}  // namespace

extern constinit const Table<CudaVariant<SddmmProblem>> kSddmmCudaVariants = MakeTable(kVariants);

}  // namespace jaxsparse
