// The kernel of cotangents of keys and values on the host, and the variant that it makes with that
// of cotangents of queries: which problems they fit, their predicted time, instances and launch.
#include "attention/kernels/keys.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "attention/attention_cuda.h"
#include "attention/kernels/cotangent_launch.h"
#include "attention/kernels/rows.h"
#include "attention/kernels/score_source.h"
#include "nvrtc/expression.h"

namespace jaxsparse {
namespace {

AttentionKeysConfig ConfigOf(const AttentionCotangentProblem& p) {
  return {static_cast<int>(p.head_size)};
}

KernelSource Source(const AttentionCotangentProblem& p) {
  return WithScores(
      p.scores, "attention/kernels/keys.cu", "AttentionCotangentOfKeys", TypeName(p.dtype),
      ConfigExpression("AttentionKeysConfig", {Field("head_size", ConfigOf(p).head_size)}));
}

LaunchShape Shape(const AttentionCotangentProblem& p) {
  return ShapeOf(p, KeyItemsOf(p), ConfigOf(p).SharedBytes());
}

std::string Launch(const AttentionCotangentProblem& p, const CudaLaunch& launch) {
  return LaunchCotangent(p, launch, KeyItemsOf(p), kKeysStepRows, kMaskCell);
}

// What tiles add to cotangents of operands of scores lies behind the counters. That of more tiles
// than there is room for has no kernel: then the workspace is as without.
int64_t WorkspaceBytes(const AttentionCotangentProblem& p, bool) {
  const int sums = TileSumsBefore(p.scores, p.scores.gradients);
  const auto heads = static_cast<double>(p.batch.count * p.groups * p.per_group);
  const double bytes = heads * static_cast<double>(p.mask.capacity) * sums * sizeof(float);
  return kCotangentWorkspaceBytes +
         (bytes < static_cast<double>(kMostTileSumsBytes) ? static_cast<int64_t>(bytes) : 0);
}

bool HasWorkspace(const AttentionCotangentProblem& p) {
  const int sums = TileSumsBefore(p.scores, p.scores.gradients);
  const int64_t wanted = WorkspaceBytes(p, false);
  // Where there are tiles and sums, there are bytes for them.
  const bool is_whole = sums == 0 || TilesOfHeads(p) == 0 || wanted > kCotangentWorkspaceBytes;
  return is_whole && wanted <= p.workspace.bytes;
}

bool IsAligned(const AttentionCotangentProblem& p) {
  return IsAlignedForCopies(p.query) && IsAlignedForCopies(p.key) && IsAlignedForCopies(p.value) &&
         IsAlignedForCopies(p.ct_out) && IsAlignedForCopies(p.ct_query) &&
         IsAlignedForCopies(p.ct_key) && IsAlignedForCopies(p.ct_value) &&
         IsAlignedForCopies(p.mask.bits) && IsAlignedForCopies(p.transposed_mask.bits);
}

// Items, entries and cells have numbers of 32 bits.
bool HasFewEnough(const AttentionCotangentProblem& p, const MaskTiles& mask, int64_t heads) {
  constexpr int64_t kMost = int64_t{1} << 30;
  return mask.capacity < kMost && mask.cells < kMost &&
         p.batch.count * heads < kMost / std::max<int64_t>(mask.rows, 1);
}

// Warpgroups are what GPUs of this compute capability have. Where no function is in between, shifts
// of rows are multiplied by the reciprocal of the scale (StoreTerms), which must not become 0 or
// infinite.
bool Fits(const AttentionCotangentProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  constexpr double kLeastScale = 0x1p-100, kMostScale = 0x1p100;
  const bool sized = p.head_size == p.value_size && (p.head_size == 64 || p.head_size == 128);
  const auto shared_bytes =
      std::max(AttentionRowsConfig{128}.SharedBytes(), AttentionKeysConfig{128}.SharedBytes());
  const double scale = std::abs(p.scale);
  const bool scaled = p.scores.Exist() || (kLeastScale <= scale && scale <= kMostScale);
  return p.has_mask && SizeOf(p.dtype) == 2 && sized && scaled && IsAligned(p) &&
         FitsScores(p.scores) && p.gpu.compute_capability == 90 &&
         shared_bytes <= p.gpu.shared_bytes && 0 < p.keys && p.keys < kMost && 0 < p.queries &&
         p.queries < kMost && p.groups > 0 && p.per_group > 0 &&
         HasFewEnough(p, p.mask, p.groups * p.per_group) &&
         HasFewEnough(p, p.transposed_mask, p.groups) && HasWorkspace(p);
}

// Clocks of a multiprocessor.
struct CostModel {
  double launch_us;
  double keys_tile, rows_tile;  // of 128 x 128 positions of a head, with sizes of 128
  double tile_of_size;          // the part of it that grows with them
  double item;
};

// Fitted to times on an H200.
constexpr CostModel kCostModel{
    .launch_us = 6, .keys_tile = 5450, .rows_tile = 3850, .tile_of_size = 0.82, .item = 6500};

double Cost(const AttentionCotangentProblem& p) {
  const auto heads = static_cast<double>(p.batch.count * p.groups * p.per_group);
  const double size = static_cast<double>(p.head_size) / 128;
  const double of_size = 1 - kCostModel.tile_of_size + kCostModel.tile_of_size * size;
  const auto microseconds = [&](const MaskTiles& mask, const AttentionItems& of, double tile) {
    const auto items = static_cast<double>(of.Count());
    const double blocks =
        std::max(1.0, std::min(items, static_cast<double>(p.gpu.multiprocessors)));
    const double clocks =
        heads * static_cast<double>(mask.capacity) * tile * of_size + items * kCostModel.item;
    return clocks / blocks / kClocksOfMicrosecond;
  };
  return kCostModel.launch_us + microseconds(p.mask, RowItemsOf(p), kCostModel.rows_tile) +
         microseconds(p.transposed_mask, KeyItemsOf(p), kCostModel.keys_tile);
}

}  // namespace

extern constinit const CudaVariant<AttentionCotangentProblem> kAttentionCotangentTiles = {
    "tiles", Fits, Cost, Source, Shape, &kAttentionCotangentOfRows, Launch, WorkspaceBytes};

}  // namespace jaxsparse
