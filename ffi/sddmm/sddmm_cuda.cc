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

// How a warp takes entries.
struct Tiling {
  int lanes;   // that take an entry
  int pieces;  // of 16 bytes of a lane, at a time
  int chunks;  // of 32 entries of a warp
};

int64_t TiledWarps(const SddmmProblem& p, int chunks) {
  return p.batch.count * CeilDivide(p.pattern.nse, chunks * kWarp);
}

// As few chunks for a warp as let all run at once, or one after another if they would be too many:
// half or twice as many take up to 35 % more time.
Tiling TilingOf(const SddmmProblem& p) {
  constexpr int kMostLanes = 8, kMostPieces = 4, kMostChunks = 32;
  const int64_t pieces = CeilDivide(p.d * SizeOf(p.dtype), 16);  // of a row
  Tiling tiling{1, 1, 1};
  while (tiling.lanes < pieces && tiling.lanes < kMostLanes) tiling.lanes *= 2;
  while (tiling.pieces * tiling.lanes < pieces && tiling.pieces < kMostPieces) ++tiling.pieces;
  const int64_t at_once = int64_t{p.gpu.multiprocessors} * SddmmTiledBlocks(tiling.pieces) *
                          (kSddmmTiledThreads / kWarp);
  const int64_t times = CeilDivide(TiledWarps(p, kMostChunks), at_once);
  if (times > 0) tiling.chunks = static_cast<int>(CeilDivide(TiledWarps(p, 1), at_once * times));
  return tiling;
}

// Places of 32 bits, of lanes too.
bool FitsTiled(const SddmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return p.d * SizeOf(p.dtype) < kMost && p.pattern.nse < kMost && p.pattern.columns < kMost &&
         p.pattern.rows < kMost && p.batch.count < kMost / (p.pattern.nse + kWarp);
}

KernelSource TiledInstance(const SddmmProblem& p, SddmmTechnique without) {
  const Tiling tiling = TilingOf(p);
  const bool is_whole = p.d * SizeOf(p.dtype) == int64_t{tiling.lanes} * tiling.pieces * 16;
  return {"sddmm/sddmm_tiled.cu",
          "jaxsparse::SddmmTiled<" + TypeName(p.dtype) + ", " + TypeName(p.out_dtype) + ", " +
              TypeName(p.pattern.index_type) + ", " + std::to_string(tiling.lanes) + ", " +
              std::to_string(tiling.pieces) + ", " + std::to_string(tiling.chunks) +
              (is_whole ? ", true" : ", false") +
              (p.scale_by.data == nullptr ? ", false" : ", true") + ", jaxsparse::SddmmTechnique(" +
              std::to_string(static_cast<int>(without)) + ")" +
              (p.batch.rank > 0 ? ", true>" : ", false>")};
}

LaunchShape TiledShape(const SddmmProblem& p) {
  constexpr int kWarps = kSddmmTiledThreads / kWarp;
  return {CeilDivide(TiledWarps(p, TilingOf(p).chunks), kWarps), kSddmmTiledThreads};
}

KernelSource TensorInstance(const SddmmProblem& p) {
  return {"sddmm/sddmm_tensor_cores.cu",
          "jaxsparse::SddmmTensorCores<" + TypeName(p.dtype) + ", " + TypeName(p.out_dtype) + ", " +
              TypeName(p.pattern.index_type) + ", " + std::to_string(SddmmTensorInner(p.d)) +
              (p.scale_by.data == nullptr ? ", false>" : ", true>")};
}

LaunchShape TensorShape(const SddmmProblem& p) {
  const SddmmTiles of_entry = SddmmTilesOf(p);
  const int64_t tiles = p.batch.count * of_entry.down * of_entry.across;
  const int64_t blocks = p.gpu.multiprocessors;
  return {tiles < blocks ? tiles : blocks, kSddmmTensorThreads,
          SddmmSharedBytes(PlanesOf(p.dtype), SddmmTensorInner(p.d))};
}

Preparation PreparationOf(const SddmmProblem& p) {
  return Preparation(p.batch, p.pattern, p.pattern.columns, p.y, p.d, SddmmTensorInner(p.d),
                     PlanesOf(p.dtype));
}

