// The tensor core kernel of the sampled dense-dense product and its prologue kernel on the host:
// which problems they fit, their predicted time, their instances and their launches.
#include "sddmm/kernels/tensor_cores.h"

#include "host/preparation.h"
#include "nvrtc/expression.h"
#include "sddmm/sddmm_cuda.h"

namespace jaxsparse {
namespace {

constexpr char kFile[] = "sddmm/kernels/tensor_cores.cu";

// Places of d that a kernel is compiled for, the least that has all of them.
int InnerOf(const SddmmProblem& p) {
  int inner = SddmmTensorConfig::kLeastInner;
  while (inner < p.d) inner *= 2;
  return inner;
}

SddmmTensorConfig ConfigOf(const SddmmProblem& p) {
  return {.inner = InnerOf(p), .scaled = p.scale_by.data != nullptr};
}

int64_t TilesOf(const SddmmProblem& p) {
  const SddmmTiles of_entry = SddmmTilesOf(p);
  return p.batch.count * of_entry.down * of_entry.across;
}

std::string Expression(const SddmmTensorConfig& config) {
  return ConfigExpression("SddmmTensorConfig",
                          {Field("inner", config.inner), Field("scaled", config.scaled)});
}

KernelSource Source(const SddmmProblem& p) {
  return {kFile, KernelExpression("SddmmTensorCores",
                                  {TypeName(p.dtype), TypeName(p.out_dtype),
                                   TypeName(p.pattern.index_type), Expression(ConfigOf(p))})};
}

LaunchShape Shape(const SddmmProblem& p) {
  const int64_t tiles = TilesOf(p), blocks = p.gpu.multiprocessors;
  return {tiles < blocks ? tiles : blocks, kSddmmTensorThreads,
          ConfigOf(p).SharedBytes(ComponentsOf(p.dtype))};
}

Preparation PreparationOf(const SddmmProblem& p) {
  return SddmmPreparation(p, InnerOf(p), ComponentsOf(p.dtype));
}

// The same one whether or not sums are scaled.
KernelSource PrologueSource(const SddmmProblem& p) {
  return {kFile,
          KernelExpression("SddmmPrepare", {TypeName(p.dtype), TypeName(p.pattern.index_type),
                                            Expression({.inner = InnerOf(p)})})};
}

constexpr CudaKernel<SddmmProblem> kPrologue{
    PrologueSource, [](const SddmmProblem& p) { return PrepareShape(PreparationOf(p)); }};

// Rows of x stay in registers.
bool IsNarrowEnough(const SddmmProblem& p) {
  const int64_t most_inner = p.dtype == DType::kFloat32 ? 128 : 256;
  return p.dtype != DType::kFloat64 && p.d <= most_inner;
}

int64_t WorkspaceBytes(const SddmmProblem& p, bool is_asked_for) {
  if (!IsNarrowEnough(p)) return 0;
  const int64_t bytes = PreparationOf(p).Bytes();
  return is_asked_for || PaysToPrepare(p.pattern, bytes) ? bytes : 0;
}

// Tiles of 32 bits, and places: the distance between two of them, or the complement of one, is one,
// too.
bool Fits(const SddmmProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return IsNarrowEnough(p) && p.d > 0 && p.pattern.nse < kMost - kWarp &&
         p.pattern.columns < kMost && p.pattern.rows < kMost &&
         p.batch.count < kMost / (p.pattern.rows / kSddmmTileRows + 1) /
                             (p.pattern.columns / kSddmmTileColumns + 1) &&
         p.gpu.compute_capability == 90 && Shape(p).shared_bytes <= p.gpu.shared_bytes &&
         IsBatchedAsOne(p.batch, p.pattern) && PreparationOf(p).Bytes() <= p.workspace.bytes;
}

// Of a tile: a constant, and what is added for each place of d.
struct MultiplyCost {
  double tile_us, inner_us;
};

struct CostModel {
  double launch_us;
  double x_byte_us;                      // of a byte of a row of x, in components
  double unit_us;                        // of a work unit
  MultiplyCost float32, sixteen_bits;    // of consumer warpgroups
  double pick_tile_us, pick_density_us;  // of epilogue warps: of a tile, and times its density
  double entry_us;
  double tile_start_us;  // of an entry, where starts of tiles are not given
};

// With the prologue kernel. Fitted to 30 problems in float32, 1024 x 1024 to 8192 x 2048, d 32 and
// 128, 10 to 30 % stored, and to 8 in 16 bits: half of the predictions are within 2.5 %, all within
// 13 %. With fewer entries, empty tiles are not come to.
constexpr CostModel kCostModel{.launch_us = 8.44,
                               .x_byte_us = 0.0022,
                               .unit_us = 0.63,
                               .float32 = {.tile_us = 0.51, .inner_us = 0.0123},
                               .sixteen_bits = {.tile_us = 0.26, .inner_us = 0.0055},
                               .pick_tile_us = 0.62,
                               .pick_density_us = 2.2,
                               .entry_us = 5e-7,
                               .tile_start_us = 1.6e-6};

double Cost(const SddmmProblem& p) {
  const int64_t tiles = TilesOf(p);
  if (tiles == 0) return kCostModel.launch_us;
  const auto of_block = static_cast<double>(CeilDivide(tiles, p.gpu.multiprocessors));
  const auto across = static_cast<double>(SddmmTilesOf(p).across);
  const double units = of_block > 1 ? 2 + of_block / across : 1;
  const auto entries = static_cast<double>(p.batch.count * p.pattern.nse);
  const double density =
      entries / (static_cast<double>(tiles) * kSddmmTileRows * kSddmmTileColumns);
  const MultiplyCost& of_tile =
      p.dtype == DType::kFloat32 ? kCostModel.float32 : kCostModel.sixteen_bits;
  const double multiply = of_tile.tile_us + of_tile.inner_us * static_cast<double>(p.d);
  const double pick = kCostModel.pick_tile_us + kCostModel.pick_density_us * density;
  const double row_bytes = 2.0 * ComponentsOf(p.dtype) * InnerOf(p);
  const Preparation prepared = PreparationOf(p);
  const auto components = static_cast<double>(prepared.ComponentsBytes());
  const double found = prepared.own_starts == 0 ? 0 : entries;
  return kCostModel.launch_us + row_bytes * kCostModel.x_byte_us + units * kCostModel.unit_us +
         of_block * (multiply > pick ? multiply : pick) + components / kComponentsBytes +
         entries * kCostModel.entry_us + found * kCostModel.tile_start_us;
}

}  // namespace

extern constinit const CudaVariant<SddmmProblem> kSddmmTensorCores = {
    "tensor_cores", Fits, Cost, Source, Shape, &kPrologue, nullptr, WorkspaceBytes};

}  // namespace jaxsparse
