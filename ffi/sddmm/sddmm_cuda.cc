// CUDA variants of the sampled dense-dense product: which kernel, and how it is launched.
#include <cmath>
#include <string>

#include "nvrtc/expression.h"
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

// What the product in tiles of entries gains by; a variant does without one, to measure what it
// brings.
enum class Technique {
  kNone,
  kWideLoads,  // a lane owns neighbouring columns of y, and loads them at once
  kBalance,    // warps own equally many entries, whatever rows they are of
};

// How warps take entries.
struct Tiling {
  int lanes;      // that take an entry
  int vector;     // elements of a piece, up to 16 bytes
  int pieces;     // of a lane, at a time
  int chunks;     // of 32 entries of a warp
  int sharing;    // warps that share 32 entries
  bool own_rows;  // each entry loads its own row of x
  int registers;  // of a lane's pieces

  int64_t PartSize() const { return int64_t{lanes} * vector * pieces; }  // of a row, at a time
  int EntriesOfGroup() const { return lanes / sharing; }
  int Together() const { return SddmmTiledTogether(registers, own_rows); }
};

// Warps, if none shared entries.
int64_t TiledWarps(const SddmmProblem& p, int chunks) {
  return p.batch.count * CeilDivide(p.pattern.nse, chunks * kWarp);
}

// Warps that a GPU runs at once.
int64_t TiledAtOnce(const SddmmProblem& p, const Tiling& tiling) {
  return int64_t{p.gpu.multiprocessors} * SddmmTiledBlocks(tiling.registers) *
         (kSddmmTiledThreads / kWarp);
}

// As few chunks for a warp as let all run at once, or one after another if they would be too many:
// half or twice as many take up to 35 % more time. Where there is room for more warps, they share
// entries until each of a group is loaded at once; then more lanes take an entry, a long row's.
// Where they load their own long rows of x, a fifth of the warps may wait for others to end: 8 to
// 24 % less time than half as many warps take. It is more where rows are short, or x is shared.
// Parts of a row are about as long as one another, lest the last one be mostly empty.
Tiling TilingOf(const SddmmProblem& p, Technique without, bool own_rows) {
  constexpr int kManyLanes = 8, kManyRegisters = 16, kMostChunks = 32;
  const auto bytes = static_cast<int>(SizeOf(p.dtype));
  Tiling tiling{1, 1, 1, 1, 1, own_rows, 0};
  while (without != Technique::kWideLoads && tiling.vector * bytes < 16 &&
         p.d % (tiling.vector * 2) == 0) {
    tiling.vector *= 2;
  }
  const int piece = SddmmTiledRegisters(1, tiling.vector * bytes);
  const auto take_lanes = [&](int lanes) {
    const int64_t pieces = CeilDivide(p.d, int64_t{lanes} * tiling.vector);
    const int64_t parts = CeilDivide(pieces, kManyRegisters / piece);
    tiling.lanes = lanes;
    tiling.pieces = parts > 0 ? static_cast<int>(CeilDivide(pieces, parts)) : 1;
    tiling.registers = SddmmTiledRegisters(tiling.pieces, tiling.vector * bytes);
  };
  int lanes = 1;
  while (lanes * tiling.vector < p.d && lanes < kManyLanes) lanes *= 2;
  take_lanes(lanes);
  const int64_t at_once = TiledAtOnce(p, tiling);
  const bool may_wait = own_rows && tiling.registers > kManyRegisters / 2;
  const int64_t most = may_wait ? at_once + at_once / 4 : at_once, warps = TiledWarps(p, 1);
  if (warps > most) {
    const int64_t times = CeilDivide(TiledWarps(p, kMostChunks), at_once);
    tiling.chunks = static_cast<int>(CeilDivide(warps, at_once * times));
  }
  const auto has_room = [&] { return warps * tiling.sharing * 2 <= most; };
  while (tiling.EntriesOfGroup() > tiling.Together() && has_room()) tiling.sharing *= 2;
  while (tiling.PartSize() < p.d && tiling.lanes < kWarp && has_room()) {
    take_lanes(tiling.lanes * 2);
    tiling.sharing *= 2;
  }
  return tiling;
}