constexpr CudaKernel<SddmmProblem> kPrepare{
    [](const SddmmProblem& p) {
      return KernelSource{"sddmm/sddmm_tensor_cores.cu",
                          "jaxsparse::SddmmPrepare<" + TypeName(p.dtype) + ", " +
                              TypeName(p.pattern.index_type) + ", " +
                              std::to_string(SddmmTensorInner(p.d)) + ">"};
    },
    [](const SddmmProblem& p) { return PrepareShape(PreparationOf(p)); }};

// Tiles of 32 bits, and places: the distance between two of them, or the complement of one, is one,
// too.
bool FitsTensorCores(const SddmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t most_inner = p.dtype == DType::kFloat32 ? 128 : 256;  // x stays in registers
  return p.dtype != DType::kFloat64 && p.d > 0 && p.d <= most_inner &&
         p.pattern.nse < kMost - kWarp && p.pattern.columns < kMost && p.pattern.rows < kMost &&
         p.batch.count < kMost / (p.pattern.rows / kSddmmTensorRows + 1) /
                             (p.pattern.columns / kSddmmTensorColumns + 1) &&
         p.gpu.compute_capability == 90 && TensorShape(p).shared_bytes <= p.gpu.shared_bytes &&
         IsBatchedAsOne(p.batch, p.pattern) && PreparationOf(p).Bytes() <= p.workspace.bytes;
}

// How y is staged, and the product cut into tiles.
struct Staging {
  int lanes;   // that take an entry
  int pieces;  // of 16 bytes of a lane
  int rows;    // of a warp
  int panel;   // rows of y
  int parts;   // of the columns

  int RowBytes() const;
  int Stages() const;
};

constexpr int kStagedRowBytes = 2 << 10;  // of x, for each warp
// From so many bytes of a row of y on, two stages of larger panels take 4 to 16 % less time than
// three.
constexpr int kWideRowBytes = 512;

int Staging::RowBytes() const { return lanes * pieces * 16; }
int Staging::Stages() const { return RowBytes() >= kWideRowBytes ? 2 : 3; }

// Tiles of the same columns.
int64_t StagedDown(const SddmmProblem& p, const Staging& staging) {
  if (p.pattern.rows == 0) return 1;  // somebody writes the padding
  return CeilDivide(p.pattern.rows, kSddmmStagedWarps * staging.rows);
}

int64_t StagedTiles(const SddmmProblem& p, const Staging& staging) {
  return p.batch.count * staging.parts * StagedDown(p, staging);
}

// Clocks of the multiprocessor that has most to do, fitted to 37 problems of float32, 1024 x 1024
// to 24576 x 8192, d 32 and 128, 10 to 30 % stored, and to 6 of bfloat16.
double StagedClocks(const SddmmProblem& p, const Staging& staging) {
  constexpr double kStart = 10550, kL2Bytes = 42;  // a clock and multiprocessor
  constexpr double kForVisit = 45.6;               // of a row, in a panel
  constexpr double kForTile = 3290, kForSearch = 2440;
  const double bytes = staging.RowBytes();
  const int64_t panels = CeilDivide(p.pattern.columns, staging.panel * staging.parts);
  const double inner = static_cast<double>(panels * staging.panel);  // rows of y for each tile
  const double rows = static_cast<double>(CeilDivide(p.pattern.rows, StagedDown(p, staging)));
  const double mean =
      p.pattern.rows > 0 ? static_cast<double>(p.pattern.nse) / p.pattern.rows : 0;  // entries
  const double entry = 1.17 + bytes * 0.74 / 128;
  const double shared =
      rows * (mean / staging.parts * entry + static_cast<double>(panels) * kForVisit);
  const double l2 = inner * bytes / kL2Bytes;
  const double convert = SizeOf(p.dtype) == 2 ? 1.33 : 1;
  return static_cast<double>(CeilDivide(StagedTiles(p, staging), p.gpu.multiprocessors)) *
             ((shared > l2 ? shared : l2) * convert + kForTile +
              (staging.parts > 1 ? kForSearch : 0)) +
         kStart;
}

