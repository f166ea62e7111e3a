// Forward kernel of attention by mma.sync: its configuration, launch, fit and cost.
#include <algorithm>
#include <cmath>
#include <string>

#include "attention/attention_cuda.h"
#include "attention/kernels/mma_launch.h"

namespace jaxsparse {
namespace {

AttentionMmaConfig ConfigOf(const AttentionProblem& p) {
  AttentionMmaConfig config{MmaTilesOf(p)};
  MmaTiles& tiles = config.tiles;
  // With two strips a warp reads keys and values half as often. More numbers do not fit registers,
  // nor do copies of lines that threads do not share evenly.
  const auto is_even = [](int size) { return (size & (size - 1)) == 0; };
  const bool fits = tiles.number_bytes == 2 && tiles.value_size <= 128 &&
                    is_even(tiles.head_size) && is_even(tiles.value_size);
  if (config.SharedBytes() > p.gpu.shared_bytes) tiles.rows = kMaskCell;
  else if (fits && !p.scores.Exist()) tiles.strips = 2;
  return config;
}

KernelSource Source(const AttentionProblem& p) {
  const AttentionMmaConfig config = ConfigOf(p);
  return WithScores(
      p.scores, "attention/kernels/tiles_mma.cu", "AttentionTilesMma", TypeName(p.dtype),
      ConfigExpression("AttentionMmaConfig", {Field("tiles", MmaTilesExpression(config.tiles))}));
}

LaunchShape Shape(const AttentionProblem& p) {
  const AttentionMmaConfig config = ConfigOf(p);
  return {int64_t{RowItemsOf(p).Count()} * config.tiles.BlocksOfTile(), config.tiles.Threads(),
          config.SharedBytes()};
}

std::string Launch(const AttentionProblem& p, const CudaLaunch& launch) {
  AttentionMmaProblem problem{p};
  problem.items = RowItemsOf(p);
  return launch.With(&problem);
}

// A scale of other signs would turn what is largest among scores, unless a function of them makes
// others.
bool Fits(const AttentionProblem& p) {
  return MmaTakes(p) && MmaTakes(p, p.mask, p.groups * p.per_group) && IsMmaAligned(p.out) &&
         std::isnormal(static_cast<float>(p.scale)) && (p.scale > 0 || p.scores.text_size > 0) &&
         ConfigOf(p).SharedBytes() <= p.gpu.shared_bytes;
}

constexpr MmaCostModel kCostModel{.launch_us = 4,
                                  .tile = 5700,
                                  .tile_of_size = 0.7,
                                  .other_size = 1.55,
                                  .exact = 8,
                                  .item = 6500};

double Cost(const AttentionProblem& p) {
  const MmaTiles tiles = MmaTilesOf(p);
  const double size = (tiles.head_size + tiles.value_size) / (2.0 * 128);
  return kCostModel.launch_us + MmaMicroseconds(kCostModel, p, p.mask, RowItemsOf(p), size);
}

}  // namespace

extern constinit const CudaVariant<AttentionProblem> kAttentionTilesMma = {
    "tiles_mma", Fits, Cost, Source, Shape, nullptr, Launch};

}  // namespace jaxsparse