// Microseconds: from clocks of a multiprocessor for 32 entries of a row or fewer, which are more
// where it runs fewer warps than it could, or for what it loads of y from L2 once; and those in
// which a warp waits for its first 32 entries. Fitted to 237 measurements in float32, with x shared
// and not, of 64 x 576 to 4096 x 4096, d 32 to 3136, and of graphs of 100,000 nodes: half of them
// are within 5 %, nine in ten within 16 %; it is far too low where some rows are much shorter than
// others and x is shared. Then to 12 in 16 bits, whose numbers are converted. What narrower loads
// take follows from the variant that has no others.
double TiledTime(const SddmmProblem& p, const Tiling& tiling) {
  constexpr double kStart = 2.3, kForPass = 11.5;
  constexpr double kForLoad = 1.4, kForByte = 0.425;  // of a lane
  constexpr double kWithX = 1.57;                     // loads, with those of an own row of x
  constexpr double kOfRow = 0.9;  // passes that its ends take more, if x is shared
  constexpr double kWait = 0.21;  // for what a lane loads at once, if x is shared
  constexpr double kFewWarps = 0.3, kL2Bytes = 31;
  if (p.batch.count * p.pattern.nse == 0) return kStart;
  const auto bytes = static_cast<double>(SizeOf(p.dtype));
  const double convert = bytes == 2 ? 1.5 : 1;
  const int64_t parts = CeilDivide(p.d, tiling.PartSize());  // of a row
  const double loads = static_cast<double>(parts * tiling.lanes * tiling.pieces) *
                       (kForLoad + kForByte * bytes * tiling.vector) *
                       (tiling.own_rows ? kWithX : 1);
  const int64_t nse = p.pattern.nse, rows = p.pattern.rows < nse ? p.pattern.rows : nse;
  const double chunks = static_cast<double>(nse) / kWarp;
  const double passes = chunks + (tiling.own_rows ? 0 : kOfRow * static_cast<double>(rows));
  const auto batch = static_cast<double>(p.batch.count);
  const double full = static_cast<double>(TiledWarps(p, tiling.chunks) * tiling.sharing) /
                      static_cast<double>(TiledAtOnce(p, tiling));
  const double compute = batch * passes * (kForPass + loads) * convert / p.gpu.multiprocessors /
                         (full < 1 ? std::pow(full, kFewWarps) : 1);
  const double columns = batch * static_cast<double>(p.pattern.columns);
  const double entries = batch * static_cast<double>(nse) / p.gpu.multiprocessors;
  const double rows_of_y = columns * (1 - std::exp(-entries / columns));  // expected, of them all
  const double l2 = rows_of_y * static_cast<double>(p.d) * bytes / kL2Bytes;
  const int64_t waits = parts * CeilDivide(tiling.EntriesOfGroup(), tiling.Together());
  return kStart + (compute > l2 ? compute : l2) / kClocksOfMicrosecond +
         (tiling.own_rows ? 0 : kWait * static_cast<double>(waits) * passes / chunks);
}

// Whether entries load their own rows of x is what takes less time with all techniques, so that a
// variant without one differs in that alone.
Tiling TilingOf(const SddmmProblem& p, Technique without) {
  const Tiling shared = TilingOf(p, Technique::kNone, false);
  const Tiling own = TilingOf(p, Technique::kNone, true);
  const bool own_rows = TiledTime(p, own) < TiledTime(p, shared);
  if (without != Technique::kNone) return TilingOf(p, without, own_rows);
  return own_rows ? own : shared;
}

// Places of 32 bits, of lanes too.
bool FitsTiled(const SddmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return p.d * SizeOf(p.dtype) < kMost && p.pattern.nse < kMost && p.pattern.columns < kMost &&
         p.pattern.rows < kMost && p.batch.count < kMost / (p.pattern.nse + kWarp);
}

KernelSource TiledInstance(const SddmmProblem& p, Technique without) {
  const Tiling tiling = TilingOf(p, without);
  std::string expression = "jaxsparse::SddmmTiled<" + TypeName(p.dtype) + ", " +
                           TypeName(p.out_dtype) + ", " + TypeName(p.pattern.index_type);
  for (int number : {tiling.lanes, tiling.vector, tiling.pieces, tiling.chunks, tiling.sharing}) {
    expression += ", " + std::to_string(number);
  }
  for (bool is : {tiling.own_rows, p.d == tiling.PartSize(), p.scale_by.data != nullptr,
                  without != Technique::kBalance, p.batch.rank > 0}) {
    expression += is ? ", true" : ", false";
  }
  return {"sddmm/sddmm_tiled.cu", expression + ">"};
}

