// Both kernels by mma.sync of the transpose of attention's derivative on the host, and the variant
// that they make: which problems they fit, their predicted time, instances and launches. That of
// cotangents of queries is launched first; they do not depend on one another.
#include <algorithm>
#include <string>

#include "attention/attention_cuda.h"
#include "attention/kernels/cotangent_launch.h"
#include "attention/kernels/mma_launch.h"

namespace jaxsparse {
namespace {

using Problem = AttentionCotangentProblem;

// With two strips a warp reads keys and values half as often, where they fit registers.
CotangentMmaConfig ConfigOfRows(const Problem& p) {
  CotangentMmaConfig config{MmaTilesOf(p)};
  config.columns = MmaColumnsOf(config.tiles, config.tiles.head_size <= 128);
  config = Fitted(p.gpu, config);
  const bool is_small = config.tiles.head_size == 64 && config.tiles.value_size == 64;
  if (config.tiles.number_bytes == 2 && is_small && config.tiles.rows == kMaskTile &&
      !p.scores.Exist()) {
    config.tiles.strips = 2;
    config.columns = kMaskCell / 2;
  }
  return config;
}

CotangentMmaConfig ConfigOfKeys(const Problem& p) {
  CotangentMmaConfig config{MmaTilesOf(p)};
  const int sums = config.tiles.head_size + config.tiles.value_size;
  // Where there are functions of scores, probabilities beside them have to fit, too.
  const int most = p.scores.Exist() ? 128 : config.tiles.number_bytes == 2 ? 256 : 160;
  config.columns = MmaColumnsOf(config.tiles, sums <= most);
  config.split = sums > 256;
  return Fitted(p.gpu, config);
}

KernelSource SourceOf(const Problem& p, const char* file, const char* kernel,
                      const CotangentMmaConfig& config) {
  return WithScores(
      p.scores, file, kernel, TypeName(p.dtype),
      ConfigExpression(
          "CotangentMmaConfig",
          {Field("tiles", MmaTilesExpression(config.tiles)), Field("stages", config.stages),
           Field("columns", config.columns), Field("split", config.split)}));
}

int64_t BlocksOf(const AttentionItems& items, const CotangentMmaConfig& config) {
  return int64_t{items.Count()} * config.tiles.BlocksOfTile() * (config.split ? 2 : 1);
}

std::string LaunchWith(const Problem& p, const CudaLaunch& launch, const AttentionItems& items) {
  AttentionCotangentWork work{p, items, static_cast<float>(p.scale * kLog2OfE<double>)};
  return launch.With(&work);
}

constexpr CudaKernel<Problem> kOfRows{
    [](const Problem& p) {
      return SourceOf(p, "attention/kernels/rows_mma.cu", "AttentionCotangentOfRowsMma",
                      ConfigOfRows(p));
    },
    [](const Problem& p) {
      const CotangentMmaConfig config = ConfigOfRows(p);
      return LaunchShape{BlocksOf(RowItemsOf(p), config), config.tiles.Threads(),
                         config.SharedBytes()};
    },
    [](const Problem& p, const CudaLaunch& launch) {
      const std::string reason = ClearWholeCotangents(p, launch);
      return reason.empty() ? LaunchWith(p, launch, RowItemsOf(p)) : reason;
    }};

KernelSource Source(const Problem& p) {
  return SourceOf(p, "attention/kernels/keys_mma.cu", "AttentionCotangentOfKeysMma",
                  ConfigOfKeys(p));
}

LaunchShape Shape(const Problem& p) {
  const CotangentMmaConfig config = ConfigOfKeys(p);
  return {BlocksOf(KeyItemsOf(p), config), config.tiles.Threads(), config.SharedBytes()};
}

std::string Launch(const Problem& p, const CudaLaunch& launch) {
  return LaunchWith(p, launch, KeyItemsOf(p));
}

bool Fits(const Problem& p) {
  return MmaTakes(p) && MmaTakes(p, p.mask, p.groups * p.per_group) &&
         MmaTakes(p, p.transposed_mask, p.groups) && IsMmaAligned(p.ct_out) &&
         IsMmaAligned(p.ct_query) && IsMmaAligned(p.ct_key) && IsMmaAligned(p.ct_value) &&
         0 < p.queries && p.groups > 0 && p.per_group > 0 &&
         ConfigOfRows(p).SharedBytes() <= p.gpu.shared_bytes &&
         ConfigOfKeys(p).SharedBytes() <= p.gpu.shared_bytes;
}

// Of both kernels together 3,740 us were measured for causal attention: shared out as their
// products.
constexpr MmaCostModel kRowsModel{.launch_us = 6,
                                  .tile = 9800,
                                  .tile_of_size = 0.95,
                                  .other_size = 1.3,
                                  .exact = 6.6,
                                  .item = 8000};
constexpr MmaCostModel kKeysModel{.launch_us = 0,
                                  .tile = 13100,
                                  .tile_of_size = 0.95,
                                  .other_size = 1.3,
                                  .exact = 6.6,
                                  .item = 8000};

double Cost(const Problem& p) {
  const CotangentMmaConfig keys = ConfigOfKeys(p);
  const int h = keys.tiles.head_size, e = keys.tiles.value_size;
  const int of_rows = 2 * h + e, of_keys = (keys.split ? 3 : 2) * h + 2 * e;
  return kRowsModel.launch_us +
         MmaMicroseconds(kRowsModel, p, p.mask, RowItemsOf(p), of_rows / (3.0 * 128)) +
         MmaMicroseconds(kKeysModel, p, p.transposed_mask, KeyItemsOf(p), of_keys / (4.0 * 128));
}

}  // namespace

extern constinit const CudaVariant<AttentionCotangentProblem> kAttentionCotangentTilesMma = {
    "tiles_mma", Fits, Cost, Source, Shape, &kOfRows, Launch};

}  // namespace jaxsparse
