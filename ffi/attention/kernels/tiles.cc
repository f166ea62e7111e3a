// Forward kernel of attention by tiles: its configuration, launch, workspace, fit and cost.
#include "attention/kernels/tiles.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "attention/attention_cuda.h"
#include "attention/kernels/score_source.h"
#include "attention/kernels/tensor_maps.h"
#include "nvrtc/expression.h"

namespace jaxsparse {
namespace {

AttentionTilesConfig ConfigOf(const AttentionProblem& p) {
  return {static_cast<int>(p.head_size), static_cast<int>(p.value_size)};
}

KernelSource Source(const AttentionProblem& p) {
  const AttentionTilesConfig config = ConfigOf(p);
  return WithScores(
      p.scores, "attention/kernels/tiles.cu", "AttentionTiles", TypeName(p.dtype),
      ConfigExpression("AttentionTilesConfig", {Field("head_size", config.head_size),
                                                Field("value_size", config.value_size)}));
}

LaunchShape Shape(const AttentionProblem& p) {
  const int64_t blocks = p.gpu.multiprocessors;
  return {std::min(AttentionItemsOf(p), blocks), kAttentionTilesThreads, ConfigOf(p).SharedBytes()};
}

// Clears the counter of items, unless each block has one of its own and there are no others.
constexpr CudaKernel<AttentionProblem> kPrologue{
    [](const AttentionProblem&) {
      return KernelSource{"attention/kernels/tiles_prologue.cu",
                          "jaxsparse::AttentionTilesPrologue"};
    },
    [](const AttentionProblem& p) {
      return LaunchShape{AttentionItemsOf(p) > p.gpu.multiprocessors ? 1 : 0, 1};
    }};

// Heads whose keys and values stay in the L2 cache while all rows of tiles meet them, in turns of
// about as many each.
int64_t HeadsAtOnce(const AttentionProblem& p) {
  constexpr int64_t kCacheBytes = 32 << 20;
  const int64_t heads = p.batch.count * p.groups * p.per_group;
  const int64_t of_group = p.keys * (p.head_size + p.value_size) * SizeOf(p.dtype);
  const int64_t most = std::max<int64_t>(kCacheBytes / of_group, 1) * p.per_group;
  return CeilDivide(heads, CeilDivide(heads, most));
}

std::string Launch(const AttentionProblem& p, const CudaLaunch& launch) {
  AttentionTilesProblem tiles{p};
  tiles.items = static_cast<uint32_t>(AttentionItemsOf(p));
  tiles.heads_at_once = static_cast<uint32_t>(HeadsAtOnce(p));
  const std::string reason = EncodeAttentionMaps(
      p, {&tiles.query_tiles, &tiles.key_tiles, &tiles.value_tiles, kMaskTile, kMaskTile});
  return reason.empty() ? launch.With(&tiles) : reason;
}

int64_t WorkspaceBytes(const AttentionProblem&, bool) { return kAttentionCounterBytes; }

// Warpgroups are what GPUs of this compute capability have. A scale of other signs would turn what
// is largest among scores, unless a function of them makes others; places of entries, positions and
// items have 32 bits.
bool Fits(const AttentionProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  const bool aligned = IsAlignedForCopies(p.query) && IsAlignedForCopies(p.key) &&
                       IsAlignedForCopies(p.value) && IsAlignedForCopies(p.out) &&
                       IsAlignedForCopies(p.mask.bits);
  const bool sized = p.head_size == p.value_size && (p.head_size == 64 || p.head_size == 128);
  const bool keeps_order = p.scale > 0 || p.scores.text_size > 0;
  return p.has_mask && SizeOf(p.dtype) == 2 && sized && aligned &&
         std::isnormal(static_cast<float>(p.scale)) && keeps_order && FitsScores(p.scores) &&
         p.gpu.compute_capability == 90 && ConfigOf(p).SharedBytes() <= p.gpu.shared_bytes &&
         0 < p.keys && p.keys < kMost && p.queries < kMost && p.mask.capacity < kMost &&
         p.mask.cells < kMost && AttentionItemsOf(p) < kMost &&
         kAttentionCounterBytes <= p.workspace.bytes;
}

// Clocks of a multiprocessor.
struct CostModel {
  double launch_us;
  double tile;          // of 128 x 128 positions of a head, with sizes of 128
  double tile_of_size;  // the part of it that grows with them
  double partial_tile;  // more, of partial cells
  double item;
  double bytes_per_clock;  // at most, of keys and values, where few queries read many of them
};

// Fitted to times on an H200; bytes a clock are those of its memory.
constexpr CostModel kCostModel{.launch_us = 4,
                               .tile = 3150,
                               .tile_of_size = 0.58,
                               .partial_tile = 250,
                               .item = 3500,
                               .bytes_per_clock = 16};

double Cost(const AttentionProblem& p) {
  const auto heads = static_cast<double>(p.batch.count * p.groups * p.per_group);
  const auto items = static_cast<double>(AttentionItemsOf(p));
  const double blocks = std::max(1.0, std::min(items, static_cast<double>(p.gpu.multiprocessors)));
  const auto tiles = static_cast<double>(p.mask.capacity);
  const double partial = std::min(tiles, static_cast<double>(p.mask.cells) / 4);
  const double size = static_cast<double>(p.head_size + p.value_size) / (2 * 128);
  const double of_tile =
      kCostModel.tile * (1 - kCostModel.tile_of_size + kCostModel.tile_of_size * size);
  const double clocks =
      heads * (tiles * of_tile + partial * kCostModel.partial_tile) + items * kCostModel.item;
  const auto read = static_cast<double>(p.batch.count * p.groups *
                                        std::min(p.mask.capacity, CeilDivide(p.keys, kMaskTile)));
  const double bytes =
      read * static_cast<double>(kMaskTile * (p.head_size + p.value_size) * SizeOf(p.dtype));
  const double reading = bytes / kCostModel.bytes_per_clock / p.gpu.multiprocessors;
  return kCostModel.launch_us + std::max(clocks / blocks, reading) / kClocksOfMicrosecond;
}

}  // namespace

extern constinit const CudaVariant<AttentionProblem> kAttentionTiles = {
    "tiles", Fits, Cost, Source, Shape, &kPrologue, Launch, WorkspaceBytes};

}  // namespace jaxsparse
