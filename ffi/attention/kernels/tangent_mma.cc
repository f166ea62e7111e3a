// Kernel of attention's derivative by mma.sync: its configuration, launch, fit and cost.
#include <string>

#include "attention/attention_cuda.h"
#include "attention/kernels/mma_launch.h"

namespace jaxsparse {
namespace {

using Problem = AttentionTangentProblem;

TangentMmaConfig ConfigOf(const Problem& p) {
  TangentMmaConfig config{MmaTilesOf(p)};
  const int most = config.tiles.number_bytes == 2 ? 128 : 64;
  config.columns = MmaColumnsOf(config.tiles, config.tiles.value_size <= most);
  return Fitted(p.gpu, config);
}

KernelSource Source(const Problem& p) {
  const TangentMmaConfig config = ConfigOf(p);
  return {"attention/kernels/tangent_mma.cu",
          KernelExpression("AttentionTangentMma",
                           {TypeName(p.dtype),
                            ConfigExpression("TangentMmaConfig",
                                             {Field("tiles", MmaTilesExpression(config.tiles)),
                                              Field("stages", config.stages),
                                              Field("columns", config.columns)})})};
}

LaunchShape Shape(const Problem& p) {
  const TangentMmaConfig config = ConfigOf(p);
  return {int64_t{RowItemsOf(p).Count()} * config.tiles.BlocksOfTile(), config.tiles.Threads(),
          config.SharedBytes()};
}

std::string Launch(const Problem& p, const CudaLaunch& launch) {
  AttentionTangentWork work{p, RowItemsOf(p)};
  return launch.With(&work);
}

bool Fits(const Problem& p) {
  return MmaTakes(p) && MmaTakes(p, p.mask, p.groups * p.per_group) && IsMmaAligned(p.d_query) &&
         IsMmaAligned(p.d_key) && IsMmaAligned(p.d_value) && IsMmaAligned(p.weighted) &&
         ConfigOf(p).SharedBytes() <= p.gpu.shared_bytes;
}

constexpr MmaCostModel kCostModel{
    .launch_us = 4, .tile = 14000, .tile_of_size = 0.8, .other_size = 1, .exact = 7, .item = 7000};

double Cost(const Problem& p) {
  const MmaTiles tiles = MmaTilesOf(p);
  const double size = (3 * tiles.head_size + 2 * tiles.value_size) / (5.0 * 128);
  return kCostModel.launch_us + MmaMicroseconds(kCostModel, p, p.mask, RowItemsOf(p), size);
}

}  // namespace

extern constinit const CudaVariant<AttentionTangentProblem> kAttentionTangentMma = {
    "tiles_mma", Fits, Cost, Source, Shape, nullptr, Launch};

}  // namespace jaxsparse