// The least clocks; among equals the most rows, for which y is read least often.
Staging StagingOf(const SddmmProblem& p) {
  Staging best{2, 4, 0, 0, 1};
  while (best.RowBytes() < p.d * SizeOf(p.dtype)) {
    if (best.lanes < 8) best.lanes *= 2;
    else best.pieces *= 2;
  }
  best.panel = PanelRows(p.pattern.columns, kRingBytes / best.Stages() / best.RowBytes());
  for (int parts = 1; parts <= 8; parts *= 2) {
    for (int rows = 1; rows <= 8 && rows * best.RowBytes() <= kStagedRowBytes; rows *= 2) {
      const Staging staging{best.lanes, best.pieces, rows, best.panel, parts};
      const double clocks = StagedClocks(p, staging);
      const bool is_better = best.rows == 0 || clocks < StagedClocks(p, best) ||
                             (parts == best.parts && clocks == StagedClocks(p, best));
      if (is_better) best = staging;
    }
  }
  return best;
}

KernelSource StagedInstance(const SddmmProblem& p) {
  const Staging staging = StagingOf(p);
  return {"sddmm/sddmm_staged.cu",
          "jaxsparse::SddmmStaged<" + TypeName(p.dtype) + ", " + TypeName(p.out_dtype) + ", " +
              TypeName(p.pattern.index_type) + ", " + std::to_string(staging.lanes) + ", " +
              std::to_string(staging.pieces) + ", " + std::to_string(staging.rows) + ", " +
              std::to_string(staging.panel) + ", " + std::to_string(staging.Stages()) + ", " +
              std::to_string(staging.parts) + ">"};
}

LaunchShape StagedShape(const SddmmProblem& p) {
  const Staging staging = StagingOf(p);
  const int64_t tiles = StagedTiles(p, staging), blocks = p.gpu.multiprocessors;
  return {tiles < blocks ? tiles : blocks, kSddmmStagedThreads,
          SddmmStagedBytes(staging.RowBytes(), staging.rows, staging.panel, staging.Stages())};
}

// Places of 32 bits; barriers that count copies. Panels are no smaller than 16 rows, or there is
// one.
bool FitsStaged(const SddmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t widest_row = p.dtype == DType::kFloat32 ? 1024 : 512;  // x stays in registers
  return p.dtype != DType::kFloat64 && p.d * SizeOf(p.dtype) <= widest_row &&
         p.pattern.nse < kMost && p.pattern.columns < kMost && p.pattern.rows < kMost &&
         p.batch.count < kMost / (p.pattern.rows + kWarp) &&
         p.batch.count * (p.pattern.rows / 16 + 1) < kMost / (p.pattern.columns / 16 + 1) &&
         p.gpu.compute_capability >= 90 && StagedShape(p).shared_bytes <= p.gpu.shared_bytes;
}

double EntriesCost(const SddmmProblem& p) {
  constexpr double kStart = 4;
  return kStart + static_cast<double>(p.batch.count * p.pattern.nse) *
                      (0.125e-3 + 0.63e-6 * static_cast<double>(p.d));
}