LaunchShape TiledShape(const SddmmProblem& p, Technique without) {
  constexpr int kWarps = kSddmmTiledThreads / kWarp;
  const Tiling tiling = TilingOf(p, without);
  return {CeilDivide(TiledWarps(p, tiling.chunks) * tiling.sharing, kWarps), kSddmmTiledThreads};
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
          SddmmSharedBytes(ComponentsOf(p.dtype), SddmmTensorInner(p.d))};
}

Preparation PreparationOf(const SddmmProblem& p) {
  return Preparation(p.batch, p.pattern, p.pattern.columns, p.y, p.d, SddmmTensorInner(p.d),
                     ComponentsOf(p.dtype));
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
  best.panel = PanelRows(p.pattern.columns, kPipelineBytes / best.Stages() / best.RowBytes());
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

// A long row of few entries, of which groups of lanes load four at once, waits more than it loads.
double EntriesCost(const SddmmProblem& p) {
  constexpr double kStart = 4, kWait = 0.5;
  constexpr int kTogether = 4;
  const int64_t loads = CeilDivide(p.d, LanesFor(p.d)) * CeilDivide(SddmmRun(p), kTogether);
  const double wait = kWait * static_cast<double>(loads);
  const double load = static_cast<double>(p.batch.count * p.pattern.nse) *
                      (0.125e-3 + 0.63e-6 * static_cast<double>(p.d));
  return kStart + (load > wait ? load : wait);
}

// With the kernel before. Fitted to 30 problems in float32, 1024 x 1024 to 8192 x 2048, d 32 and
// 128, 10 to 30 % stored, and to 8 in 16 bits: half of the predictions are within 2.5 %, all within
// 13 %. With fewer entries, empty tiles are not come to.
double TensorCost(const SddmmProblem& p) {
  constexpr double kStart = 8.44, kOfByte = 0.0022;  // of a row of x, in components
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
  const double row_bytes = 2.0 * ComponentsOf(p.dtype) * SddmmTensorInner(p.d);
  const Preparation prepared = PreparationOf(p);
  const auto components = static_cast<double>(prepared.ComponentsBytes());
  const double found = prepared.own_starts == 0 ? 0 : entries;
  return kStart + row_bytes * kOfByte + units * kForUnit +
         of_block * (multiply > pick ? multiply : pick) + components / kComponentsBytes +
         entries * kForEntries + found * kToFindStarts;
}

double TiledCost(const SddmmProblem& p) { return TiledTime(p, TilingOf(p, Technique::kNone)); }

// Where rows of y are not aligned they come number by number, which was not measured.
double StagedCost(const SddmmProblem& p) {
  if (p.d * SizeOf(p.dtype) % 16 != 0) return kOnDemand;
  return StagedClocks(p, StagingOf(p)) / kClocksOfMicrosecond;
}

// A row of the table, for tiles with all techniques or without one.
template <Technique kWithout>
constexpr CudaVariant<SddmmProblem> TiledEntries(const char* name,
                                                 double (*cost)(const SddmmProblem&)) {
  return {name, FitsTiled, cost, [](const SddmmProblem& p) { return TiledInstance(p, kWithout); },
          [](const SddmmProblem& p) { return TiledShape(p, kWithout); }};
}

constexpr CudaVariant<SddmmProblem> kVariants[] = {
    {"generic_entries", [](const SddmmProblem&) { return true; }, EntriesCost, Entries,
     EntriesShape},
    TiledEntries<Technique::kNone>("tiled_entries", TiledCost),
    TiledEntries<Technique::kWideLoads>("tiled_entries_scalar", kByName),
    TiledEntries<Technique::kBalance>("tiled_entries_unbalanced", kByName),
    {"staged_entries", FitsStaged, StagedCost, StagedInstance, StagedShape},
    {"tensor_cores", FitsTensorCores, TensorCost, TensorInstance, TensorShape, &kPrepare},
};

}  // namespace

extern constinit const Table<CudaVariant<SddmmProblem>> kSddmmCudaVariants = MakeTable(kVariants);

}  // namespace jaxsparse
