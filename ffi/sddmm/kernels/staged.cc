// The staged kernel of the sampled dense-dense product on the host: how it is configured, which
// problems it fits, its predicted time, its instance and its launch.
#include "sddmm/kernels/staged.h"

#include "nvrtc/expression.h"
#include "sddmm/sddmm_cuda.h"

namespace jaxsparse {
namespace {

// Tiles of the same columns.
int64_t TilesDown(const SddmmProblem& p, const SddmmStagedConfig& config) {
  if (p.pattern.rows == 0) return 1;  // a block has to write the padding
  return CeilDivide(p.pattern.rows, config.TileRows());
}

int64_t TilesOf(const SddmmProblem& p, const SddmmStagedConfig& config) {
  return p.batch.count * config.parts * TilesDown(p, config);
}

struct CostModel {
  double launch_clocks;
  double visit_clocks;  // of a row, in a panel
  double entry_clocks;  // of each entry, and of 128 bytes of its row of y
  double entry_clocks_of_128_bytes;
  double tile_clocks;
  double search_clocks;       // of a tile of some columns, for where they begin
  double conversion;          // time with 16-bit numbers to time with others
  double l2_bytes_per_clock;  // of a multiprocessor
};

// Fitted to 37 problems of float32, 1024 x 1024 to 24576 x 8192, d 32 and 128, 10 to 30 % stored,
// and to 6 of bfloat16.
constexpr CostModel kCostModel{.launch_clocks = 10550,
                               .visit_clocks = 45.6,
                               .entry_clocks = 1.17,
                               .entry_clocks_of_128_bytes = 0.74,
                               .tile_clocks = 3290,
                               .search_clocks = 2440,
                               .conversion = 1.33,
                               .l2_bytes_per_clock = 42};

// Clocks of the multiprocessor that has most to do.
double ClocksOf(const SddmmProblem& p, const SddmmStagedConfig& config) {
  const double bytes = config.RowBytes();
  const int64_t panels = CeilDivide(p.pattern.columns, config.panel * config.parts);
  const double inner = static_cast<double>(panels * config.panel);  // rows of y for each tile
  const double rows = static_cast<double>(CeilDivide(p.pattern.rows, TilesDown(p, config)));
  const double mean =
      p.pattern.rows > 0 ? static_cast<double>(p.pattern.nse) / p.pattern.rows : 0;  // entries
  const double entry = kCostModel.entry_clocks + bytes * kCostModel.entry_clocks_of_128_bytes / 128;
  const double shared =
      rows * (mean / config.parts * entry + static_cast<double>(panels) * kCostModel.visit_clocks);
  const double l2 = inner * bytes / kCostModel.l2_bytes_per_clock;
  const double convert = SizeOf(p.dtype) == 2 ? kCostModel.conversion : 1;
  return static_cast<double>(CeilDivide(TilesOf(p, config), p.gpu.multiprocessors)) *
             ((shared > l2 ? shared : l2) * convert + kCostModel.tile_clocks +
              (config.parts > 1 ? kCostModel.search_clocks : 0)) +
         kCostModel.launch_clocks;
}

// The least clocks; among equals the most rows, for which y is read least often.
SddmmStagedConfig ConfigOf(const SddmmProblem& p) {
  constexpr int kRowsBytes = 2 << 10;  // of x, for each warp
  // From so many bytes of a row of y on, two stages of larger panels take 4 to 16 % less time than
  // three.
  constexpr int kWideRowBytes = 512;
  SddmmStagedConfig best{.lanes = 2, .vectors = 4, .rows = 0};
  while (best.RowBytes() < p.d * SizeOf(p.dtype)) {
    if (best.lanes < 8) best.lanes *= 2;
    else best.vectors *= 2;
  }
  best.stages = best.RowBytes() >= kWideRowBytes ? 2 : 3;
  best.panel = PanelRows(p.pattern.columns, kPanelsBytes / best.stages / best.RowBytes());
  for (int parts = 1; parts <= 8; parts *= 2) {
    for (int rows = 1; rows <= 8 && rows * best.RowBytes() <= kRowsBytes; rows *= 2) {
      SddmmStagedConfig config = best;
      config.rows = rows;
      config.parts = parts;
      const double clocks = ClocksOf(p, config);
      const bool is_better = best.rows == 0 || clocks < ClocksOf(p, best) ||
                             (parts == best.parts && clocks == ClocksOf(p, best));
      if (is_better) best = config;
    }
  }
  return best;
}

KernelSource Source(const SddmmProblem& p) {
  const SddmmStagedConfig config = ConfigOf(p);
  const std::string text = ConfigExpression(
      "SddmmStagedConfig",
      {Field("lanes", config.lanes), Field("vectors", config.vectors), Field("rows", config.rows),
       Field("panel", config.panel), Field("stages", config.stages), Field("parts", config.parts)});
  return {"sddmm/kernels/staged.cu",
          KernelExpression("SddmmStaged", {TypeName(p.dtype), TypeName(p.out_dtype),
                                           TypeName(p.pattern.index_type), text})};
}

LaunchShape Shape(const SddmmProblem& p) {
  const SddmmStagedConfig config = ConfigOf(p);
  const int64_t tiles = TilesOf(p, config), blocks = p.gpu.multiprocessors;
  return {tiles < blocks ? tiles : blocks, kSddmmStagedThreads, config.SharedBytes()};
}

// Places of 32 bits; barriers that count copies. Panels are no smaller than 16 rows, or there is
// one.
bool Fits(const SddmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t widest_row = p.dtype == DType::kFloat32 ? 1024 : 512;  // x stays in registers
  return p.dtype != DType::kFloat64 && p.d * SizeOf(p.dtype) <= widest_row &&
         p.pattern.nse < kMost && p.pattern.columns < kMost && p.pattern.rows < kMost &&
         p.batch.count < kMost / (p.pattern.rows + kWarp) &&
         p.batch.count * (p.pattern.rows / 16 + 1) < kMost / (p.pattern.columns / 16 + 1) &&
         p.gpu.compute_capability >= 90 && Shape(p).shared_bytes <= p.gpu.shared_bytes;
}

// Where rows of y are not aligned they come number by number, which was not measured.
double Cost(const SddmmProblem& p) {
  if (p.d * SizeOf(p.dtype) % 16 != 0) return kCostByName;
  return ClocksOf(p, ConfigOf(p)) / kClocksOfMicrosecond;
}

}  // namespace

extern constinit const CudaVariant<SddmmProblem> kSddmmStagedEntries = {"staged_entries", Fits,
                                                                        Cost, Source, Shape};

}  // namespace jaxsparse