// With the kernel before. Fitted to 30 problems in float32, 1024 x 1024 to 8192 x 2048, d 32 and
// 128, 10 to 30 % stored, and to 8 in 16 bits: half of the predictions are within 2.5 %, all within
// 13 %. With fewer entries, empty tiles are not come to.
double TensorCost(const SddmmProblem& p) {
  constexpr double kStart = 8.44, kOfByte = 0.0022;  // of a row of x, in planes
  constexpr double kForUnit = 0.63, kForEntries = 5e-7;
  constexpr double kToFindStarts = 1.6e-6;  // of an entry
  const SddmmTiles of_entry = SddmmTilesOf(p);
  const int64_t tiles = p.batch.count * of_entry.down * of_entry.across;
  if (tiles == 0) return kStart;
  const auto of_block = static_cast<double>(CeilDivide(tiles, p.gpu.multiprocessors));
  const double units = of_block > 1 ? 2 + of_block / static_cast<double>(of_entry.across) : 1;
  const auto entries = static_cast<double>(p.batch.count * p.pattern.nse);
  const double density =
      entries / (static_cast<double>(tiles) * kSddmmTensorRows * kSddmmTensorColumns);
  const auto d = static_cast<double>(p.d);
  const bool is_split = p.dtype == DType::kFloat32;
  const double multiply = is_split ? 0.51 + 0.0123 * d : 0.26 + 0.0055 * d;
  const double pick = 0.62 + 2.2 * density;
  const double row_bytes = 2.0 * PlanesOf(p.dtype) * SddmmTensorInner(p.d);
  const Preparation prepared = PreparationOf(p);
  const auto planes = static_cast<double>(prepared.PlanesBytes());
  const double found = prepared.own_starts == 0 ? 0 : entries;
  return kStart + row_bytes * kOfByte + units * kForUnit +
         of_block * (multiply > pick ? multiply : pick) + planes / kPlanesBytes +
         entries * kForEntries + found * kToFindStarts;
}

// Clocks of a multiprocessor for 32 entries of a row or fewer, fitted to 30 problems in float32,
// 1024 x 1024 to 8192 x 2048, d 32 and 128, 10 to 30 % stored: predictions are within 11 %; to 12
// in 16 bits, whose numbers are converted, within 10 %. Where rows of y are not aligned they come
// number by number, which was not measured.
double TiledCost(const SddmmProblem& p) {
  constexpr double kStart = 2.85, kForPass = 11.5, kForLoad = 8.2;  // of a lane
  constexpr double kOfRow = 0.9;  // passes that its ends take more
  const double convert = SizeOf(p.dtype) == 2 ? 1.5 : 1;
  if (p.d * SizeOf(p.dtype) % 16 != 0) return kOnDemand;
  const Tiling tiling = TilingOf(p);
  const int64_t part = int64_t{tiling.lanes} * tiling.pieces;
  const auto loads = static_cast<double>(CeilDivide(p.d * SizeOf(p.dtype), part * 16) * part);
  const int64_t nse = p.pattern.nse, rows = p.pattern.rows < nse ? p.pattern.rows : nse;
  const double passes = static_cast<double>(nse) / kWarp + kOfRow * static_cast<double>(rows);
  const double clocks =
      static_cast<double>(p.batch.count) * passes * (kForPass + loads * kForLoad) * convert;
  return kStart + clocks / (p.gpu.multiprocessors * kClocksOfMicrosecond);
}

// Where rows of y are not aligned they come number by number, which was not measured.
double StagedCost(const SddmmProblem& p) {
  if (p.d * SizeOf(p.dtype) % 16 != 0) return kOnDemand;
  return StagedClocks(p, StagingOf(p)) / kClocksOfMicrosecond;
}

// A row of the table, for tiles with all techniques or without one, for equally many warps.
template <SddmmTechnique kWithout>
constexpr CudaVariant<SddmmProblem> TiledEntries(const char* name,
                                                 double (*cost)(const SddmmProblem&)) {
  return {name, FitsTiled, cost, [](const SddmmProblem& p) { return TiledInstance(p, kWithout); },
          TiledShape};
}

constexpr CudaVariant<SddmmProblem> kVariants[] = {
    {"generic_entries", [](const SddmmProblem&) { return true; }, EntriesCost, Entries,
     EntriesShape},
    TiledEntries<SddmmTechnique::kNone>("tiled_entries", TiledCost),
    TiledEntries<SddmmTechnique::kWideLoads>("tiled_entries_scalar", kByName),
    TiledEntries<SddmmTechnique::kBalance>("tiled_entries_unbalanced", kByName),
    {"staged_entries", FitsStaged, StagedCost, StagedInstance, StagedShape},
    {"tensor_cores", FitsTensorCores, TensorCost, TensorInstance, TensorShape, &kPrepare},
};

}  // namespace

extern constinit const Table<CudaVariant<SddmmProblem>> kSddmmCudaVariants = MakeTable(kVariants);

}  // namespace jaxsparse
